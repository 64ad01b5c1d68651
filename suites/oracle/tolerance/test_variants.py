"""The emulated kernels compute attention, and what they round is what their precision says."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.attention import solve
from oracle.budget import budgets, judge
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.rounding import widen
from oracle.verdict import Verdict
from suites.oracle.budget.inputs import problem
from suites.tolerance import variants
from suites.tolerance.believed_right import FREE, VARIANTS
from suites.tolerance.variants import DTYPES, UNITS, Choices, cast, run

PLAIN = Choices(out_dtype="fp32")


def options() -> dict[str, tuple[Any, ...]]:
    """Every value that a variant of the list may have, by field."""
    found: dict[str, dict[Any, None]] = {name: dict.fromkeys(values) for name, values in FREE.items()}
    for variant in VARIANTS:
        for name, values in variant.options.items():
            found.setdefault(name, {}).update(dict.fromkeys(values))
    return {name: tuple(values) for name, values in found.items()}


ONE_BY_ONE = [(name, value) for name, values in options().items() for value in values]
UNROUNDED = {name: getattr(PLAIN, name) for name in ("q_cast", "qk_product", "logit_dtype", "p_dtype", "unit")}


@pytest.mark.parametrize("seed", range(13))
def test_a_plain_kernel_agrees_with_the_oracle(seed: int) -> None:
    case, _, family = problem(seed)
    result, solution = run(case, PLAIN), solve(case)
    size = float(widen(case.v).abs().max()) * 4
    assert float((result.wide.double() - solution.out).abs().max()) <= 1e-4 * size, family
    seen = solution.lse.isfinite()
    assert bool(((result.lse.double() - solution.lse).abs()[seen] <= 1e-4 * (1 + solution.lse.abs()[seen])).all())
    assert torch.equal(result.lse == -math.inf, solution.lse == -math.inf)


@pytest.mark.parametrize(("name", "value"), ONE_BY_ONE, ids=str)
def test_each_choice_is_within_the_bounds_of_its_precision(name: str, value: Any) -> None:
    for seed in range(3):
        case, dtype, family = problem(seed * 7 + 3, largest=64)
        choices = replace(PLAIN, **{name: value}, seed=seed)
        if name in ("sum_rounded", "p_scale", "p_truncated"):
            choices = replace(choices, p_dtype="bf16" if value != 448.0 else "e4m3fn")
        result = run(case, choices)
        both = budgets(case, choices.precision(), input_dtype=dtype)
        judgement = judge(
            result.out, result.lse, solve(case), both, out_dtype=choices.out_dtype, precision=choices.precision()
        )
        assert judgement.verdict in (Verdict.PASS, Verdict.VACUOUS), f"{family}, seed {seed}: {judgement}"


@pytest.mark.parametrize(
    "rounded",
    [
        {"p_dtype": "bf16"},
        {"p_dtype": "e4m3fn", "p_scale": 448.0},
        {"qk_product": "bf16"},
        {"logit_dtype": "bf16"},
        {"q_cast": "e4m3fn"},
        {"unit": "hopper_fp8"},
        {"splits": 3, "partial_dtype": "bf16"},
        {"ranks": 3, "rank_dtype": "bf16"},
    ],
    ids=str,
)
def test_what_a_choice_rounds_shows(rounded: dict[str, Any]) -> None:
    """Beyond the bounds of a kernel that does not round it: the choices do something, and the bounds notice."""
    beyond = 0
    for seed in range(12):
        case, dtype, _ = problem(seed)
        choices = replace(PLAIN, **rounded)
        fine = replace(choices, **{name: value for name, value in UNROUNDED.items() if name in rounded})
        fine = replace(fine, p_scale=1.0, partial_dtype="fp32", rank_dtype="fp32")
        result = run(case, choices)
        both = budgets(case, fine.precision(), input_dtype=dtype)
        judgement = judge(result.out, None, solve(case), both, out_dtype="fp32", precision=fine.precision())
        beyond += judgement.verdict in (Verdict.FAIL, Verdict.SUSPECT)
    assert beyond > 2


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case, _, _ = problem(4)
    whole = run(case, PLAIN)
    monkeypatch.setattr(variants, "_ROW_LOGITS", {"cpu": 1})
    one_by_one = run(case, PLAIN)
    assert torch.allclose(whole.wide, one_by_one.wide, rtol=1e-5, atol=1e-6)
    assert torch.allclose(whole.lse, one_by_one.lse, rtol=1e-6)


def test_the_same_seed_makes_the_same_bits() -> None:
    case, _, _ = problem(13)
    choices = replace(PLAIN, exp_noise="random", splits=3, order="random", tile=16)
    first, again, other = (run(case, replace(choices, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.out, again.out)
    assert not torch.equal(first.out, other.out)


def test_keys_may_come_in_any_order() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 16, generator=gen) for n in (3, 40, 40))
    case = Problem(q=q, k=k, v=v, q_lens=(3,), kv_lens=(40,), scale=0.25, window=9)
    order = torch.randperm(40, generator=gen)
    shuffled = replace(case, k=k[order], v=v[order], kv_positions=order)
    assert torch.allclose(run(case, PLAIN).wide, run(shuffled, PLAIN).wide, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-400, 400, width=32), min_size=1, max_size=20), st.sampled_from(sorted(DTYPES)))
def test_casts_toward_zero_are_the_nearest_that_is_no_larger(values: list[float], name: str) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    down, nearest = cast(x, name, truncate=True), cast(x, name)
    assert bool((down.abs() <= x.abs()).all())
    assert bool(((nearest == down) | (nearest.abs() > x.abs())).all())
    assert torch.equal(cast(down, name), down)


def _fused_exactly(a: list[float], b: list[float], start: float, unit: variants.Unit) -> Fraction:
    """The model of `Unit` in rational numbers."""
    terms = [Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)] + [Fraction(start)]
    largest = max(abs(t) for t in terms)
    if not largest:
        return Fraction(0)
    exponent = math.frexp(float(largest))[1] - 1
    step = Fraction(2) ** (exponent - unit.fraction)
    total = sum((t / step).__floor__() if unit.floor else int(t / step) for t in terms) * step
    if unit.floor or not total:
        return Fraction(float(torch.tensor(float(total), dtype=torch.float64).float()))
    last = Fraction(2) ** (math.frexp(float(total))[1] - unit.kept)
    return int(total / last) * last


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([name for name, unit in UNITS.items() if unit.fraction]))
def test_fused_units_are_their_model(data: st.DataObject, name: str) -> None:
    unit = UNITS[name]
    numbers = st.integers(-255, 255).flatmap(lambda m: st.integers(-12, 12).map(lambda e: float(m) * 2.0**e))
    a, b = (data.draw(st.lists(numbers, min_size=unit.block, max_size=unit.block)) for _ in range(2))
    start = data.draw(numbers)
    x, y = (torch.tensor(v, dtype=torch.float32) for v in (a, b))
    got = variants._fuse(x.view(1, 1, -1), y.view(1, -1, 1), torch.full((1, 1, 1), start), unit)
    assert Fraction(float(got)) == _fused_exactly(a, b, start, unit)


def test_a_precision_leaves_no_field_looser_than_the_kernel() -> None:
    """What is left at the loosest assumption is what the kernel does: float32 sums in any order, good exponentials."""
    assert set(Choices().precision().loosest()) <= {
        *("qk", "scale_error", "exp_error", "exp_argument_roundings", "log_error", "pv"),
    }
    assert "kv_cast" in Precision().loosest()
