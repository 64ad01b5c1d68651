"""Known defects: what fails, where, since when, and the case that shows it.

A failure is known if an entry names its target and check, applies to the engine and the installed versions,
and asks for no feature that the failing case lacks. An entry whose own case passes on one of its targets is stale.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from fuzz.case import Case, CaseError, load_case
from fuzz.check.result import Check
from fuzz.errors import Expected
from fuzz.features import labels
from oracle.declare import Declaration
from oracle.kinds import Engine

SCHEMA = 1

Versions = Mapping[str, str | None]
"""Installed version of each package, None where it is missing."""


class LedgerError(Expected, ValueError):
    """A ledger that cannot be read. One line: the entry, the field and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One entry.

    Each of ``targets`` shows the defect by the entry's case (``case_for``). ``checks`` lists every check by which it
    shows (an engine may crash where another reports an address); ``diagnosis`` is a class, None matches any;
    ``features`` maps a feature to the labels that trigger it; ``upstream`` is a public reference or "unreported".
    """

    id: str
    targets: tuple[str, ...]
    summary: str
    checks: tuple[Check, ...]
    diagnosis: str | None
    features: Mapping[str, tuple[str, ...]]
    engines: tuple[Engine, ...]
    packages: Mapping[str, SpecifierSet]
    upstream: str
    severity: str
    reachability: str
    case: Case

    def applies(self, engine: Engine, versions: Versions) -> bool:
        """Whether the entry says anything about this engine and these versions."""
        return engine in self.engines and all(
            (version := versions.get(name)) is not None and specifier.contains(version, prereleases=True)
            for name, specifier in self.packages.items()
        )

    def case_for(self, declaration: Declaration) -> Case:
        """The entry's case; in its own format for a target whose pool holds another 8-bit one."""
        case, own = self.case, declaration.supports.kv_dtypes
        if case.kv_dtype == case.dtype or not own or case.kv_dtype in own:
            return case
        return replace(case, kv_dtype=own[0])

    def matches(self, target: str, check: Check, diagnosis: str | None, case: Case) -> bool:
        """Whether a failure is this defect."""
        shown = labels(case)
        return (
            target in self.targets
            and check in self.checks
            and self.diagnosis in (None, diagnosis)
            and all(any((name, label) in shown for label in allowed) for name, allowed in self.features.items())
        )


def load(path: Path) -> tuple[Defect, ...]:
    """Read a ledger: TOML, a ``schema`` and ``[[defect]]`` tables; case files lie beside it.

    Raises ``LedgerError``.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LedgerError(f"{path}: {error}") from None
    if data.get("schema") != SCHEMA:
        raise LedgerError(f"{path}: schema: {data.get('schema')!r}; allowed: {SCHEMA}")
    unknown = data.keys() - {"schema", "defect"}
    if unknown:
        raise LedgerError(f"{path}: {min(unknown)}: unknown; allowed: schema, [[defect]]")
    entries = data.get("defect", [])
    if not isinstance(entries, list):
        raise LedgerError(f"{path}: defect: allowed: [[defect]] tables")
    defects = tuple(_defect(path, i, entry) for i, entry in enumerate(entries))
    ids = [defect.id for defect in defects]
    for name in ids:
        if ids.count(name) > 1:
            raise LedgerError(f"{path}: id: {name!r} is given twice")
    return defects


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text")
    return value


def _line(value: Any) -> str:
    text = _text(value)
    if len(text.splitlines()) > 1:
        raise ValueError("text of one line")
    return text


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of text")
    return tuple(_text(v) for v in value)


def _targets(value: Any) -> tuple[str, ...]:
    """A target's name, or several."""
    try:
        return _texts([value] if isinstance(value, str) else value)
    except ValueError:
        raise ValueError("a target's name, or a list of them") from None


def _checks(value: Any) -> tuple[Check, ...]:
    try:
        return tuple(Check(v) for v in _texts(value))
    except ValueError:
        raise ValueError(f"a list of {', '.join(Check)}") from None


def _engines(value: Any) -> tuple[Engine, ...]:
    try:
        return tuple(Engine(v) for v in _texts(value))
    except ValueError:
        raise ValueError(f"a list of {', '.join(Engine)}") from None


def _features(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise ValueError("a table of feature = [labels]")
    return {name: _texts(allowed) for name, allowed in value.items()}


def _packages(value: Any) -> dict[str, SpecifierSet]:
    if not isinstance(value, dict):
        raise ValueError("a table of package = version range")
    try:
        return {name: SpecifierSet(_text(text)) for name, text in value.items()}
    except InvalidSpecifier:
        raise ValueError('version ranges such as ">=0.5.15,<0.6"') from None


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "id": _text,
    "target": _targets,
    "summary": _line,
    "checks": _checks,
    "features": _features,
    "engines": _engines,
    "packages": _packages,
    "upstream": _text,
    "severity": _line,
    "reachability": _line,
    "case": _text,
}


def _defect(path: Path, index: int, entry: Any) -> Defect:
    where = f"{path}: defect {index + 1}"
    if not isinstance(entry, dict):
        raise LedgerError(f"{where}: allowed: a table")
    for name in entry:
        if name not in _FIELDS and name != "diagnosis":
            raise LedgerError(f"{where}: {name}: unknown; allowed: {', '.join(_FIELDS)}, diagnosis")
    parsed: dict[str, Any] = {}
    for name, parse in _FIELDS.items():
        if name not in entry:
            raise LedgerError(f"{where}: {name}: missing")
        try:
            parsed[name] = parse(entry[name])
        except ValueError as error:
            raise LedgerError(f"{where}: {name}: {entry[name]!r}; allowed: {error}") from None
    diagnosis = entry.get("diagnosis")
    if diagnosis is not None and not isinstance(diagnosis, str):
        raise LedgerError(f"{where}: diagnosis: {diagnosis!r}; allowed: text")
    try:
        case = load_case(path.parent / parsed.pop("case"))
    except CaseError as error:
        raise LedgerError(f"{where}: case: {error}") from None
    return Defect(case=case, diagnosis=diagnosis, targets=parsed.pop("target"), **parsed)
