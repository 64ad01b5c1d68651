"""Each check finds the fault planted for it, and says nothing about the clean twin."""

from __future__ import annotations

from typing import Any

import pytest

from fuzz import engine
from fuzz.case import Case
from fuzz.check.result import CaseResult, Check
from fuzz.check.run import check_case
from oracle.declare import declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz import planted
from suites.fuzz.cases import extend_case, gather_case, write_case


@pytest.fixture(autouse=True)
def _engine() -> None:
    engine.start(Engine.EMULATOR)
    planted.forget()


def judge(function: Any, case: Case) -> CaseResult:
    declaration = declaration_of(function)
    assert declaration is not None
    return check_case(declaration, case, Engine.EMULATOR, lambda phase: None)


def failed(result: CaseResult) -> set[Check]:
    return {check.check for check in result.failures}


@pytest.mark.parametrize(
    ("function", "case"),
    [
        (planted.gather_clean, gather_case()),
        (planted.gather_clean, gather_case(probe="bytes", kv_dtype="uint8", dtype="uint8")),
        (planted.gather_clean, gather_case(context_lens=[])),
        (planted.write_clean, write_case()),
        (planted.write_clean, write_case(skip="some", slot_map="holes", strided=True)),
        (planted.write_clean, write_case(skip="all")),
        (planted.extend_clean, extend_case()),
        (planted.extend_clean, extend_case(window=5, causal=False, strided=True, scale=0.5)),
        (planted.extend_clean, extend_case(context_lens=[0, 4], query_lens=[1, 4])),
        (planted.extend_clean, extend_case(context_lens=[], query_lens=[])),
        (planted.extend_turned, extend_case()),
        (planted.extend_jitter_declared, extend_case()),
    ],
)
def test_a_clean_target_passes_every_check(function: Any, case: Case) -> None:
    result = judge(function, case)
    assert result.verdict is Verdict.PASS, result.failures
    assert result.checks


@pytest.mark.parametrize(
    ("function", "case", "check"),
    [
        (planted.gather_values, gather_case(), Check.VALUES),
        (planted.gather_written, gather_case(), Check.WRITTEN),
        (planted.gather_bounds, gather_case(), Check.BOUNDS),
        (planted.gather_inputs, gather_case(), Check.INPUTS),
        (planted.gather_nan, gather_case(), Check.NAN),
        (planted.gather_poison, gather_case(), Check.POISON),
        (planted.gather_determinism, gather_case(), Check.DETERMINISM),
        (planted.gather_result, gather_case(), Check.RESULT),
        (planted.write_written, write_case(), Check.WRITTEN),
        (planted.write_bounds, write_case(), Check.BOUNDS),
        (planted.write_values, write_case(), Check.VALUES),
        (planted.write_later, write_case(), Check.POISON),
        (planted.write_nan, write_case(), Check.NAN),
        (planted.extend_jitter, extend_case(), Check.DETERMINISM),
        (planted.extend_without_lse, extend_case(), Check.RESULT),
        (planted.extend_window, extend_case(window=5), Check.VALUES),
        (planted.extend_key, extend_case(), Check.LSE),
        (planted.extend_lse, extend_case(), Check.LSE),
    ],
)
def test_a_planted_fault_fails_its_check(function: Any, case: Case, check: Check) -> None:
    assert check in failed(judge(function, case))


def test_a_wrong_log_sum_exp_leaves_the_values_alone() -> None:
    assert failed(judge(planted.extend_lse, extend_case())) == {Check.LSE}


def test_calls_that_differ_by_themselves_are_not_called_poison() -> None:
    assert failed(judge(planted.extend_jitter, extend_case())) == {Check.DETERMINISM}


def test_poison_that_only_nan_shows_is_not_called_poison() -> None:
    assert failed(judge(planted.gather_nan, gather_case())) == {Check.NAN}


def test_what_a_target_raises_passes_through() -> None:
    with pytest.raises(ValueError, match="planted"):
        judge(planted.gather_crash, gather_case())


def test_results_survive_json() -> None:
    result = judge(planted.gather_values, gather_case())
    assert CaseResult.from_dict(result.to_dict()) == result
