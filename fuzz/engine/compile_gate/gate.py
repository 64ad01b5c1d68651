"""The driver: compiles specialisations in workers, and says of each what came of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fuzz.campaign.pool import Pool
from fuzz.campaign.reply import Reply, Status
from fuzz.campaign.server import Server
from fuzz.campaign.worker import Job, Limits
from fuzz.engine.compile_gate import wire
from fuzz.engine.compile_gate.arch import Arch
from fuzz.engine.compile_gate.resources import Resources
from fuzz.engine.emulator.specialisation import Specialisation

TIMEOUT_S = 300.0
"""A specialisation takes about a second. A compiler that is at it for minutes will not end."""

MEMORY_BYTES = 16 << 30
"""No kernel needs this much: a compiler that takes it runs away."""

_JOB = "fuzz.engine.compile_gate.jobs"
_MESSAGE_CHARS = 500


class Outcome(StrEnum):
    """What the compiler made of a specialisation. NOT_JUDGED: it was never asked, or not for this reason."""

    COMPILES = "compiles"
    FAILS = "fails"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Request:
    """A specialisation, and the module whose ``KernelLoader`` loads its kernel."""

    adapter: str
    specialisation: Specialisation


@dataclass(frozen=True)
class Compilation:
    """One specialisation for one architecture.

    ``message`` is one line: why it fails, or was not judged. ``line`` is the kernel file's, where the compiler
    names one. ``resources`` are known where it compiles, and where too much shared memory is the failure.
    """

    arch: Arch
    specialisation: Specialisation
    outcome: Outcome
    message: str = ""
    line: int | None = None
    resources: Resources | None = None
    seconds: float = 0.0


def compile_all(
    requests: Sequence[Request],
    arch: Arch,
    *,
    modules: Sequence[str] = (),
    jobs: int = 1,
    timeout_s: float = TIMEOUT_S,
    server: Server | None = None,
) -> Iterator[Compilation]:
    """Compile each request for ``arch``, in order. ``modules`` are the user's own target modules.

    Triton has to be installed. Compilations are cached as Triton caches them (``TRITON_CACHE_DIR``).
    """
    job = Job(f"{_JOB}:compile_one", f"{_JOB}:setup_compiling", {"arch": arch.name, "modules": list(modules)})
    plain = ({"adapter": r.adapter, "specialisation": wire.to_dict(r.specialisation)} for r in requests)
    with Pool(job, jobs, server, Limits(memory_bytes=MEMORY_BYTES)) as pool:
        for index, reply in pool.map(plain, timeout_s):
            yield judge(requests[index].specialisation, arch, reply)


def judge(specialisation: Specialisation, arch: Arch, reply: Reply) -> Compilation:
    """Read a worker's reply."""
    seconds = reply.seconds.get("kernel", 0.0)
    if not reply.ok or reply.value is None:
        outcome, message = _failure(reply)
        return Compilation(arch, specialisation, outcome, message[:_MESSAGE_CHARS], seconds=seconds)
    if "not_judged" in reply.value:
        return Compilation(arch, specialisation, Outcome.NOT_JUDGED, reply.value["not_judged"], seconds=seconds)
    if "refused" in reply.value:
        message, line = reply.value["refused"][:_MESSAGE_CHARS], reply.value["line"]
        return Compilation(arch, specialisation, Outcome.FAILS, message, line, seconds=seconds)
    resources = Resources(**reply.value["resources"])
    outcome, message = Outcome.COMPILES, ""
    if arch.shared_limit is not None and resources.shared > arch.shared_limit:
        outcome = Outcome.FAILS
        message = f"needs {resources.shared} bytes of shared memory; {arch.name} has {arch.shared_limit}"
    return Compilation(arch, specialisation, outcome, message, resources=resources, seconds=seconds)


def _failure(reply: Reply) -> tuple[Outcome, str]:
    if reply.harness:
        return Outcome.NOT_JUDGED, f"not loaded for the compiler: {reply.detail}"
    if reply.status is Status.OUT_OF_MEMORY:
        return Outcome.NOT_JUDGED, f"the compiler ran out of memory: {reply.detail}"
    diagnostic = _diagnostic(reply.output)
    what = {Status.CRASH: "the compiler crashed: ", Status.HANG: "the compiler hangs: "}.get(reply.status, "")
    return Outcome.FAILS, f"{what}{reply.detail}{f'; {diagnostic}' if diagnostic else ''}"


def _diagnostic(output: str) -> str:
    """The first line in which MLIR or LLVM says what is wrong."""
    found = re.search(r"^.*?((?:LLVM ERROR|error|Assertion)\b.*)$", output, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def as_dict(compilation: Compilation) -> dict[str, Any]:
    """Plain data for ``--json``."""
    resources = compilation.resources
    return {
        "arch": compilation.arch.name,
        "kernel": compilation.specialisation.kernel,
        "file": compilation.specialisation.file,
        "line": compilation.line,
        "arguments": wire.words(compilation.specialisation),
        "outcome": compilation.outcome,
        "message": compilation.message,
        "resources": None if resources is None else vars(resources),
        "seconds": round(compilation.seconds, 3),
    }
