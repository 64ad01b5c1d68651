"""Merging partial states: the rules of empty states, both bases, sinks once, and any split of the keys."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.attention import lse_with_sink, solve
from oracle.kinds import LseBase
from oracle.merge import apply_sink, merge_states
from oracle.problem import Problem

INF, NAN = math.inf, math.nan


def state(out: float, lse: float) -> tuple[Tensor, Tensor]:
    """One row, one head, two dimensions."""
    return torch.full((1, 1, 2), out, dtype=torch.float64), torch.full((1, 1), lse, dtype=torch.float64)


def merged(*states: tuple[Tensor, Tensor], base: LseBase = LseBase.NATURAL) -> tuple[float, float]:
    out, lse = merge_states(torch.stack([o for o, _ in states]), torch.stack([x for _, x in states]), base)
    return float(out[0, 0, 0]), float(lse)


def test_empty_and_empty_is_empty() -> None:
    assert merged(state(0.0, -INF), state(0.0, -INF)) == (0.0, -INF)


@pytest.mark.parametrize("base", LseBase)
@pytest.mark.parametrize("lse", [-800.0, 0.0, 0.1, 800.0])
def test_empty_is_the_identity_bit_for_bit(lse: float, base: LseBase) -> None:
    assert merged(state(0.3, lse), state(0.0, -INF), base=base) == (0.3, lse)
    assert merged(state(0.0, -INF), state(0.3, lse), base=base) == (0.3, lse)
    assert merged(state(0.3, lse), base=base) == (0.3, lse)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_the_output_of_an_empty_state_contributes_nothing(garbage: float) -> None:
    assert merged(state(garbage, -INF), state(0.3, 2.0)) == (0.3, 2.0)
    assert merged(state(garbage, -INF), state(garbage, -INF)) == (0.0, -INF)


@pytest.mark.parametrize("lse", [NAN, INF])
def test_an_undefined_weight_makes_the_row_nan(lse: float) -> None:
    out, total = merged(state(0.3, lse), state(0.5, 1.0))
    assert math.isnan(out)
    assert math.isnan(total) if math.isnan(lse) else total == INF


def test_a_nan_output_with_weight_propagates() -> None:
    assert math.isnan(merged(state(NAN, 0.0), state(0.5, 1.0))[0])


def test_weights_in_natural_and_base_two() -> None:
    assert merged(state(1.0, math.log(3.0)), state(5.0, 0.0)) == pytest.approx((2.0, math.log(4.0)), rel=1e-15)
    assert merged(state(1.0, math.log2(3.0)), state(5.0, 0.0), base=LseBase.TWO) == pytest.approx((2.0, 2.0), rel=1e-15)


def test_far_apart_states_do_not_overflow() -> None:
    assert merged(state(1.0, 5000.0), state(2.0, -5000.0)) == (1.0, 5000.0)


def test_shapes_must_belong_together() -> None:
    with pytest.raises(ValueError, match="lses: allowed is"):
        merge_states(torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match="at least one state"):
        merge_states(torch.zeros(0, 4, 8), torch.zeros(0, 4))


def test_a_sink_takes_its_share_of_the_weight() -> None:
    out, lse = state(6.0, 0.0)
    assert float(apply_sink(out, lse, torch.tensor([math.log(2.0)], dtype=torch.float64))[0, 0, 0]) == pytest.approx(
        2.0
    )
    three = torch.full((1, 1), 3.0, dtype=torch.float64)
    assert torch.allclose(
        apply_sink(out, three, torch.tensor([1.0]), LseBase.TWO),
        apply_sink(out, three * math.log(2.0), torch.tensor([1.0])),
        rtol=1e-15,
    )


@pytest.mark.parametrize(("sink", "expected"), [(-INF, 6.0), (-1e4, 6.0), (1e4, 0.0), (INF, 0.0)])
def test_extreme_sinks(sink: float, expected: float) -> None:
    out, lse = state(6.0, 0.0)
    assert float(apply_sink(out, lse, torch.tensor([sink]))[0, 0, 0]) == expected


def test_a_sink_leaves_an_empty_row_empty_and_is_its_lse() -> None:
    out, lse = state(0.0, -INF)
    assert float(apply_sink(out, lse, torch.tensor([1.5]))[0, 0, 0]) == 0.0
    assert float(lse_with_sink(lse, torch.tensor([1.5]))) == 1.5
    assert float(lse_with_sink(lse, torch.tensor([-INF]))) == -INF
    assert float(lse_with_sink(torch.zeros(1, 1), torch.zeros(1))) == pytest.approx(math.log(2.0))


def random_problem(seed: int, *, big_logits: bool) -> Problem:
    g = torch.Generator().manual_seed(seed)
    q_lens, contexts = (3, 0, 7, 2), (9, 5, 30, 1)
    return Problem(
        q=torch.randn(sum(q_lens), 4, 8, generator=g) * (200.0 if big_logits else 1.0),
        k=torch.randn(sum(contexts), 2, 8, generator=g),
        v=torch.randn(sum(contexts), 2, 5, generator=g),
        q_lens=q_lens,
        kv_lens=contexts,
        scale=0.35,
        window=11,
        soft_cap=None if big_logits else 4.0,
    )


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.booleans(), st.sampled_from(LseBase), st.booleans())
def test_any_split_of_the_keys_merges_to_the_whole(
    seed: int, parts: int, big_logits: bool, base: LseBase, sinks: bool
) -> None:
    p = random_problem(seed, big_logits=big_logits)
    g = torch.Generator().manual_seed(seed + 1)
    share = torch.randint(0, parts, (p.k.shape[0],), generator=g)
    states = [solve(p.subset(share == i)) for i in range(parts)]
    unit = math.log(2.0) if base is LseBase.TWO else 1.0
    out, lse = merge_states(torch.stack([s.out for s in states]), torch.stack([s.lse for s in states]) / unit, base)
    whole = solve(p)
    if sinks:
        logits = torch.randn(4, generator=g)
        out, whole_out = apply_sink(out, lse, logits, base), apply_sink(whole.out, whole.lse, logits)
    else:
        whole_out = whole.out
    # Logits of some hundreds carry an absolute error of 1e-13, and so does their exponential.
    tolerance = 1e-11 if big_logits else 1e-13
    torch.testing.assert_close(out, whole_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse * unit, whole.lse, rtol=1e-13, atol=1e-13)
