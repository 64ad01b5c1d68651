"""What a worker does: run one case on one target and report plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuzz import engine as engines
from fuzz import registry
from fuzz.case import case_from_dict
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.check.run import check_case
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict

_targets: dict[str, Declaration] = {}


def setup(options: Mapping[str, Any]) -> None:
    """Once a worker: start the engine, load the targets. Keys: engine, modules, threads."""
    torch.set_num_threads(options["threads"])
    engines.start(Engine(options["engine"]))
    _targets.update(registry.load(options["modules"]))


def run(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Judge ``request["case"]`` on ``request["target"]``; returns ``CaseResult.to_dict()``.

    Whatever a target raises in its own call is the finding CRASH; what our code raises passes through.
    """
    progress("generate")
    phase = "generate"

    def note(name: str) -> None:
        nonlocal phase
        phase = name
        progress(name)

    declaration, case = _targets[request["target"]], case_from_dict(request["case"])
    try:
        result = check_case(declaration, case, engines.current(), note)
    except Exception as error:
        if phase != "kernel":
            raise
        return _raised(error)
    return result.to_dict()


def _raised(error: Exception) -> dict[str, Any]:
    unsupported = engines.unsupported_reason(error)
    if unsupported is not None:
        return CaseResult(checks=(), reason=unsupported).to_dict()
    message = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
    crash = CheckResult(Check.CRASH, Verdict.CRASH, message, {"exception": type(error).__name__})
    # A device error sticks to the process: the next case needs a new one.
    retire = engines.current() is not Engine.EMULATOR
    return CaseResult(checks=(crash,)).to_dict() | {"retire": retire}
