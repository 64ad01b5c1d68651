"""Every function that a target runs: over what, on which engines, with how many cases, and what is known of it.

A row is a function of a package together with what lies beneath it, so that sglang's step over our kernels and the same
step over aiter's are two. Nothing is said of a run that is not at hand: cases come from the results that are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from fuzz.doctor import NEVER_EXECUTED, NEVER_EXECUTED_ON
from fuzz.ledger import Defect
from fuzz.plain import Fields, PlainError, read_json
from fuzz.report.summary import SCHEMA
from oracle.declare import Declaration
from oracle.kinds import Engine

Reasons = Mapping[str, Mapping[Engine, str | None]]
"""By target, why it cannot run on each engine here, None where it can."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One function over what lies beneath it. ``cases`` and ``new`` are None where no result says anything.

    ``state``: the engines that run it here, or why none does. ``known``: ids of ledger entries about its targets;
    ``new``: findings that no entry explains.
    """

    function: str
    package: str
    beneath: tuple[str, ...]
    targets: tuple[str, ...]
    state: str
    cases: int | None
    known: tuple[str, ...]
    new: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def rows(
    targets: Sequence[Declaration], reasons: Reasons, ledger: Sequence[Defect], results: Sequence[Mapping[str, Any]]
) -> list[Row]:
    """A row for each function and what lies beneath it, in the order in which targets name them.

    ``results``: the ``--json`` objects of ``fuzz`` and gpu_diff, or result bundles.
    """
    by_function: dict[tuple[str, str, tuple[str, ...]], list[Declaration]] = {}
    for target in targets:
        for place, named in enumerate(target.runs):
            package, _, function = named.partition(" ")
            # A caller is named before what it calls.
            others = tuple(other for other in target.runs[place:] if other.partition(" ")[0] != package)
            by_function.setdefault((function, package, others), []).append(target)
    found = []
    for (function, package, beneath), own in by_function.items():
        names = tuple(target.name for target in own)
        row = Row(
            function=function,
            package=package,
            beneath=beneath,
            targets=names,
            state=_state(own, reasons),
            cases=_total(results, names, lambda result, target: int(target["cases"])),
            known=tuple(d.id for d in ledger if set(d.targets) & set(names)),
            new=_total(results, names, _new),
        )
        found.append(row)
    return found


def _state(own: Sequence[Declaration], reasons: Reasons) -> str:
    works = [engine for engine in Engine if any(reasons[target.name][engine] is None for target in own)]
    if works:
        return ", ".join(works)
    declared = {engine for target in own for engine in target.engines}
    never = f"{NEVER_EXECUTED}: " if declared <= set(NEVER_EXECUTED_ON) else ""
    # What the emulator lacks can be had on any machine; another GPU cannot.
    mine = [reasons[own[0].name][engine] for engine in sorted(declared, key=lambda e: e is not Engine.EMULATOR)]
    return never + next((reason for reason in mine if reason), "cannot run here")


def _total(results: Sequence[Mapping[str, Any]], names: Sequence[str], count: Any) -> int | None:
    """Sum over the results that know one of the targets."""
    found = [count(result, target) for result in results for name, target in result["targets"].items() if name in names]
    return sum(found) if found else None


def _new(result: Mapping[str, Any], target: Mapping[str, Any]) -> int:
    """Findings of a target that no entry explains. A bundle lists ids, and findings apart."""
    listed = {f["id"]: f for f in result.get("findings", ())}
    return sum((listed[f] if isinstance(f, str) else f)["known"] is None for f in target["findings"])


def read_result(path: Path) -> dict[str, Any]:
    """A ``--json`` object, or a result bundle. Raises ``Stop`` with one line for a file that is neither."""
    return read_json(path, _result)


def _result(data: Any) -> dict[str, Any]:
    own = Fields(data, "result")
    own.schema(SCHEMA)
    targets = own.fields("targets")
    for name in targets.data:
        target = targets.fields(name)
        target.count("cases")
        try:
            _new(data, target.data)
        except (KeyError, TypeError):
            raise PlainError(f"{target.where}.findings: allowed: findings, or ids of result.findings") from None
    return dict(own.data)


def table(found: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    never = ", ".join(f"{engine}: {NEVER_EXECUTED}" for engine in NEVER_EXECUTED_ON)
    shown = Table(title=f"functions ({never})")
    for name in ("function", "of", "over", "state", "cases", "known", "new"):
        shown.add_column(name, overflow="fold")
    for row in found:
        over = ", ".join(row.beneath) or "itself"
        counts = ["-" if count is None else str(count) for count in (row.cases, len(row.known), row.new)]
        shown.add_row(row.function, row.package, over, row.state, *counts)
    return shown
