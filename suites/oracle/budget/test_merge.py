"""The merge budget holds for float32 merges of every kind, and catches what is no rounding error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oracle.budget.merge import merge_bounds
from oracle.kinds import LseBase
from oracle.merge import merge_states
from oracle.precision import Precision


def states(seed: int, count: int, spread: float, empty: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(count, 3, 2, 8, generator=generator)
    lses = torch.randn(count, 3, 2, generator=generator) * spread
    return outs, lses.masked_fill(torch.rand(count, 3, 2, generator=generator) < empty, -math.inf)


def by_sum(outs: Tensor, lses: Tensor, base: LseBase) -> tuple[Tensor, Tensor]:
    """Float32: weights over their own sum."""
    exp, log = (torch.exp2, torch.log2) if base is LseBase.TWO else (torch.exp, torch.log)
    top = lses.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    e = exp(lses - top)
    total = e.sum(0)
    out = (outs * (e / total).nan_to_num(0.0).unsqueeze(-1)).sum(0)
    return out, log(total) + top


def by_log(outs: Tensor, lses: Tensor, base: LseBase) -> tuple[Tensor, Tensor]:
    """Float32: weights from the difference to the merged log-sum-exp."""
    exp = torch.exp2 if base is LseBase.TWO else torch.exp
    _, lse = by_sum(outs, lses, base)
    factor = exp(lses - lse).nan_to_num(0.0)
    return (outs * factor.unsqueeze(-1)).sum(0), lse


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 9),
    spread=st.sampled_from([0.1, 4.0, 60.0, 3000.0]),
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    base=st.sampled_from(list(LseBase)),
)
def test_float32_merges_keep_to_the_bound(seed: int, count: int, spread: float, empty: float, base: LseBase) -> None:
    outs, lses = states(seed, count, spread, empty)
    out, lse = merge_states(outs, lses, base)
    bounds = merge_bounds(outs.double(), lses.double(), out, lse, Precision(), base)
    for kernel in (by_sum, by_log):
        got, got_lse = kernel(outs, lses, base)
        # Half a unit of float32 covers the rounding of the output itself.
        assert bool(((got - out).abs() <= bounds.out + out.abs() * 2.0**-24).all())
        full = lse > -math.inf
        assert bool(((got_lse - lse).abs()[full] <= bounds.lse[full] + lse.abs()[full] * 2.0**-24).all())
        assert bool((got_lse[~full] == -math.inf).all())


@given(seed=st.integers(0, 10**6))
def test_bf16_partials_keep_to_their_bound_and_break_the_float32_one(seed: int) -> None:
    outs, lses = states(seed, 4, 1.0, 0.0)
    out, lse = merge_states(outs, lses)
    weights = (lses.double() - lse).exp().float()
    got = (outs * weights.unsqueeze(-1)).bfloat16().float().sum(0)
    wide = merge_bounds(outs.double(), lses.double(), out, lse, Precision(rank_dtype="bf16"))
    exact = merge_bounds(outs.double(), lses.double(), out, lse, Precision())
    assert bool(((got - out).abs() <= wide.out).all())
    assert not bool(((got - out).abs() <= exact.out).all())


@pytest.mark.parametrize("fault", ["base", "lost", "twice"])
def test_a_wrong_merge_is_beyond_the_bound(fault: str) -> None:
    outs, lses = states(3, 4, 2.0, 0.0)
    out, lse = merge_states(outs, lses)
    bounds = merge_bounds(outs.double(), lses.double(), out, lse, Precision(rank_dtype="bf16"))
    if fault == "base":
        got, _ = by_sum(outs, lses, LseBase.TWO)
    elif fault == "lost":
        got, _ = by_sum(outs[1:], lses[1:], LseBase.NATURAL)
    else:
        got, _ = by_sum(torch.cat([outs, outs[:1]]), torch.cat([lses, lses[:1]]), LseBase.NATURAL)
    assert bool(((got - out).abs() > bounds.out).any())


def test_empty_rows_are_exact() -> None:
    outs, lses = states(1, 2, 1.0, 1.0)
    out, lse = merge_states(outs, lses)
    bounds = merge_bounds(outs.double(), lses.double(), out, lse, Precision())
    assert bool((bounds.out == 0).all())
    assert bool((bounds.lse == 0).all())
