"""A failed check with what is needed to show it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from fuzz.case import Case
from fuzz.check.result import CaseResult, Check
from fuzz.features import labels
from oracle.kinds import Engine
from oracle.verdict import Verdict

if TYPE_CHECKING:
    from fuzz.campaign.run import Settings

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One failed check of one case. ``known`` is the ledger entry that explains it, or None."""

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
    def size(self) -> tuple[int, ...]:
        """How large the case is: requests, tokens, heads, dims. The smaller one is shown."""
        case = self.case
        tokens = sum(case.context_lens) + sum(case.query_lens)
        return len(case.context_lens), tokens, case.num_q_heads, case.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``case_from_dict`` reads the case back."""
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
            "evidence": dict(self.evidence),
            "case": self.case.to_dict(),
        }


def findings_of(target: str, case: Case, result: CaseResult, settings: Settings) -> list[Finding]:
    """The failed checks of one case, each with the ledger entry that explains it, if any."""
    found = []
    for failure in result.failures:
        known = next((d.id for d in settings.defects if d.matches(target, failure.check, None, case)), None)
        found.append(
            Finding(
                target=target,
                check=failure.check,
                verdict=failure.verdict,
                message=failure.message,
                evidence=failure.evidence,
                diagnosis=None,
                worst_ratio=result.worst_ratio,
                engine=settings.engine,
                versions=settings.versions,
                known=known,
                case=case,
            )
        )
    return found
