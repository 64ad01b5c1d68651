"""The outcome of one check, and how outcomes add up. Needs no torch."""

from collections.abc import Iterable
from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of one check of one (target, case). The members stand in ascending order of severity.

    PASS         the property was evaluated and holds
    UNSUPPORTED  the target declares that it cannot run this: nothing was evaluated
    VACUOUS      evaluated, but the budget allows anything: no evidence
    SUSPECT      the probable budget fails and the worst case holds; counts as FAIL until it is resolved
    FAIL         the property does not hold
    CRASH        the worker died or raised inside the declared capability
    HANG         the watchdog ended the worker
    """

    PASS = "pass"
    UNSUPPORTED = "unsupported"
    VACUOUS = "vacuous"
    SUSPECT = "suspect"
    FAIL = "fail"
    CRASH = "crash"
    HANG = "hang"

    @property
    def is_finding(self) -> bool:
        """Whether this outcome speaks against the target."""
        return self in _FINDINGS


_FINDINGS = frozenset({Verdict.SUSPECT, Verdict.FAIL, Verdict.CRASH, Verdict.HANG})
_SEVERITY = {verdict: rank for rank, verdict in enumerate(Verdict)}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The most severe of `verdicts`, in the order in which `Verdict` lists them.

    PASS is the mildest, so that one check that did not run, or said nothing, shows in the sum.
    Raises ValueError when there are none: what was never checked has no outcome, least of all PASS.
    """
    ranked = sorted(verdicts, key=_SEVERITY.__getitem__)
    if not ranked:
        raise ValueError("worst() of no verdicts: nothing was checked")
    return ranked[-1]
