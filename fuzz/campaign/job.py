"""What a worker does: run one case on one target and report plain data."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import fuzz
import oracle
from fuzz import engine as engines
from fuzz import registry
from fuzz.buffers import Poison
from fuzz.call import ResultError, Unsupported
from fuzz.case import case_from_dict
from fuzz.check import scratch
from fuzz.check.agreement import outputs_of
from fuzz.check.execute import execute
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.check.run import check_case
from fuzz.engine.emulator import KernelError
from fuzz.tensor_data import to_data
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict

_targets: dict[str, Declaration] = {}


def setup(options: Mapping[str, Any]) -> None:
    """Once a worker: start the engine, load the targets. Keys: engine, modules, threads."""
    torch.set_num_threads(options["threads"])
    engines.start(Engine(options["engine"]))
    engines.warm(engines.current())
    _targets.update(registry.load(options["modules"]))


def declared(target: str) -> Declaration:
    """A target that ``setup`` has loaded."""
    return _targets[target]


def run(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Judge ``request["case"]`` on ``request["target"]``; returns ``CaseResult.to_dict()``, with coverage if
    ``request["coverage"]`` is given and true.

    Whatever a target raises in its own call is the finding CRASH; what our code raises passes through, also
    where a target called it.
    """
    progress("generate")
    phase = "generate"

    def note(name: str) -> None:
        nonlocal phase
        phase = name
        progress(name)

    declaration, case = _targets[request["target"]], case_from_dict(request["case"])
    try:
        result = check_case(declaration, case, engines.current(), note, request["coverage"])
    except (Exception, SystemExit) as error:
        if phase != "kernel" or ours(error):
            raise
        return _crashed(error)
    return result.to_dict()


def outputs(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Outputs of ``request["case"]`` on ``request["target"]``, not judged: "outputs" (``tensor_data.to_data``), or
    "unsupported" or "raised", one line that says what.
    """
    declaration, case = _targets[request["target"]], case_from_dict(request["case"])
    try:
        run = execute(declaration, case, Poison.POSITIVE, engines.current(), progress)
    except Unsupported as error:
        return {"unsupported": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a target raises
        unsupported = engines.unsupported_reason(error)
        return _crashed(error) | ({"raised": str(error)} if unsupported is None else {"unsupported": unsupported})
    return {"outputs": to_data(outputs_of(run))}


_OUR_FOLDERS = tuple(Path(str(package.__file__)).parent for package in (fuzz, oracle))


def ours(error: BaseException) -> bool:
    """Whether ``error`` was raised in our code rather than in the target's.

    The innermost Python frame tells. What the emulator says of a kernel is about the kernel, and allocations only
    pass through us.
    """
    if isinstance(error, KernelError | Unsupported | ResultError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    innermost = Path(frames[-1].filename)
    return innermost != Path(scratch.__file__) and any(folder in innermost.parents for folder in _OUR_FOLDERS)


def crash(error: BaseException) -> CaseResult:
    """What a target raised in its own call: CRASH, or the reason where this engine lacks what it needs."""
    unsupported = engines.unsupported_reason(error)
    if unsupported is not None:
        return CaseResult(checks=(), reason=unsupported)
    message = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
    evidence = {"exception": type(error).__name__, "where": _where(error)}
    return CaseResult(checks=(CheckResult(Check.CRASH, Verdict.CRASH, message, evidence),))


def _where(error: BaseException) -> str | None:
    """The innermost line that is neither ours nor torch's: file, line, function."""
    skipped = (*_OUR_FOLDERS, Path(str(torch.__file__)).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not any(folder in Path(frame.filename).parents for folder in skipped)]
    return f"{Path(theirs[-1].filename).name}, line {theirs[-1].lineno}, in {theirs[-1].name}" if theirs else None


def _crashed(error: BaseException) -> dict[str, Any]:
    result = crash(error)
    if result.reason:
        return result.to_dict()
    # Where the device's error sticks to the process, the next case needs a new one.
    return result.to_dict() | {"retire": not engines.works(engines.current())}
