"""What is known of a target: where it runs, and what its convention and its precision were read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fuzz.doctor import NEVER_EXECUTED, NEVER_EXECUTED_ON
from fuzz.sources import Reading, reading
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.precision import Precision

Reasons = Mapping[Engine, str | None]
"""Why a target cannot run on each engine here, None where it can."""


def to_dict(declaration: Declaration, reasons: Reasons) -> dict[str, Any]:
    """Plain data. ``precision`` by dtype, ``any`` where one holds for all; None where none is declared."""
    return {
        "operation": declaration.operation,
        "engines": dict(reasons),
        "archs": list(declaration.supports.archs),
        "compiler": declaration.supports.compiler,
        "runs": list(declaration.runs),
        "never_executed": [engine for engine in declaration.engines if engine in NEVER_EXECUTED_ON],
        "convention_source": declaration.convention.source,
        "precision": {name: _precision(p) for name, p in by_dtype(declaration).items()} or None,
    }


def by_dtype(declaration: Declaration) -> dict[str, Precision]:
    """The precisions that a target declares, ``any`` where one holds for all dtypes; none where it declares none."""
    declared = declaration.precision
    if declared is None:
        return {}
    return dict(declared) if isinstance(declared, Mapping) else {"any": declared}


def _precision(precision: Precision) -> dict[str, Any]:
    return {
        "source": precision.source,
        "cited": [asdict(citation) for citation in precision.cited],
        "installed": reading(precision),
        "loosest": list(precision.loosest()),
    }


def lines(declaration: Declaration, reasons: Reasons) -> Iterator[str]:
    """The target in one line, and one for each thing that its user should know."""
    works = [_engine(engine, declaration) for engine, reason in reasons.items() if reason is None]
    yield f"{declaration.name}  {declaration.operation}  {', '.join(works) or 'cannot run here'}"
    if declaration.runs:
        yield f"    runs {', '.join(declaration.runs)}"
    for engine, reason in reasons.items():
        never = f"; {NEVER_EXECUTED}" if engine in NEVER_EXECUTED_ON and engine in declaration.engines else ""
        if reason is not None or never:
            said = reason or "works"
            yield f"    {said}{never}" if said.startswith(engine) else f"    {engine}: {said}{never}"
    precisions = by_dtype(declaration)
    if not precisions:
        yield "    no precision declared: every budget is the loosest"
    for precision in {p.cited: p for p in precisions.values() if reading(p) is Reading.OTHER}.values():
        files = ", ".join(dict.fromkeys(citation.file for citation in precision.cited))
        yield f"    precision read from another version of {files}"


def _engine(engine: Engine, declaration: Declaration) -> str:
    archs = declaration.supports.archs
    return f"{engine} as {', '.join(archs)}" if engine is Engine.EMULATOR and archs else engine.value
