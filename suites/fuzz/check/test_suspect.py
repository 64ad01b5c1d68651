"""A suspect is settled by other runs of the same case, the same way every time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fuzz import engine
from fuzz.call import ResultError, Unsupported
from fuzz.case import Case, CaseError, Probe
from fuzz.check import attention, suspect
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.check.run import check_case
from fuzz.check.suspect import SEEDS, resolve
from oracle import declare
from oracle.budget import Budgets, budgets
from oracle.declare import declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz import planted
from suites.fuzz.cases import extend_case

PASS, VACUOUS, SUSPECT, FAIL = Verdict.PASS, Verdict.VACUOUS, Verdict.SUSPECT, Verdict.FAIL


def result(*verdicts: Verdict) -> CaseResult:
    names = (Check.VALUES, Check.LSE)
    found = zip(names, verdicts, strict=False)
    return CaseResult(tuple(CheckResult(c, v, "", {"ratio": "1.5"}) for c, v in found), 10, 0, 1.5)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([PASS, PASS, PASS], PASS),
        ([PASS, PASS, FAIL], FAIL),
        ([SUSPECT, PASS, PASS], FAIL),
        ([PASS, VACUOUS, PASS], SUSPECT),
        ([Unsupported("no"), CaseError("no"), PASS], PASS),
        ([Unsupported("no"), Unsupported("no"), Unsupported("no")], SUSPECT),
        ([PASS, ResultError("no"), PASS], FAIL),
    ],
)
def test_other_runs_settle_a_suspect(others: list[Any], expected: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspect, "EXACT_PROBES", ())
    cases: list[Case] = []

    def judge(case: Case) -> CaseResult:
        cases.append(case)
        outcome = others[len(cases) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return result(outcome)

    settled = resolve(extend_case(), result(SUSPECT, PASS), judge)
    values, lse = settled.checks
    assert (values.verdict, lse) == (expected, result(PASS, PASS).checks[1])
    assert (values.evidence, settled.worst_ratio) == ({"ratio": "1.5"}, 1.5)
    assert ("resolved" in values.message) == (expected is PASS)
    seeds = {case.seed for case in cases}
    assert len(seeds) == SEEDS
    assert extend_case().seed not in seeds
    again: list[Case] = []
    resolve(extend_case(), result(SUSPECT), lambda case: [again.append(case), result(PASS)][1])
    assert again == cases


def test_what_is_no_suspect_is_left_alone() -> None:
    first = result(FAIL, PASS)
    assert resolve(extend_case(), first, lambda case: pytest.fail("not asked for")) is first


def test_exact_probes_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspect, "EXACT_PROBES", (Probe.CONSTANT_V, Probe.NORMAL))
    seen: list[Probe] = []

    def judge(case: Case) -> CaseResult:
        seen.append(case.probe)
        return result(FAIL if case.probe is Probe.CONSTANT_V else PASS)

    settled = resolve(extend_case(), result(SUSPECT), judge)
    assert seen == [Probe.NORMAL] * SEEDS + [Probe.CONSTANT_V]
    assert settled.verdict is FAIL
    assert "constant_v" in settled.checks[0].message


@pytest.mark.parametrize(("unlucky", "expected"), [(1, PASS), (math.inf, FAIL)])
def test_check_case_resolves_suspects(monkeypatch: pytest.MonkeyPatch, unlucky: float, expected: Verdict) -> None:
    """With next to no probable bound an honest rounding is suspect: once, or in every run."""
    calls = 0

    def hasty(*args: Any, **options: Any) -> Budgets:
        nonlocal calls
        calls += 1
        found = budgets(*args, **options)
        tight = found.probable if calls > unlucky else replace(found.probable, out=found.probable.out * 1e-6)
        return replace(found, probable=tight)

    monkeypatch.setattr(attention, "budgets", hasty)
    engine.start(Engine.EMULATOR)
    planted.forget()
    declaration = declaration_of(_an_ulp_off)
    assert declaration is not None
    found = check_case(declaration, extend_case(), Engine.EMULATOR, lambda phase: None)
    values = next(check for check in found.checks if check.check is Check.VALUES)
    assert values.verdict is expected
    assert "suspect" in values.message
    assert found.worst_ratio is not None
    assert found.worst_ratio > 1


@declare.varlen_extend(
    name="test.an_ulp_off", convention=planted.ATTENTION, precision=planted.FLOAT64, supports=planted.EXTENDS
)
def _an_ulp_off(*args: Any, **options: Any) -> Any:
    out, lse = planted.extend_clean(*args, **options)
    return out.nextafter(torch.full_like(out, math.inf)), lse
