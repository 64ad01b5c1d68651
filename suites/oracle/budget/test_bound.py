"""Properties of both bounds: monotone, ordered, independent of blocks and layout of the problem, local."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.attention import lse_with_sink, solve
from oracle.budget import blocks, budgets, confidence_for, explain, worst_case
from oracle.budget.bounds import Bounds
from oracle.precision import Accumulation, KeyOrder, MatrixUnit, Precision, RankOwnership, Rounding
from oracle.problem import Problem
from suites.oracle.budget.inputs import problem
from suites.oracle.budget.kernels import Choices, run

STRICT = Precision(kv_cast=None, qk_product=None, p_dtype=None, row_sum_of_rounded_p=False, tile=1 << 20)

LOOSENINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"q_cast": "bf16"}),
    ({"q_cast": "bf16"}, {"q_cast": "e4m3fn"}),
    ({}, {"kv_cast": "bf16"}),
    ({"kv_cast": "bf16"}, {"kv_cast": "e4m3fn"}),
    ({}, {"qk_product": "bf16"}),
    ({}, {"qk": MatrixUnit(unit_roundoff=2.0**-20)}),
    ({}, {"qk": MatrixUnit(toward_zero=True)}),
    (
        {"qk": MatrixUnit(accumulation=Accumulation.FUSED, block=16, fraction_bits=25)},
        {"qk": MatrixUnit(accumulation=Accumulation.FUSED, block=16, fraction_bits=13)},
    ),
    ({}, {"logit_dtype": "bf16"}),
    ({}, {"scale_error": 2.0**-10}),
    ({}, {"tanh_error": 2.0**-5}),
    ({}, {"exp_error": 2.0**-8}),
    ({}, {"exp_argument_roundings": 9}),
    ({}, {"log_error": 2.0**-10}),
    ({}, {"p_dtype": "bf16"}),
    ({"p_dtype": "bf16"}, {"p_dtype": "bf16", "p_rounding": Rounding.TOWARD_ZERO}),
    ({"p_dtype": "bf16"}, {"p_dtype": "bf16", "row_sum_of_rounded_p": None}),
    ({"p_dtype": "bf16", "sink_first": False}, {"p_dtype": "bf16"}),
    ({"p_dtype": "bf16", "row_sum_of_rounded_p": True}, {"p_dtype": "bf16", "row_sum_of_rounded_p": None}),
    ({"p_dtype": "bf16"}, {"p_dtype": "e4m3fn", "p_scale": 448.0}),
    ({"p_dtype": "e4m3fn", "p_scale": 448.0}, {"p_dtype": "e4m3fn", "p_scale": 256.0}),
    ({}, {"pv": MatrixUnit(unit_roundoff=2.0**-18)}),
    (
        {"pv": MatrixUnit(accumulation=Accumulation.BLOCK, block=16)},
        {"pv": MatrixUnit(accumulation=Accumulation.BLOCK, block=16, unit_roundoff=2.0**-20)},
    ),
    ({}, {"tile": 16}),
    ({"tile": 16}, {"tile": 1}),
    ({}, {"max_splits": 4}),
    ({"max_splits": 4}, {"max_splits": 9}),
    ({"max_splits": 4}, {"max_splits": 4, "partial_dtype": "bf16"}),
    ({}, {"ranks": 4}),
    ({"ranks": 4}, {"ranks": 4, "rank_dtype": "bf16"}),
    ({"ranks": 4}, {"ranks": 4, "reduce_dtype": "bf16"}),
    ({"p_dtype": "bf16"}, {"p_dtype": "bf16", "p_normalised": True}),
    ({"tile": 4, "key_order": KeyOrder.ASCENDING}, {"tile": 4, "key_order": KeyOrder.ANY}),
    (
        {"ranks": 4, "rank_dtype": "bf16", "rank_ownership": RankOwnership.CONTIGUOUS},
        {"ranks": 4, "rank_dtype": "bf16", "rank_ownership": RankOwnership.ANY},
    ),
    ({"flush_subnormals": False}, {}),
]
ONLY_PROBABLE = {"key_order", "rank_ownership"}
"""Fields that the worst case does not read: it takes any order and ownership."""


def close(a: torch.Tensor, b: torch.Tensor, size: float = 0.0) -> bool:
    """Equal but for the slack against cancellation in the spread, which depends on the block."""
    return bool(torch.isclose(a, b, rtol=1e-5, atol=1e-6 * size).all())


@contextmanager
def sums_in(dtype: torch.dtype) -> Iterator[None]:
    """Float64 is what GPUs use; float32 what the CPU uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "work_dtype", lambda device, keys: dtype)
        yield


def both(case: Problem, fields: dict[str, Any] | None, dtype: str, **options: Any) -> tuple[Bounds, Bounds]:
    """Worst case and probable bound, in float64; fields: of `STRICT` that differ, None: the default precision."""
    precision = None if fields is None else replace(STRICT, **fields)
    with sums_in(torch.float64):
        found = budgets(case, precision, input_dtype=dtype, **options)
    return found.worst_case, found.probable


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 5000), loosening=st.sampled_from(LOOSENINGS))
def test_loosening_a_field_never_shrinks_a_bound(seed: int, loosening: tuple[dict[str, Any], dict[str, Any]]) -> None:
    case, dtype, _ = problem(seed, largest=40)
    tight, loose = (both(case, fields, dtype) for fields in loosening)
    for before, after in zip(tight, loose, strict=True):
        # Of a spread near 0, float64 leaves some noise.
        assert bool((after.out >= before.out * (1 - 1e-9)).all())
        assert bool((after.lse >= before.lse * (1 - 1e-9)).all())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 5000), data=st.data())
def test_the_probable_bound_is_never_above_the_worst_case(seed: int, data: st.DataObject) -> None:
    case, dtype, _ = problem(seed, largest=700)
    fields = {
        name: value for _, later in data.draw(st.lists(st.sampled_from(LOOSENINGS))) for name, value in later.items()
    }
    if (fields.get("p_scale", 1.0), fields.get("p_dtype")) == (448.0, "bf16"):
        del fields["p_scale"]
    confidence = data.draw(st.sampled_from([0.5, 6.5, 12.0]))
    worst, probable = both(case, fields, dtype, confidence=confidence)
    assert bool((probable.out <= worst.out).all() and (probable.lse <= worst.lse).all())
    assert torch.equal(worst.reach, probable.reach)
    assert torch.equal(worst.keys, probable.keys)


def test_the_probable_bound_grows_with_confidence_and_shrinks_with_the_context() -> None:
    generator = torch.Generator().manual_seed(1)
    medians = {}
    for n in (128, 8192):
        q, k, v = (torch.randn(m, 1, 64, generator=generator).bfloat16() for m in (4, n, n))
        case = Problem(q=q, k=k, v=v, q_lens=(4,), kv_lens=(n,), scale=0.125)
        for confidence in (3.0, 6.5):
            worst, probable = both(case, {"p_dtype": "bf16", "tile": 64}, "bf16", confidence=confidence)
            medians[n, confidence] = float(probable.out.median())
        # Rounding of weights errs by about 2^-9 of each in the worst case, whatever the context.
        assert float(worst.out.median()) > 2e-3
    assert medians[128, 3.0] < medians[128, 6.5]
    assert medians[8192, 3.0] < medians[8192, 6.5] < medians[128, 6.5] / 5


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 5000))
def test_sums_in_float32_are_rounded_outward_and_not_far(seed: int) -> None:
    case, dtype, _ = problem(seed, largest=300)
    exact = both(case, None, dtype)
    with sums_in(torch.float32):
        found = budgets(case, input_dtype=dtype)
    for wide, narrow in zip(exact, (found.worst_case, found.probable), strict=True):
        for a, b, size in ((wide.out, narrow.out, float(wide.reach.max())), (wide.lse, narrow.lse, 1.0)):
            assert bool((b >= a * (1 - 1e-6)).all())
            # What cancels in a spread leaves the root of float32's precision.
            assert bool(((b <= a * 1.001 + 1e-2 * size * a.clamp(max=1.0).sqrt() + 1e-30) | (b == a)).all())


@pytest.mark.parametrize("loosening", LOOSENINGS, ids=lambda pair: ",".join(pair[1]))
def test_each_loosening_matters_somewhere(loosening: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Otherwise the property above would hold of fields that nobody reads."""
    grown = np.zeros(2, dtype=bool)
    for seed in range(60):
        case, dtype, _ = problem(seed, largest=40)
        before, after = (both(case, fields, dtype) for fields in loosening)
        grown |= [bool((b.out > a.out).any() or (b.lse > a.lse).any()) for a, b in zip(before, after, strict=True)]
        if grown.all():
            break
    assert grown[1]
    assert grown[0] != bool(loosening[1].keys() & ONLY_PROBABLE)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 5000), block=st.sampled_from([1, 64, 700]))
def test_bounds_do_not_depend_on_the_blocks(seed: int, block: int) -> None:
    case, dtype, _ = problem(seed)
    whole, parts = (both(case, None, dtype, block_logits=b) for b in (1 << 30, block))
    assert close(whole[0].out, parts[0].out, float(whole[0].reach.max()))
    assert close(whole[0].lse, parts[0].lse)
    # Prefixes end elsewhere.
    assert bool(torch.isclose(whole[1].out, parts[1].out, rtol=0.5, atol=1e-6 * float(whole[1].reach.max())).all())
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a.reach, b.reach)
        assert torch.equal(a.keys, b.keys)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 5000))
def test_bounds_do_not_depend_on_the_order_of_keys(seed: int) -> None:
    case, dtype, _ = problem(seed)
    given_order = replace(case, kv_positions=case.positions())
    orders = [start + torch.randperm(n) for start, n in zip(case.kv_starts, case.kv_lens, strict=False)]
    order = torch.cat(orders)
    shuffled = replace(
        given_order,
        k=case.k[order],
        v=case.v[order],
        kv_positions=case.positions()[order],
        k_descale=_ordered(case.k_descale, order),
        v_descale=_ordered(case.v_descale, order),
    )
    for a, b in zip(*(both(p, None, dtype) for p in (given_order, shuffled)), strict=True):
        assert close(a.out, b.out, float(a.reach.max()))
        assert close(a.lse, b.lse)


def _ordered(descale: Any, order: torch.Tensor) -> Any:
    by_token = isinstance(descale, torch.Tensor) and descale.shape[0] == len(order)
    return descale[order] if by_token else descale


def test_invisible_keys_reach_no_bound() -> None:
    case, dtype, _ = problem(3)
    n = case.kv_lens[0]
    window = replace(
        case,
        q_lens=(2,),
        kv_lens=(n,),
        q=case.q[:2],
        k=case.k[:n],
        v=case.v[:n],
        causal=True,
        window=2,
        k_descale=None,
        v_descale=None,
    )
    poisoned = replace(window, k=window.k.clone(), v=window.v.clone())
    poisoned.k[: n - 3], poisoned.v[: n - 3] = math.nan, math.inf
    for clean, dirty in zip(*(both(p, None, dtype) for p in (window, poisoned)), strict=True):
        assert close(clean.out, dirty.out)
        assert close(clean.lse, dirty.lse)
        assert bool(dirty.out.isfinite().all())


def test_rows_without_keys_are_exact() -> None:
    q, k = torch.randn(5, 2, 16), torch.randn(2, 1, 16)
    case = Problem(q=q, k=k, v=k, q_lens=(5, 0), kv_lens=(2, 0), scale=0.25)
    bounds = worst_case(case, input_dtype="fp32")
    assert bounds.keys.tolist() == [0, 0, 0, 1, 2]
    assert bool((bounds.out[:3] == 0).all() and (bounds.lse[:3] == 0).all())
    assert bool((bounds.out[3:] > 0).all() and (bounds.lse[3:] > 0).all())


def test_reach_is_the_largest_visible_value() -> None:
    v = torch.tensor([5.0, 1.0, -3.0, 2.0, 0.5]).view(5, 1, 1)
    q = k = torch.zeros(5, 1, 16)
    case = Problem(q=q, k=k, v=v, q_lens=(5,), kv_lens=(5,), scale=1.0, window=3)
    assert worst_case(case, input_dtype="fp32").reach.flatten().tolist() == [5.0, 5.0, 5.0, 3.0, 3.0]


def test_equal_values_leave_only_roundings_of_the_value() -> None:
    """Errors of logits and exponentials cancel when every key has the same value, except for rounding."""
    q, k = torch.randn(1, 1, 16).bfloat16() * 5, torch.randn(90, 1, 16).bfloat16()
    case = Problem(q=q, k=k, v=torch.full((90, 1, 4), 2.0), q_lens=(1,), kv_lens=(90,), scale=0.25)
    loose = replace(STRICT, qk_product="bf16", exp_error=1e-3, logit_dtype="bf16")
    assert float(worst_case(case, loose, input_dtype="bf16").out.max()) < 300 * 2 * 2.0**-24


def test_weights_of_equal_logits_are_not_rounded() -> None:
    """They are all 1, which every format holds; so that few bits say nothing against an exact input."""
    case = Problem(
        q=torch.zeros(1, 1, 16),
        k=torch.randn(90, 1, 16),
        v=torch.randn(90, 1, 4),
        q_lens=(1,),
        kv_lens=(90,),
        scale=0.25,
    )
    bounds = [both(case, {"p_dtype": p}, "bf16") for p in (None, "e4m3fn")]
    for plain, cast in zip(*bounds, strict=True):
        assert bool((cast.out < 2 * plain.out + 1e-6).all())
    truncating = {"p_dtype": "e4m3fn", "p_rounding": Rounding.TOWARD_ZERO}
    assert bool((both(case, truncating, "bf16")[0].out < 2 * bounds[0][0].out + 1e-6).all())
    # Equal, but not known to be 0: a logit may come out below the largest, and its weight below 1.
    equal = replace(case, q=torch.ones(1, 1, 16), k=torch.ones(90, 1, 16) * 0.3)
    for strict, loose in zip(both(equal, {}, "bf16"), both(equal, truncating, "bf16"), strict=True):
        assert bool((loose.out > 1000 * strict.out).all())


def code(n: int, step: float = 1.0) -> Problem:
    """Equal weights over values +-step that cancel."""
    v = torch.ones(n, 1, 4) * step
    v[::2] = -step
    return Problem(
        q=torch.zeros(1, 1, 16), k=torch.randn(n, 1, 16), v=v, q_lens=(1,), kv_lens=(n,), scale=0.25, causal=False
    )


@pytest.mark.parametrize(
    "fields", [{}, {"p_dtype": "e4m3fn"}, {"p_dtype": "bf16", "p_rounding": Rounding.TOWARD_ZERO, "tile": 16}]
)
def test_sums_of_integers_are_exact(fields: dict[str, Any]) -> None:
    """Nothing is left but the final division, of 0, and in the log-sum-exp the logarithm."""
    worst, probable = both(code(8192), fields, "bf16")
    assert bool((worst.out < 1e-6).all())
    assert bool((probable.out < 1e-7).all())
    assert bool((worst.lse < 1e-5).all())
    coarse = {**fields, "pv": MatrixUnit(unit_roundoff=2.0**-12)}
    assert bool((both(code(8192), coarse, "bf16")[0].out > 1e-3).all())
    # Values of all sizes, or to be descaled, are no integers.
    uneven = code(8192)
    uneven.v[5] = 1e-4
    for inexact in (uneven, replace(code(8192), v_descale=0.7)):
        assert bool((both(inexact, fields, "bf16")[0].out > 1e-4).all())


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"p_dtype": "e4m3fnuz", "p_scale": 256.0}, (1.0, 1.0)),
        ({"logit_dtype": "fp16"}, (1.0, 1e6)),
        ({"qk_product": "fp16"}, (1e6, 1.0)),
        ({"max_splits": 2, "partial_dtype": "fp16"}, (1.0, 1.0, 1e6)),
        ({"q_cast": "e4m3fn"}, (500.0, 1.0)),
        ({"kv_cast": "e4m3fn"}, (1.0, 1.0, 500.0)),
    ],
)
def test_overflow_leaves_no_bound(fields: dict[str, Any], shape: tuple[float, ...]) -> None:
    size, scale, value = (*shape, 1.0)[:3]
    x = torch.ones(3, 1, 16)
    case = Problem(q=x * size, k=x, v=x * value, q_lens=(3,), kv_lens=(3,), scale=scale / size)
    assert bool((worst_case(case, replace(STRICT, **fields), input_dtype="fp32").out == math.inf).all())
    assert bool(worst_case(case, STRICT, input_dtype="fp32").out.isfinite().all())


def test_lse_that_counts_the_sink_has_its_own_bound() -> None:
    for seed in range(60):
        case, dtype, family = problem(seed)
        if case.sinks is None:
            continue
        choice = Choices(tile=16)
        result, solution = run(case, choice), solve(case)
        expected = lse_with_sink(solution.lse, case.sinks)
        actual = torch.logaddexp(result.lse, case.sinks.float())
        bounds = worst_case(case, choice.precision(), input_dtype=dtype, lse_includes_sink=True)
        error = (actual.double() - expected).abs() - expected.abs() * 2.0**-23
        assert bool((error <= bounds.lse)[bounds.keys > 0].all()), (seed, family)


def test_explain_names_the_largest_stage() -> None:
    case, dtype, _ = problem(0)
    where = {"input_dtype": dtype, "token": 0, "head": 0, "dim": 0}
    fp8 = replace(STRICT, p_dtype="e4m3fn")
    loud = replace(STRICT, exp_error=0.05)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 16), torch.randn(60, 1, 16), torch.randn(60, 1, 4)
    case = Problem(q=q, k=k, v=v, q_lens=(1,), kv_lens=(60,), scale=0.25)
    for precision, stage in ((fp8, "weight cast"), (loud, "exponential")):
        shares = explain(case, precision, **where)
        assert next(iter(shares)) == stage
        total = float(worst_case(case, precision, input_dtype=dtype).out[0, 0, 0])
        assert shares[stage] <= total <= 1.5 * sum(shares.values())


def test_explain_of_the_probable_bound_and_of_the_log_sum_exp() -> None:
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(m, 2, 16, generator=gen) for m in (1, 900, 900))
    case = Problem(q=q, k=k, v=v, q_lens=(1,), kv_lens=(900,), scale=0.25)
    where = {"input_dtype": "bf16", "token": 0, "head": 1}
    fp8 = replace(STRICT, p_dtype="e4m3fn", p_scale=448.0)
    found = budgets(case, fp8, input_dtype="bf16")
    shares = explain(case, fp8, **where, dim=3, confidence=6.5)
    assert next(iter(shares)) == "weight cast"
    total = float(found.probable.out[0, 1, 3])
    # Independent stages add in squares.
    assert max(shares.values()) <= total <= 1.1 * sum(shares.values())
    assert shares["weight cast"] < explain(case, fp8, **where, dim=3)["weight cast"] / 3
    loud = replace(STRICT, log_error=1e-3)
    assert next(iter(explain(case, loud, **where, confidence=6.5))) == "logarithm"
    loud = replace(STRICT, exp_error=1e-3)
    assert next(iter(explain(case, loud, **where))) == "exponential"
    lse = sum(explain(case, loud, **where, confidence=6.5).values())
    assert float(budgets(case, loud, input_dtype="bf16").probable.lse[0, 1]) <= 1.1 * lse


def test_confidence_follows_from_risk_and_elements() -> None:
    assert confidence_for(10**6, 1e-3) == pytest.approx(6.5, abs=0.05)
    assert confidence_for(10**9, 1e-3) == pytest.approx(7.5, abs=0.05)
    for elements, risk in ((0, 0.5), (10, 0.0), (10, 1.0)):
        with pytest.raises(ValueError, match="elements and risk"):
            confidence_for(elements, risk)
    with pytest.raises(ValueError, match="confidence"):
        budgets(problem(0)[0], input_dtype="bf16", confidence=0.0)


def test_the_oracle_s_result_can_be_given() -> None:
    for seed in range(10):
        case, dtype, _ = problem(seed)
        given_it = worst_case(case, input_dtype=dtype, solution=solve(case))
        assert torch.equal(given_it.out, worst_case(case, input_dtype=dtype).out)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_leaves_bounds_elsewhere(value: float) -> None:
    """One value: its column is judged without a bound or by rule, all others as ever. One key: its rows are lost."""
    case = replace(problem(0)[0], k_descale=None, v_descale=None, q_descale=None)
    case = replace(case, q=case.q.float(), k=case.k.float(), v=case.v.float().clone())
    plain = budgets(case, input_dtype="fp32")
    case.v[0, 0, 2] = value
    flawed = budgets(case, input_dtype="fp32")
    for before, after in ((plain.worst_case, flawed.worst_case), (plain.probable, flawed.probable)):
        assert not bool(after.out.isnan().any() or after.lse.isnan().any())
        others = torch.arange(case.dim_v) != 2
        assert close(before.out[..., others], after.out[..., others])
        assert close(before.lse, after.lse)


def test_explain_of_a_row_without_keys_is_empty() -> None:
    q, k = torch.randn(2, 1, 16), torch.randn(1, 1, 16)
    case = Problem(q=q, k=k, v=k, q_lens=(2,), kv_lens=(1,), scale=0.25)
    assert explain(case, input_dtype="fp32", token=0, head=0, dim=0) == {}
    assert explain(case, input_dtype="fp32", token=1, head=0, dim=0)


def test_unknown_dtype_is_named() -> None:
    case, _, _ = problem(0)
    with pytest.raises(ValueError, match="'int4'"):
        worst_case(case, input_dtype="int4")


def test_the_default_precision_is_the_loosest_of_its_kind() -> None:
    case, dtype, _ = problem(8)
    default: Bounds = worst_case(case, input_dtype=dtype)
    assert bool((default.out >= worst_case(case, STRICT, input_dtype=dtype).out).all())


@pytest.mark.parametrize(("in_sum", "most"), [(True, 0.2), (None, 10.0)])
def test_one_key_has_a_bound_however_wrong_its_logit(in_sum: bool | None, most: float) -> None:
    """Its weight cancels. With two keys it does not, and the bound says so."""
    q, k = (torch.full((n, 1, 64), 0.9) for n in (1, 2))
    v = torch.tensor([[[1.0]], [[-1.0]]])
    precision = replace(STRICT, q_cast="e4m3fn", p_dtype="e4m3fn", p_scale=256.0, row_sum_of_rounded_p=in_sum)
    bounds = [
        worst_case(
            Problem(q=q, k=k[:n] * 5, v=v[:n], q_lens=(1,), kv_lens=(n,), scale=0.25), precision, input_dtype="fp32"
        )
        for n in (1, 2)
    ]
    assert float(bounds[0].out) < most
    assert float(bounds[1].out) > 1
