"""Calls to capture: what a target was given and returned, as a production process would hold it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle
from fuzz import engine as engines
from fuzz import registry
from fuzz.buffers import Poison
from fuzz.call import arguments
from fuzz.case import Case
from fuzz.check.execute import Execution, execute
from fuzz.instance import build
from oracle.declare import Declaration
from oracle.kinds import Engine

EMULATOR = Engine.EMULATOR


def target(name: str, modules: Sequence[str] = ("suites.fuzz.planted",)) -> Declaration:
    """A target of ours, or of ``modules``, by its name."""
    return registry.load(modules)[name]


def given(declaration: Declaration, case: Case) -> dict[str, Any]:
    """The arguments that the target is called with."""
    return arguments(declaration, build(case, Poison.POSITIVE, "cpu"))


def returned(declaration: Declaration, case: Case) -> Execution:
    """One call in the emulator."""
    engines.start(EMULATOR)
    return execute(declaration, case, Poison.POSITIVE, EMULATOR, lambda phase: None)


def capture(
    path: Path, name: str, case: Case, modules: Sequence[str] = ("suites.fuzz.planted",), **changes: Any
) -> Path:
    """Capture one call of a target; ``changes`` replace arguments or outputs."""
    declaration = target(name, modules)
    call = given(declaration, case) | returned(declaration, case).outputs | changes
    assert oracle.record(path, strict=True, **call)
    return path
