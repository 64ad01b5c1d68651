"""How verdicts follow from values, bounds and formats, on hand-made tensors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.budget.bounds import Bounds, Budgets
from oracle.budget.judge import Judgement, judge
from oracle.kinds import LseBase
from oracle.precision import Precision, Rounding
from oracle.verdict import Verdict
from suites.oracle.budget.kernels import DTYPES

NAN, INF = math.nan, math.inf


def verdict_of(
    actual: float | list[float],
    expected: float | list[float],
    bound: float | list[float],
    dtype: str = "bf16",
    *,
    reach: float = 10.0,
    rounding: Rounding = Rounding.NEAREST_EVEN,
) -> Judgement:
    """Judge one row with one element per dimension."""
    out, wanted, radius = (torch.tensor(x, dtype=torch.float64).view(1, 1, -1) for x in (actual, expected, bound))
    radius = radius.expand(wanted.shape)
    bounds = Bounds(radius, torch.zeros(1, 1), torch.full_like(radius, reach), torch.ones(1, dtype=torch.int64))
    narrow = out.to(DTYPES[dtype])
    assert torch.equal(narrow.double().nan_to_num(7.0), out.nan_to_num(7.0)), "the test's value is not of the dtype"
    return judge(
        narrow,
        None,
        Solution(wanted, torch.zeros(1, 1)),
        bounds,
        out_dtype=dtype,
        precision=Precision(out_rounding=rounding),
    )


def passes(*args: Any, **kwargs: Any) -> bool:
    judgement = verdict_of(*args, **kwargs)
    assert (judgement.out.failures == 0) == (judgement.verdict is not Verdict.FAIL)
    assert judgement.out.worst is not None
    assert (judgement.out.worst.ratio > 1) == (judgement.verdict is Verdict.FAIL)
    return judgement.verdict is not Verdict.FAIL


@pytest.mark.parametrize(
    ("actual", "expected", "bound", "accepted"),
    [
        (1.0, 1.0, 0.0, True),
        (1.0078125, 1.0, 0.0, False),
        # 1.00390625 is the midpoint of 1 and its neighbour; ties go to even, which is 1.
        (1.0, 1.003, 0.0, True),
        (1.0078125, 1.003, 0.0, False),
        (1.0078125, 1.003, 0.002, True),
        (0.99609375, 1.0, 0.001, False),
        (0.99609375, 1.0, 0.0021, True),
        (-0.0, 0.0, 0.0, True),
    ],
)
def test_interval_is_rounded(actual: float, expected: float, bound: float, accepted: bool) -> None:
    assert passes(actual, expected, bound) is accepted
    assert passes(-actual, -expected, bound) is accepted


@pytest.mark.parametrize(
    ("actual", "expected", "bound", "accepted"),
    [
        (1.0, 1.0077, 0.0, True),
        (1.0078125, 1.0077, 0.0, False),
        (1.0078125, 1.0077, 0.0002, True),
        (1.0, 1.0, 0.0, True),
        (1.0078125, 1.0, 0.001, False),
        (0.99609375, 1.0, 0.001, True),
    ],
)
def test_truncated_output(actual: float, expected: float, bound: float, accepted: bool) -> None:
    for sign in (1, -1):
        judged = passes(sign * actual, sign * expected, bound, rounding=Rounding.TOWARD_ZERO)
        assert judged is accepted


@pytest.mark.parametrize(
    ("dtype", "actual", "expected", "bound", "accepted"),
    [
        # A number is expected.
        ("bf16", NAN, 1.0, 5.0, False),
        ("bf16", INF, 1.0, 5.0, False),
        ("bf16", NAN, 1.0, INF, True),
        ("bf16", -INF, 1.0, INF, True),
        ("fp16", INF, 65500.0, 10.0, False),
        ("fp16", INF, 65500.0, 100.0, True),
        ("fp16", -INF, 65500.0, 100.0, False),
        ("fp16", NAN, 65500.0, 100.0, False),
        ("fp16", INF, 70000.0, 1.0, True),
        ("fp16", 65504.0, 70000.0, 1.0, False),
        # fp8 may saturate or give NaN.
        ("e4m3fn", 448.0, 500.0, 1.0, True),
        ("e4m3fn", NAN, 500.0, 1.0, True),
        ("e4m3fn", NAN, 440.0, 1.0, False),
        ("e4m3fn", 416.0, 500.0, 1.0, False),
        ("e5m2", INF, 70000.0, 1.0, True),
        ("e5m2", -INF, 70000.0, 1.0, False),
        # Not a number is expected: anything that is not finite.
        ("bf16", NAN, NAN, 0.0, True),
        ("bf16", INF, NAN, 0.0, True),
        ("bf16", 1.0, NAN, INF, False),
        # Infinity is expected: itself.
        ("bf16", INF, INF, 1.0, True),
        ("bf16", -INF, INF, 1.0, False),
        ("bf16", NAN, INF, 1.0, False),
        ("bf16", 3.0, -INF, 1.0, False),
        ("bf16", NAN, -INF, INF, True),
        ("e4m3fn", 448.0, INF, 1.0, True),
        ("e4m3fn", NAN, INF, 1.0, True),
        ("e4m3fn", -448.0, INF, 1.0, False),
    ],
)
def test_values_that_are_not_finite(dtype: str, actual: float, expected: float, bound: float, accepted: bool) -> None:
    assert passes(actual, expected, bound, dtype, reach=INF) is accepted


def test_the_worst_element_and_the_counts_are_reported() -> None:
    judgement = verdict_of([1.0, 2.5, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], 0.1)
    worst = judgement.out.worst
    assert worst is not None
    assert (judgement.verdict, judgement.out.elements, judgement.out.failures) == (Verdict.FAIL, 4, 1)
    assert (worst.index, worst.expected, worst.actual, worst.bound) == ((0, 0, 1), 2.0, 2.5, 0.1)
    # bf16 near 2.5 is spaced 2^-6: 2.5 - 2^-7 is the nearest number that rounds to it.
    assert worst.ratio == pytest.approx((0.5 - 2.0**-7) / 0.1)
    assert (judgement.out.failing_rows, judgement.out.first_failing_rows) == (1, ((0, 0),))


def test_a_bound_of_the_size_of_the_values_is_vacuous_but_not_blind() -> None:
    assert verdict_of([0.0] * 4, [0.0] * 4, 2.0, reach=1.0).verdict is Verdict.VACUOUS
    assert verdict_of([0.0] * 4, [0.0] * 4, 2.0, reach=3.0).verdict is Verdict.PASS
    assert verdict_of([9.0, 0.0, 0.0, 0.0], [0.0] * 4, 2.0, reach=1.0).verdict is Verdict.FAIL
    half = verdict_of([0.0] * 4, [0.0] * 4, [2.0, 2.0, 0.1, 0.1], reach=1.0)
    assert (half.verdict, half.out.vacuous) == (Verdict.PASS, 2)
    most = verdict_of([0.0] * 4, [0.0] * 4, [2.0, 2.0, 2.0, 0.1], reach=1.0)
    assert (most.verdict, most.out.vacuous) == (Verdict.VACUOUS, 3)


def test_what_underflow_costs_is_vacuous_beside_tiny_values_but_not_beside_zeros() -> None:
    assert verdict_of([0.0] * 4, [0.0] * 4, 1e-38, reach=0.0).verdict is Verdict.PASS
    assert verdict_of([0.0] * 4, [0.0] * 4, 1e-38, reach=1e-39).verdict is Verdict.VACUOUS
    assert verdict_of([0.0] * 4, [0.0] * 4, 1e-20, reach=0.0).verdict is Verdict.VACUOUS


def rows(out: list[float], lse: list[float], keys: list[int], **options: Any) -> Judgement:
    """Judge one element per row; expected out 0.5 and lse 1, or 0 and -inf in empty rows, bounds 0.01."""
    seen = torch.tensor(keys)
    full = seen > 0
    expected = torch.where(full, 0.5, 0.0).double().view(-1, 1, 1)
    expected_lse = torch.where(full, 1.0, -INF).double().view(-1, 1)
    bound = torch.where(full, 0.01, 0.0).double()
    bounds = Bounds(bound.view(-1, 1, 1), bound.view(-1, 1), torch.full((len(keys), 1, 1), 9.0).double(), seen)
    return judge(
        torch.tensor(out).view(-1, 1, 1),
        torch.tensor(lse).view(-1, 1),
        Solution(expected, expected_lse),
        bounds,
        out_dtype="fp32",
        precision=Precision(),
        **options,
    )


def test_empty_rows_hold_what_the_convention_says() -> None:
    fine = rows([0.5, 0.0], [1.0, -INF], [3, 0])
    assert fine.verdict is Verdict.PASS
    assert fine.out.elements == 2
    assert rows([0.5, 1e-6], [1.0, -INF], [3, 0]).out.verdict is Verdict.FAIL
    assert rows([0.5, NAN], [1.0, -INF], [3, 0]).out.verdict is Verdict.FAIL
    assert rows([0.5, 0.0], [1.0, -1e30], [3, 0]).lse.verdict is Verdict.FAIL  # type: ignore[union-attr]
    assert rows([0.5, 0.0], [1.0, NAN], [3, 0]).verdict is Verdict.FAIL
    assert rows([0.5, 0.0], [1.0, INF], [3, 0], expected_empty_lse=INF).verdict is Verdict.PASS


def test_undefined_empty_rows_are_not_judged() -> None:
    free = rows([0.5, NAN], [1.0, 7.0], [3, 0], expected_empty_out=None, expected_empty_lse=None)
    assert free.verdict is Verdict.PASS
    assert free.lse is not None
    assert (free.out.elements, free.lse.elements) == (1, 1)
    nothing = rows([NAN], [NAN], [0], expected_empty_out=None, expected_empty_lse=None)
    assert nothing.verdict is Verdict.VACUOUS
    assert nothing.out.worst is None


def test_lse_is_judged_in_its_own_base_and_dtype() -> None:
    two = [math.log2(math.e)]
    assert rows([0.5], two, [3], lse_base=LseBase.TWO).verdict is Verdict.PASS
    assert rows([0.5], two, [3]).verdict is Verdict.FAIL
    assert rows([0.5], [1.0], [3], lse_base=LseBase.TWO).verdict is Verdict.FAIL
    assert rows([0.5], [1.009], [3]).verdict is Verdict.PASS
    assert rows([0.5], [1.011], [3]).verdict is Verdict.FAIL


def test_lse_bound_of_ln_2_is_vacuous() -> None:
    bounds = Bounds(
        *(torch.full(s, x).double() for s, x in (((1, 1, 1), 0.1), ((1, 1), 0.7), ((1, 1, 1), 9.0))),
        torch.ones(1, dtype=torch.int64),
    )
    solution = Solution(torch.zeros(1, 1, 1).double(), torch.zeros(1, 1).double())
    judgement = judge(
        torch.zeros(1, 1, 1), torch.zeros(1, 1), solution, bounds, out_dtype="fp32", precision=Precision()
    )
    assert judgement.lse is not None
    assert (judgement.out.verdict, judgement.lse.verdict) == (Verdict.PASS, Verdict.VACUOUS)
    assert judgement.verdict is Verdict.VACUOUS


def with_two_bounds(actual: float, tight: float, loose: float, lse_off: float = 0.0, reach: float = 9.0) -> Judgement:
    """One element, expected 1, with lse 2 of bounds 0.1 and 0.2."""

    def bounds(out: float, lse: float) -> Bounds:
        return Bounds(
            torch.full((1, 1, 1), out).double(),
            torch.full((1, 1), lse).double(),
            torch.full((1, 1, 1), reach).double(),
            torch.ones(1, dtype=torch.int64),
        )

    return judge(
        torch.full((1, 1, 1), actual),
        torch.full((1, 1), 2 + lse_off),
        Solution(torch.ones(1, 1, 1).double(), torch.full((1, 1), 2.0).double()),
        Budgets(bounds(loose, 0.2), bounds(tight, 0.1), 6.5),
        out_dtype="fp32",
        precision=Precision(),
    )


@pytest.mark.parametrize(
    ("actual", "verdict", "suspects", "failures"),
    [
        (1.05, Verdict.PASS, 0, 0),
        (1.15, Verdict.SUSPECT, 1, 0),
        (1.25, Verdict.FAIL, 0, 1),
        (NAN, Verdict.FAIL, 0, 1),
        (INF, Verdict.FAIL, 0, 1),
    ],
)
def test_between_the_bounds_an_element_is_suspect(
    actual: float, verdict: Verdict, suspects: int, failures: int
) -> None:
    judgement = with_two_bounds(actual, 0.1, 0.2)
    tally = judgement.out
    assert (tally.verdict, tally.suspects, tally.failures) == (verdict, suspects, failures)
    assert judgement.verdict is verdict
    assert tally.failing_rows == suspects + failures
    assert tally.worst is not None
    # The ratio is to the probable bound, and given for what passes too.
    if math.isfinite(actual):
        assert tally.worst.ratio == pytest.approx((actual - 1) / 0.1, rel=1e-4)
    assert (tally.worst.ratio > 1) == (verdict is not Verdict.PASS)


def test_a_suspect_log_sum_exp_makes_the_whole_suspect() -> None:
    judgement = with_two_bounds(1.0, 0.1, 0.2, lse_off=0.15)
    assert judgement.lse is not None
    assert (judgement.out.verdict, judgement.lse.verdict, judgement.verdict) == (
        Verdict.PASS,
        Verdict.SUSPECT,
        Verdict.SUSPECT,
    )
    failing = with_two_bounds(1.0, 0.1, 0.2, lse_off=0.25)
    assert failing.verdict is Verdict.FAIL


def test_vacuity_goes_by_the_probable_bound() -> None:
    assert with_two_bounds(1.0, 0.1, 50.0, reach=9.0).verdict is Verdict.PASS
    assert with_two_bounds(1.0, 10.0, 50.0, reach=9.0).verdict is Verdict.VACUOUS
    # A suspect is worse than to say nothing.
    assert with_two_bounds(20.0, 10.0, 50.0, reach=9.0).verdict is Verdict.SUSPECT


def test_no_bound_in_either_sense_allows_anything() -> None:
    assert with_two_bounds(NAN, INF, INF).verdict is Verdict.VACUOUS
    assert with_two_bounds(NAN, 0.1, INF).verdict is Verdict.SUSPECT


@pytest.mark.parametrize(
    ("actual", "expected", "accepted"),
    [(-0.0, 0.0, True), (0.0, -0.0, True), (-1e-45, 0.0, False), (1e-45, -0.0, False)],
)
def test_the_sign_of_zero_is_free(actual: float, expected: float, accepted: bool) -> None:
    """Which zero a sum of cancelling terms gives depends on their order; the smallest number is no zero."""
    actual = float(torch.tensor(actual))
    assert passes(actual, expected, 0.0, "fp32") is accepted


@pytest.mark.parametrize(
    ("out", "lse", "error", "message"),
    [
        (torch.zeros(1, 1, 1), torch.zeros(1, 1), TypeError, "out: allowed is torch.bfloat16"),
        (torch.zeros(1, 1, 2).bfloat16(), torch.zeros(1, 1), ValueError, "out: allowed is shape"),
        (
            torch.zeros(1, 1, 1).bfloat16(),
            torch.zeros(1, 1).double(),
            TypeError,
            "lse: allowed is torch.float32",
        ),
        (torch.zeros(1, 1, 1).bfloat16(), torch.zeros(2, 1), ValueError, "lse: allowed is shape"),
    ],
)
def test_wrong_tensors_are_refused(out: Tensor, lse: Tensor, error: type[Exception], message: str) -> None:
    zero = torch.zeros(1, 1, 1).double()
    bounds = Bounds(zero, zero[..., 0], zero, torch.ones(1, dtype=torch.int64))
    with pytest.raises(error, match=message):
        judge(out, lse, Solution(zero, zero[..., 0]), bounds, out_dtype="bf16", precision=Precision())
