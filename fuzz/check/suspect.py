"""Resolving a suspect: values beyond their probable budget and within the worst case are tried again.

The same case runs with new seeds, and with the probes whose weights are exact where the case allows them: a rounding
that was unlucky once is not unlucky again, a fault stays. Everything follows from the case, in the worker that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.call import ResultError, Unsupported
from fuzz.case import Case, CaseError, Probe
from fuzz.check.result import CaseResult, CheckResult
from oracle.verdict import Verdict

SEEDS = 3
EXACT_PROBES = tuple(probe for probe in Probe if probe.value in ("code", "gate", "integers"))
"""Probes whose softmax weights are 0 or 1: no rounding of weights can explain what is wrong there."""
_STEP = 0x9E3779B97F4A7C15
_SEED_LIMIT = 1 << 63


def resolve(case: Case, first: CaseResult, judge: Callable[[Case], CaseResult]) -> CaseResult:
    """`first`, the judgement of the values of `case`, with every SUSPECT settled if it can be.

    judge: runs and judges the values of another case. A suspect check becomes FAIL if any other run has a finding, PASS
    if all of them pass, and stays SUSPECT, which counts as FAIL, if one says nothing. Ratio and evidence are kept.
    """
    if all(check.verdict is not Verdict.SUSPECT for check in first.checks):
        return first
    verdicts = []
    for name, other in _others(case):
        try:
            verdicts.append((name, judge(other).verdict))
        except ResultError:
            verdicts.append((name, Verdict.FAIL))
        except (CaseError, Unsupported):
            continue
    return replace(first, checks=tuple(_settled(check, verdicts) for check in first.checks))


def _others(case: Case) -> Iterator[tuple[str, Case]]:
    for i in range(1, SEEDS + 1):
        seed = (case.seed + i * _STEP) % _SEED_LIMIT
        yield f"seed {seed}", replace(case, seed=seed)
    for probe in EXACT_PROBES:
        if probe is not case.probe:
            yield f"probe {probe}", replace(case, probe=probe)


def _settled(check: CheckResult, verdicts: list[tuple[str, Verdict]]) -> CheckResult:
    if check.verdict is not Verdict.SUSPECT:
        return check
    again = [name for name, verdict in verdicts if verdict.is_finding]
    if again:
        note = f"suspect, and again with {', '.join(again)}"
        return replace(check, verdict=Verdict.FAIL, message=f"{note}: {check.message}")
    if verdicts and all(verdict is Verdict.PASS for _, verdict in verdicts):
        note = f"suspect, resolved by {len(verdicts)} other runs"
        return replace(check, verdict=Verdict.PASS, message=f"{note}: {check.message}")
    return check
