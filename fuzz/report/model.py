"""A run as a report shows it, read from plain data: the ``--json`` object, findings, earlier nights' objects."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fuzz.campaign.finding import SCHEMA as FINDING_SCHEMA
from fuzz.case import case_from_dict
from fuzz.check.diagnosis import others_of
from fuzz.check.picture import INFINITE, LEVELS, NOT_JUDGED, SIDE
from fuzz.check.result import Check
from fuzz.plain import Fields, PlainError
from fuzz.report.summary import SCHEMA as SUMMARY_SCHEMA
from oracle.verdict import Verdict

_ROWS = 64
_MOST_KEYS = 1 << 16


@dataclass(frozen=True)
class Grid:
    """Levels of error/budget (``fuzz.check.picture``), None where nothing is judged; what rows and columns are."""

    levels: tuple[tuple[int | None, ...], ...]
    tokens: int
    columns: int
    column: str


@dataclass(frozen=True)
class KeysOfRow:
    """What a row attended to, of ``keys`` keys: runs (first, count), and the range that it may see."""

    row: int
    request: int
    heads: tuple[int, ...]
    keys: int
    visible: tuple[int, int]
    missing: tuple[tuple[int, int], ...]
    extra: tuple[tuple[int, int], ...]
    foreign: int
    told: bool


@dataclass(frozen=True)
class FindingView:
    """One finding. ``case`` is JSON text, empty where only the run's object tells of the finding."""

    id: str
    target: str
    check: str
    verdict: str
    message: str
    diagnosis: str | None
    detail: str | None
    worst_ratio: float | None
    known: str | None
    engine: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    case: str = ""
    path: str | None = None
    modules: tuple[str, ...] = ()
    folder: str | None = None
    """with its reproducer, as the page says it"""
    grids: tuple[Grid, ...] = ()
    keys: tuple[KeysOfRow, ...] = ()
    others: tuple[str, ...] = ()
    """what explains it as well as ``detail``"""
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def state(self) -> str:
        """``new`` or ``known``."""
        return "new" if self.known is None else "known"


@dataclass(frozen=True)
class TargetView:
    """One target of one run. ``matrix``: feature, feature, pairs seen, pairs declared."""

    name: str
    cases: int
    elements: int
    worst_ratio: float | None
    verdicts: Mapping[str, int]
    skipped: Mapping[str, int]
    margins: Mapping[str, float]
    time: Mapping[str, float]
    pairs: int = 0
    pairs_declared: int = 0
    holes: tuple[str, ...] = ()
    boundaries: tuple[str, ...] = ()
    boundaries_missing: tuple[str, ...] = ()
    matrix: tuple[tuple[str, str, int, int], ...] = ()
    cells: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    """by dtypes and boundary class: features tried with both, and how many can be"""
    findings: tuple[FindingView, ...] = ()

    @property
    def seconds(self) -> float:
        """What the workers spent on it."""
        return sum(self.time.values())

    @property
    def rate(self) -> float | None:
        """Cases per second of a worker, None where nothing was timed."""
        return self.cases / self.seconds if self.cases and self.seconds > 0 else None


@dataclass(frozen=True)
class RunView:
    """One run: its ``--json`` object. ``ended``: when, as text, where the store knows."""

    engine: str
    seed: int | None
    versions: tuple[tuple[str, str], ...]
    targets: tuple[TargetView, ...]
    harness_errors: tuple[str, ...]
    ended: str | None

    @property
    def ran(self) -> tuple[TargetView, ...]:
        """Targets with cases."""
        return tuple(t for t in self.targets if t.cases)

    @property
    def absent(self) -> tuple[TargetView, ...]:
        """Targets that did not run at all."""
        return tuple(t for t in self.targets if not t.cases)

    @property
    def cases(self) -> int:
        """Of all targets."""
        return sum(t.cases for t in self.targets)

    @property
    def elements(self) -> int:
        """Compared with the oracle, of all targets."""
        return sum(t.elements for t in self.targets)

    @property
    def seconds(self) -> float:
        """Of all workers."""
        return sum(t.seconds for t in self.targets)

    @property
    def verdicts(self) -> Counter[str]:
        """Cases by verdict."""
        total: Counter[str] = Counter()
        for target in self.targets:
            total.update(target.verdicts)
        return total

    def findings(self, state: str) -> int:
        """How many there are that are ``new`` or ``known``."""
        return sum(f.state == state for t in self.targets for f in t.findings)


@dataclass(frozen=True)
class Report:
    """What is shown. ``run`` may be None: then there are findings alone. ``history`` is in order of time.

    ``bad`` are files that could not be read, a line each.
    """

    run: RunView | None
    findings: tuple[FindingView, ...]
    history: tuple[RunView, ...] = ()
    bad: tuple[str, ...] = ()
    plain: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        summary: object | None,
        findings: Iterable[object] = (),
        history: Iterable[object] = (),
        *,
        paths: Mapping[str, str] | None = None,
        folders: Mapping[str, str] | None = None,
        bad: Sequence[str] = (),
    ) -> Report:
        """Read plain data: a ``--json`` object, finding objects, earlier ``--json`` objects; a finding's file, and
        the folder with its reproducer, by id.

        Findings that only ``summary`` tells of are shown as far as it does. Raises ``PlainError`` and ``CaseError``.
        """
        given, past = list(findings), list(history)
        run = None if summary is None else read_run(summary)
        views = {view.id: view for view in (read_finding(one, paths, folders) for one in given)}
        for target in run.targets if run else ():
            for view in target.findings:
                views.setdefault(view.id, view)
        ordered = sorted(views.values(), key=lambda v: (v.known is not None, v.target, v.check, v.id))
        plain = {"schema": SUMMARY_SCHEMA, "run": summary, "findings": given, "history": past, "unreadable": list(bad)}
        return cls(run, tuple(ordered), tuple(read_run(one, "history") for one in past), tuple(bad), plain)

    @cached_property
    def new(self) -> tuple[FindingView, ...]:
        """Findings that no ledger entry explains."""
        return tuple(f for f in self.findings if f.known is None)

    @cached_property
    def known(self) -> tuple[FindingView, ...]:
        """Findings that are in the ledger."""
        return tuple(f for f in self.findings if f.known is not None)

    @property
    def nights(self) -> tuple[RunView, ...]:
        """Earlier runs and this one."""
        return (*self.history, *([self.run] if self.run else []))

    @property
    def title(self) -> str:
        """The result in a few words."""
        new, known = len(self.new), len(self.known)
        if self.run is not None and self.run.harness_errors:
            return f"the harness failed; {_several(new, 'new finding')}"
        if not new and self.run is not None and not self.run.ran:
            return "nothing ran"
        return f"{_several(new, 'new finding')}" + (f", {known} known" if known else "")


def _several(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


# ------------------------------------------------------------------- findings


def read_finding(
    data: object, paths: Mapping[str, str] | None = None, folders: Mapping[str, str] | None = None
) -> FindingView:
    """Read a finding's plain data. Raises ``PlainError`` and ``CaseError``."""
    own = Fields(data, "finding")
    own.schema(FINDING_SCHEMA)
    name = own.text("id")
    case = case_from_dict(own.fields("case").data)
    evidence = own.fields("evidence", {})
    diagnosis = own.text("diagnosis", None)
    return FindingView(
        id=name,
        target=own.text("target"),
        check=own.one_of("check", Check),
        verdict=own.one_of("verdict", Verdict),
        message=own.text("message"),
        diagnosis=diagnosis,
        detail=_detail(evidence),
        worst_ratio=own.number("worst_ratio", None),
        known=own.text("known", None),
        engine=own.text("engine"),
        versions=_versions(own),
        case=case.to_json(),
        path=(paths or {}).get(name),
        modules=own.texts("modules"),
        folder=(folders or {}).get(name),
        grids=tuple(_grids(evidence)),
        keys=tuple(_keys(one) for one in evidence.each("keys")),
        others=others_of(evidence.data),
        facts=(*_said(own), *_facts(evidence.data)),
    )


def _detail(evidence: Fields) -> str | None:
    diagnosis = evidence.data.get("diagnosis")
    if diagnosis is None:
        return None
    detail: str = Fields(diagnosis, f"{evidence.where}.diagnosis").text("detail")
    return detail


def _versions(own: Fields) -> tuple[tuple[str, str], ...]:
    inner = own.fields("versions", {})
    return tuple((str(name), inner.text(name, None) or "not installed") for name in inner.data)


def _grids(evidence: Fields) -> Iterable[Grid]:
    if evidence.data.get("map") is None:
        return
    own = evidence.fields("map")
    shape = own.integers("shape")
    if len(shape) not in (2, 3):
        raise PlainError(f"{own.where}.shape: {list(shape)}; allowed: 2 or 3 integers")
    for name, column, size in (("by_head", "head", shape[1]), ("by_dim", "dimension", shape[-1])):
        rows = own.texts(name)
        if rows:
            yield Grid(_levels(rows, f"{own.where}.{name}"), shape[0], size, column)


def _levels(rows: Sequence[str], where: str) -> tuple[tuple[int | None, ...], ...]:
    if len(rows) > SIDE:
        raise PlainError(f"{where}: {len(rows)} rows; allowed: at most {SIDE}")
    grid = tuple(tuple(_level(text, where) for text in row[: 8 * SIDE].split()) for row in rows)
    if len({len(row) for row in grid}) != 1 or not 0 < len(grid[0]) <= SIDE:
        raise PlainError(f"{where}: rows of different lengths; allowed: 1 to {SIDE} levels in each")
    return grid


def _level(text: str, where: str) -> int | None:
    if text == NOT_JUDGED:
        return None
    try:
        level = int(text)
    except ValueError:
        level = INFINITE + 1
    if level != INFINITE and not LEVELS[0] <= level <= LEVELS[1]:
        allowed = f"{LEVELS[0]} to {LEVELS[1]}, {INFINITE} and {NOT_JUDGED!r}"
        raise PlainError(f"{where}: level {text[:20]!r}; allowed: {allowed}")
    return level


def _keys(own: Fields) -> KeysOfRow:
    keys = own.count("keys")
    low, high = own.integers("visible", 2)
    told = own.data.get("told")
    if not low <= high <= keys <= _MOST_KEYS or type(told) is not bool:
        raise PlainError(f"{own.where}: allowed: 0 <= visible <= keys <= {_MOST_KEYS}, told true or false")
    return KeysOfRow(
        row=own.count("row"),
        request=own.count("request"),
        heads=own.integers("heads"),
        keys=keys,
        visible=(low, high),
        missing=_runs(own, "missing", keys),
        extra=_runs(own, "extra", keys),
        foreign=own.count("foreign"),
        told=told,
    )


def _runs(own: Fields, name: str, keys: int) -> tuple[tuple[int, int], ...]:
    found = []
    for index, run in enumerate(own.list(name, [])):
        first, count = Fields({name: run}, own.where).integers(name, 2)
        if first + count > keys:
            raise PlainError(f"{own.where}.{name}[{index}]: {run}; allowed: a run within {keys} keys")
        found.append((first, count))
    return tuple(found)


def _said(own: Fields) -> Iterable[tuple[str, str]]:
    """What the store adds to a finding."""
    for name in ("severity", "reachability"):
        if (said := own.text(name, None)) is not None:
            yield name, said
    if (cases := own.count("cases", None)) is not None:
        yield "cases that show it", str(cases)


_DRAWN = ("map", "grid", "keys", "diagnosis")


def _facts(evidence: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What a check noted, a line each, but for what is drawn."""
    for name, value in evidence.items():
        if name not in _DRAWN and value not in (None, [], ""):
            text = value if isinstance(value, str) else json.dumps(value)
            yield str(name).replace("_", " "), text if len(text) <= 600 else text[:597] + "..."


# ----------------------------------------------------------------------- runs


def read_run(data: object, where: str = "run") -> RunView:
    """Read a ``--json`` object. Raises ``PlainError``."""
    own = Fields(data, where)
    own.schema(SUMMARY_SCHEMA)
    targets = own.fields("targets")
    return RunView(
        engine=own.text("engine"),
        seed=own.count("seed", None),
        versions=_versions(own),
        targets=tuple(_target(str(name), Fields(one, f"{where}.{name}")) for name, one in targets.data.items()),
        harness_errors=tuple(error.text("message") for error in own.each("harness_errors")),
        ended=own.text("ended", None),
    )


def _target(name: str, own: Fields) -> TargetView:
    coverage = own.fields("coverage", {})
    return TargetView(
        name=name,
        cases=own.count("cases"),
        elements=own.count("elements", 0),
        worst_ratio=own.number("worst_ratio", None),
        verdicts=own.counts("verdicts"),
        skipped=own.counts("skipped"),
        margins=own.numbers("margins"),
        time=own.numbers("time"),
        pairs=coverage.count("pairs", 0),
        pairs_declared=coverage.count("pairs_declared", 0),
        holes=coverage.texts("holes"),
        boundaries=coverage.texts("boundary_classes"),
        boundaries_missing=coverage.texts("boundary_classes_missing"),
        matrix=tuple(_entry(coverage, entry) for entry in coverage.list("matrix", [])),
        cells=_cells(coverage.fields("boundaries", {})),
        findings=tuple(_told(name, one) for one in own.each("findings")),
    )


def _cells(own: Fields) -> dict[str, dict[str, tuple[int, int]]]:
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for dtypes in own.data:
        row = own.fields(dtypes)
        for boundary in row.data:
            seen, declared = row.integers(boundary, 2)
            found.setdefault(str(dtypes), {})[str(boundary)] = (seen, declared)
    return found


def _entry(coverage: Fields, entry: object) -> tuple[str, str, int, int]:
    match entry:
        case [str(a), str(b), int(seen), int(declared)] if 0 <= seen <= declared:
            return a, b, seen, declared
    raise PlainError(f"{coverage.where}.matrix: allowed: [feature, feature, pairs seen, pairs declared]")


def _told(target: str, own: Fields) -> FindingView:
    """A finding as a run's object has it."""
    check = own.one_of("check", Check)
    return FindingView(
        id=own.text("id"),
        target=target,
        check=check,
        verdict=check if check in (Check.CRASH, Check.HANG) else Verdict.FAIL,
        message=own.text("message"),
        diagnosis=own.text("diagnosis", None),
        detail=None,
        worst_ratio=own.number("worst_ratio", None),
        known=own.text("known", None),
        path=own.text("case", None),
    )
