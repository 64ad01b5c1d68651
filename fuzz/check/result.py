"""Outcomes of checks: what was looked at, how it ended, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from oracle.verdict import Verdict, worst


class Check(StrEnum):
    """One property of one (target, case)."""

    RESULT = "result"
    """the target returned what its operation returns: number, shapes and dtypes of outputs"""
    VALUES = "values"
    LSE = "lse"
    WRITTEN = "written"
    BOUNDS = "bounds"
    """nothing outside the arguments was read or written"""
    INPUTS = "inputs"
    """no input was changed"""
    POISON = "poison"
    """the result does not depend on finite values where no data is"""
    NAN = "nan"
    """nor on NaN there"""
    DETERMINISM = "determinism"
    PAGES = "pages"
    """the result does not depend on which pages hold the keys"""
    BATCH = "batch"
    """nor that of a request on the other requests: bit for bit where the target declares so"""
    FRESH = "fresh"
    """nor that of a fresh prompt on whether another request of the batch has a prefix"""
    SETTINGS = "settings"
    """nor on a number of splits or the size of a partition"""
    RESCALED = "rescaled"
    """a power of two may be moved from a descale to what it multiplies"""
    CHUNKS = "chunks"
    """tokens given in two steps get what they get in one"""
    SESSION = "session"
    """steps over one pool, whose pages were others' before, give what a step over a pool of its own gives"""
    AGREEMENT = "agreement"
    """another target, named by the declaration, gives the same"""
    INT32_WRAP = "int32_wrap"
    """no 32-bit overflow reached an address; emulator only"""
    UNDEFINED = "undefined"
    """no undefined lane reached an output or an address; emulator only"""
    DIVISION = "division"
    """no integer was divided by zero; emulator only"""
    STORE_DTYPE = "store_dtype"
    """no store without a cast was given another type; emulator only"""
    UNINITIALISED = "uninitialised"
    """no memory that nobody wrote reached an output or an address; emulator only"""
    RACE = "race"
    """no result depends on the order of the programs of a launch; emulator only"""
    CRASH = "crash"
    """the call returned: no exception, no signal, enough memory"""
    HANG = "hang"


@dataclass(frozen=True)
class CheckResult:
    """How one check ended. ``message`` is one line; ``evidence`` is plain JSON data without source text."""

    check: Check
    verdict: Verdict
    message: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "check": self.check,
            "verdict": self.verdict,
            "message": self.message,
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CheckResult:
        """Inverse of ``to_dict``."""
        return cls(Check(data["check"]), Verdict(data["verdict"]), data["message"], data["evidence"])


@dataclass(frozen=True)
class CaseResult:
    """How one case went on one target.

    ``elements`` counts output elements compared with the oracle; ``worst_ratio`` is the largest error over
    its budget, where there is one; ``reason`` says why nothing ran, for UNSUPPORTED; ``coverage``, where it was
    asked for and the engine has it, is what the kernels reached (``emulator.Coverage.to_dict``).
    """

    checks: tuple[CheckResult, ...]
    elements: int = 0
    vacuous_elements: int = 0
    worst_ratio: float | None = None
    reason: str = ""
    coverage: Mapping[str, Any] | None = None

    @property
    def verdict(self) -> Verdict:
        """The most severe outcome of its checks."""
        return worst(c.verdict for c in self.checks) if self.checks else Verdict.UNSUPPORTED

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """Checks that speak against the target."""
        return tuple(c for c in self.checks if c.verdict.is_finding)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "checks": [c.to_dict() for c in self.checks],
            "elements": self.elements,
            "vacuous_elements": self.vacuous_elements,
            "worst_ratio": self.worst_ratio,
            "reason": self.reason,
            **({} if self.coverage is None else {"coverage": dict(self.coverage)}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CaseResult:
        """Inverse of ``to_dict``."""
        return cls(
            tuple(CheckResult.from_dict(c) for c in data["checks"]),
            data["elements"],
            data["vacuous_elements"],
            data["worst_ratio"],
            data["reason"],
            data.get("coverage"),
        )
