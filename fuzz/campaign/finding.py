"""A failed check with what is needed to show it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from fuzz.case import Case, case_from_dict
from fuzz.check.diagnosis import class_of
from fuzz.check.result import CaseResult, Check
from fuzz.features import labels
from fuzz.plain import Fields, PlainError
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
    made_from: str | None = None
    """the id of the finding that was made smaller into this one"""
    smallest: bool = False
    """no single reduction of the case keeps the fault"""
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

        Where no diagnosis tells, what was raised, and where, stands in for it; else what the operands are made of.
        """
        case = self.case
        entry = self.known or self.entry
        told = entry is not None or self.diagnosis not in (None, Kind.UNEXPLAINED)
        stands_in = () if told else self.raised or (case.dtype, case.pool.value, case.index_dtype)
        return (self.target, self.check, self.diagnosis, entry, *stands_in)

    @property
    def raised(self) -> tuple[str, ...]:
        """The exception that the target's own call raised, and the line; nothing where its process died."""
        found = (self.evidence.get("exception"), self.evidence.get("where"))
        return tuple(str(part) for part in found if part) if self.check is Check.CRASH else ()

    @property
    def ways(self) -> int:
        """How many explanations of the diagnosed class fit; 0 where there is no diagnosis."""
        found = self.evidence.get("diagnosis")
        if not isinstance(found, Mapping):
            return 0
        return sum(one["kind"] == self.diagnosis for one in (found, *found["runners_up"]))

    @property
    def size(self) -> tuple[int, ...]:
        """How well the case shows the fault: ways, requests, tokens, heads, dims. The smaller one is shown.

        Ways first: a case on which several explanations fit cannot be made into one where the fault has one name.
        """
        case = self.case
        tokens = sum(case.context_lens) + sum(case.query_lens)
        return self.ways, len(case.context_lens), tokens, case.num_q_heads, case.head_dim

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
            "entry": self.entry,
            "modules": list(self.modules),
            "made_from": self.made_from,
            "smallest": self.smallest,
            "evidence": dict(self.evidence),
            "case": self.case.to_dict(),
        }


def finding_from_dict(data: object) -> tuple[str, Case]:
    """Target and case of a finding's plain data. Raises ``PlainError`` and ``CaseError``."""
    own = Fields(data, "finding")
    if "operation" in own.data and "case" not in own.data:
        raise PlainError("this is a case: use attn-oracle run")
    own.schema(SCHEMA)
    if own.data.get("check") is not None:
        own.one_of("check", Check)
    return own.text("target"), case_from_dict(own.data.get("case"))


def saved_finding(data: object) -> Finding:
    """A finding from its plain data, with everything that was kept. Raises ``PlainError`` and ``CaseError``."""
    target, case = finding_from_dict(data)
    own = Fields(data, "finding")
    versions = own.fields("versions")
    return Finding(
        target=target,
        check=own.one_of("check", Check),
        verdict=own.one_of("verdict", Verdict),
        message=own.text("message"),
        evidence=dict(own.fields("evidence").data),
        diagnosis=own.text("diagnosis", None),
        worst_ratio=own.number("worst_ratio", None),
        engine=own.one_of("engine", Engine),
        versions={name: versions.text(name, None) for name in versions.data},
        known=own.text("known", None),
        case=case,
        modules=own.texts("modules"),
        made_from=own.text("made_from", None),
        smallest=own.flag("smallest", False),
        entry=own.text("entry", None),
    )


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
