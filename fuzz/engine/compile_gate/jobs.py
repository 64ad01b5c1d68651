"""What the gate's workers do: record the launches of a case in the emulator, or compile with Triton.

One process does one of the two: the emulator and the real Triton never meet.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from fuzz import engine as engines
from fuzz import registry
from fuzz.buffers import Poison
from fuzz.call import call
from fuzz.case import case_from_dict
from fuzz.engine.compile_gate import wire
from fuzz.engine.compile_gate.arch import Arch, parse_arch
from fuzz.engine.compile_gate.compiler import KernelNotFound, Refusal, compile_source, find_kernel, pretend, source_of
from fuzz.engine.compile_gate.signature import CannotRebuild
from fuzz.engine.emulator.session import session
from fuzz.engine.loader import pretend as pretend_machine
from fuzz.instance import build
from oracle.declare import Declaration
from oracle.kinds import Engine

Progress = Callable[[str], None]

_targets: dict[str, Declaration] = {}
_arch: list[Arch] = []


def setup_recording(options: Mapping[str, Any]) -> None:
    """Once a worker: start the emulator as a GPU of one architecture, load the targets. Keys: arch, modules."""
    torch.set_num_threads(1)
    engines.start(Engine.EMULATOR)
    pretend_machine(parse_arch(options["arch"]).device)
    _targets.update(registry.load(options["modules"]))


def record(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Call ``request["target"]`` once on ``request["case"]``.

    Returns the distinct specialisations of its launches, as ``wire`` has them, and ``stopped``: why the call
    did not come to its end, or None. What was launched before that counts. Raises where nothing was.
    """
    declaration = _targets[request["target"]]
    progress("generate")
    instance = build(case_from_dict(request["case"]), Poison.POSITIVE, "cpu")
    progress("kernel")
    stopped = None
    with session() as log:
        try:
            call(declaration, instance)
        except Exception as error:
            if not log.launches:
                raise
            stopped = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    made = [wire.to_dict(launch.specialisation) for launch in log.launches if launch.specialisation is not None]
    distinct = {json.dumps(data): data for data in made}
    return {"specialisations": list(distinct.values()), "stopped": stopped}


def setup_compiling(options: Mapping[str, Any]) -> None:
    """Once a worker: make it one architecture's, load the targets' modules. Keys: arch, modules."""
    arch = parse_arch(options["arch"])
    engines.start(arch.engine, compile_only=True)
    pretend_machine(arch.device)
    pretend(arch)
    registry.load(options["modules"])
    _arch[:] = [arch]


def compile_one(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Compile ``request["specialisation"]`` of a kernel that the module ``request["adapter"]`` loads.

    Returns ``resources``, or ``refused`` with ``line``, or ``not_judged``. The compiler is at work in the phase
    ``kernel``; whatever its later passes raise passes through.
    """
    (arch,) = _arch
    specialisation = wire.from_dict(request["specialisation"])
    progress("load")
    adapter = sys.modules.get(request["adapter"]) or importlib.import_module(request["adapter"])
    try:
        kernel = find_kernel(adapter, specialisation.file, specialisation.kernel)
        source = source_of(kernel, specialisation, arch)
    except (KernelNotFound, CannotRebuild) as error:
        return {"not_judged": str(error)}
    progress("kernel")
    result = compile_source(kernel, source, dict(specialisation.options), arch)
    if isinstance(result, Refusal):
        return {"refused": result.message, "line": result.line}
    return {"resources": asdict(result)}
