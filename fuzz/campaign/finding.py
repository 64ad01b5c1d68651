"""A failed check with what is needed to show it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from fuzz.case import Case, case_from_dict
from fuzz.check.diagnosis import class_of
from fuzz.check.result import CaseResult, Check
from fuzz.errors import Expected
from fuzz.features import labels
from oracle.diagnose.model import Kind
from oracle.kinds import Engine
from oracle.verdict import Verdict

if TYPE_CHECKING:
    from fuzz.campaign.run import Settings

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One failed check of one case. ``known`` is the ledger entry that explains it, or None.

    ``diagnosis`` is a class, None where nothing was diagnosed; ``evidence`` holds its numbers.
    """

    target: str
    check: Check
    verdict: Verdict
    message: str
    evidence: Mapping[str, Any]
    diagnosis: str | None
    worst_ratio: float | None
    engine: Engine
    versions: Mapping[str, str | None]
    known: str | None
    case: Case
    modules: tuple[str, ...] = ()
    """the user's target modules, as they were named; for information"""
    entry: str | None = None
    """the ledger entry that tells it from others, also where the ledger excuses nothing"""

    @property
    def id(self) -> str:
        """Short, and the same for the same failure of the same case on the same engine."""
        key = f"{self.target}\0{self.check}\0{self.engine}\0{self.case.to_json()}"
        return blake2b(key.encode(), digest_size=5).hexdigest()

    @property
    def signature(self) -> dict[str, Any]:
        """What makes two findings the same fault: target, check, diagnosis class, features."""
        features: dict[str, list[str]] = {}
        for name, label in sorted(labels(self.case)):
            features.setdefault(name, []).append(label)
        return {
            "target": self.target,
            "check": self.check,
            "diagnosis": self.diagnosis,
            "features": features,
        }

    @property
    def fault(self) -> tuple[str | None, ...]:
        """What tells one fault from another.

        Where no diagnosis tells, what the case's operands are made of stands in for it.
        """
        case = self.case
        entry = self.known or self.entry
        told = entry is not None or self.diagnosis not in (None, Kind.UNEXPLAINED)
        made_of = () if told else (case.dtype, case.pool.value, case.index_dtype)
        return (self.target, self.check, self.diagnosis, entry, *made_of)

    @property
    def size(self) -> tuple[int, ...]:
        """How large the case is: requests, tokens, heads, dims. The smaller one is shown."""
        case = self.case
        tokens = sum(case.context_lens) + sum(case.query_lens)
        return len(case.context_lens), tokens, case.num_q_heads, case.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``finding_from_dict`` reads back what a replay needs."""
        return {
            "schema": SCHEMA,
            "id": self.id,
            "target": self.target,
            "check": self.check,
            "verdict": self.verdict,
            "message": self.message,
            "diagnosis": self.diagnosis,
            "signature": self.signature,
            "worst_ratio": self.worst_ratio,
            "engine": self.engine,
            "versions": dict(self.versions),
            "known": self.known,
            "modules": list(self.modules),
            "evidence": dict(self.evidence),
            "case": self.case.to_dict(),
        }


class FindingError(Expected, ValueError):
    """A file that is no finding. One line: the field and what is allowed."""


def finding_from_dict(data: object) -> tuple[str, Case]:
    """Target and case of a finding's plain data. Raises ``FindingError`` and ``CaseError``."""
    if not isinstance(data, Mapping):
        raise FindingError(f"finding: {type(data).__name__}; allowed: a JSON object")
    if "operation" in data and "case" not in data:
        raise FindingError("this is a case: use attn-oracle run")
    schema = data.get("schema", "missing")
    if type(schema) is not int or schema != SCHEMA:
        raise FindingError(f"finding.schema: {str(schema)[:60]!r}; allowed: {SCHEMA}, which this release reads")
    target = data.get("target", "missing")
    if not isinstance(target, str) or "target" not in data:
        raise FindingError(f"finding.target: {str(target)[:60]!r}; allowed: a target's name")
    return target, case_from_dict(data.get("case"))


def saved_finding(data: object) -> Finding:
    """A finding from its plain data, with everything that was kept. Raises ``FindingError`` and ``CaseError``."""
    target, case = finding_from_dict(data)
    if not isinstance(data, Mapping):
        raise FindingError(f"finding: {type(data).__name__}; allowed: a JSON object")
    text, optional = (str,), (str, type(None))
    versions = _typed(data, "versions", (dict,))
    modules = _typed(data, "modules", (list,))
    for name, value in versions.items():
        if not isinstance(value, optional):
            raise FindingError(f"finding.versions.{_one_line(name)}: {str(value)[:60]!r}; allowed: text or null")
    if not all(isinstance(module, str) for module in modules):
        raise FindingError("finding.modules: allowed: a list of text")
    return Finding(
        target=target,
        check=Check(_word(data, "check", tuple(Check))),
        verdict=Verdict(_word(data, "verdict", tuple(Verdict))),
        message=_typed(data, "message", text),
        evidence=_typed(data, "evidence", (dict,)),
        diagnosis=_typed(data, "diagnosis", optional),
        worst_ratio=_typed(data, "worst_ratio", (int, float, type(None))),
        engine=Engine(_word(data, "engine", tuple(Engine))),
        versions=versions,
        known=_typed(data, "known", optional),
        case=case,
        modules=tuple(modules),
    )


def _typed(data: Mapping[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    value = data.get(name)
    if name not in data or not isinstance(value, kinds) or isinstance(value, bool):
        shown = repr(value)[:60] if name in data else "missing"
        raise FindingError(f"finding.{name}: {shown}; allowed: {' or '.join(_KINDS[kind] for kind in kinds)}")
    return value


_KINDS: dict[type, str] = {
    str: "text",
    dict: "an object",
    list: "a list",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def _word(data: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    value: str = _typed(data, name, (str,))
    if value not in allowed:
        raise FindingError(f"finding.{name}: {value[:60]!r}; allowed: {', '.join(allowed)}")
    return value


def _one_line(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 60 else repr(name[:60])


def findings_of(target: str, case: Case, result: CaseResult, settings: Settings) -> list[Finding]:
    """The failed checks of one case, each with the ledger entry that explains it, if any."""
    found = []
    for failure in result.failures:
        diagnosis = class_of(result.checks, failure.check)
        entry = settings.entry(target, failure.check, diagnosis, case)
        found.append(
            Finding(
                target=target,
                check=failure.check,
                verdict=failure.verdict,
                message=failure.message,
                evidence=failure.evidence,
                diagnosis=diagnosis,
                worst_ratio=result.worst_ratio,
                engine=settings.engine,
                versions=settings.versions,
                known=entry if settings.excused else None,
                case=case,
                modules=settings.modules,
                entry=entry,
            )
        )
    return found
