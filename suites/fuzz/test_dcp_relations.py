"""What must hold between merges of the same states, whatever the truth is: over every target that merges.

Relations are between two results of a target; each may be off by what its budget allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuzz import engine as engines
from fuzz import registry
from fuzz.buffers import DTYPES
from oracle import philox
from oracle.budget.formats import format_named
from oracle.budget.merge import merge_bounds
from oracle.declare import Declaration
from oracle.kinds import Engine, LseBase
from oracle.merge import merge_states
from oracle.rounding import round_to
from suites.targets import sglang_dcp, sglang_dcp_combine, sglang_dcp_comm, sglang_merge_splits, sglang_merge_state
from suites.targets.portable import merge as portable

pytestmark = pytest.mark.dcp

TARGETS = [
    declaration
    for module in (sglang_dcp, sglang_dcp_combine, sglang_dcp_comm, sglang_merge_state, sglang_merge_splits, portable)
    for declaration in registry.declared_in(module)
    if declaration.operation.value == "lse_merge"
    and not declaration.name.endswith((".gloo", ".shared_context", ".packed"))
]
TRIED = [(d, dtype) for d in TARGETS for dtype in ("fp32", "bf16") if dtype in d.supports.dtypes]
WITH_LSE = (
    *("sglang.dcp.correct_attn_out", "sglang.merge_state", "sglang.merge_state.chain", "sglang.merge_state.tree"),
    "portable.merge",
)
SOME = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**31 - 1)
ROWS, HEADS, WIDTH = 2, 4, 16

States = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Merge:
    """A target that merges, and the dtype of the states that it is given."""

    declaration: Declaration
    dtype: str

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def base(self) -> LseBase:
        return self.declaration.convention.lse_base


@pytest.fixture(params=TRIED, ids=lambda tried: f"{tried[0].name}-{tried[1]}")
def target(request: pytest.FixtureRequest) -> Merge:
    found = Merge(*request.param)
    reason = found.declaration.unavailable(Engine.EMULATOR)
    if reason is not None:
        pytest.skip(reason)
    engines.start(Engine.EMULATOR)
    return found


def states(target: Merge, seed: int, count: int) -> States:
    """Outputs [N, T, H, D] and log-sum-exps [N, T, H] that are multiples of 1/8: sums with integers are exact."""
    outs = round_to(philox.normal(seed, 0, (count, ROWS, HEADS, WIDTH)).double(), DTYPES[target.dtype])
    lses = (philox.normal(seed, 1, (count, ROWS, HEADS)) * 32).round() / 8
    return outs, lses.float()


def most(target: Merge) -> int:
    """How many states are merged: two, where a target takes no more, else four."""
    return 4 if 4 in target.declaration.supports.parts else 2


def merged(target: Merge, given_: States) -> tuple[Tensor, Tensor | None]:
    """Output and, if the target gives one, log-sum-exp, in float64."""
    outs, lses = given_
    found = target.declaration.function(outs.clone(), lses.clone())
    if isinstance(found, Tensor):
        return found.double(), None
    out, lse = found
    return out.double(), lse.double()


def allowed(target: Merge, given_: States) -> tuple[Tensor, Tensor]:
    """What one merge of these states may be off by, its last rounding included: output and log-sum-exp."""
    outs, lses = (x.double() for x in given_)
    out, lse = merge_states(outs, lses, target.base)
    bounds = merge_bounds(outs, lses, out, lse, target.declaration.precision_for(target.dtype), target.base)
    # Some paths give float32 of bf16 states: they round less than is allowed here.
    stored = format_named(target.dtype)
    rounded = stored.unit_roundoff * (out.abs() + bounds.out) + stored.half_subnormal
    size = format_named("fp32")
    return bounds.out + rounded, bounds.lse + size.unit_roundoff * (lse.abs() + bounds.lse)


def assert_same(target: Merge, one: States, other: States, shift: float = 0.0) -> None:
    """Two merges agree within both budgets; the second's log-sum-exp is larger by ``shift``."""
    found, again = merged(target, one), merged(target, other)
    bound, second = allowed(target, one), allowed(target, other)
    assert bool(((again[0] - found[0]).abs() <= bound[0] + second[0]).all())
    if found[1] is not None and again[1] is not None:
        assert bool(((again[1] - found[1] - shift).abs() <= bound[1] + second[1]).all())


@pytest.mark.parametrize(("dtype", "off"), [("fp32", 1.00001), ("bf16", 1.02)])
def test_the_assertion_notices_other_states(dtype: str, off: float) -> None:
    declaration = next(d for d in TARGETS if d.name == "sglang.merge_state")
    if (reason := declaration.unavailable(Engine.EMULATOR)) is not None:
        pytest.skip(reason)
    engines.start(Engine.EMULATOR)
    target = Merge(declaration, dtype)
    outs, lses = states(target, 1, 2)
    other = round_to(outs.double() * off, outs.dtype)
    with pytest.raises(AssertionError):
        assert_same(target, (outs, lses), (other, lses))
    with pytest.raises(AssertionError):
        assert_same(target, (outs, lses), (outs, lses + 1))


@SOME
@given(SEEDS, st.permutations(range(4)))
def test_ranks_may_be_renumbered(target: Merge, seed: int, order: list[int]) -> None:
    outs, lses = states(target, seed, most(target))
    chosen = [i for i in order if i < most(target)]
    assert_same(target, (outs, lses), (outs[chosen], lses[chosen]))


@SOME
@given(SEEDS, st.sampled_from([-64.0, 64.0, 1024.0]))
def test_a_shift_of_every_log_sum_exp_shifts_only_the_log_sum_exp(target: Merge, seed: int, shift: float) -> None:
    outs, lses = states(target, seed, most(target))
    assert_same(target, (outs, lses), (outs, lses + shift), shift)


@SOME
@given(SEEDS, st.integers(0, 1))
def test_an_empty_state_changes_nothing(target: Merge, seed: int, place: int) -> None:
    if target.name == "sglang.merge_splits":
        pytest.skip("knows empty splits by their place alone")
    outs, lses = states(target, seed, 2)
    lses[place] = -torch.inf
    only = 1 - place
    out, lse = merged(target, (outs, lses))
    bound = allowed(target, (outs, lses))
    assert bool(((out - outs[only].double()).abs() <= bound[0]).all())
    if lse is not None:
        assert bool(((lse - lses[only].double()).abs() <= bound[1]).all())


@SOME
@given(SEEDS, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_no_number_in_a_state_with_keys_stays_so(target: Merge, seed: int, special: float) -> None:
    """It is a fault of an attention kernel. The all-reduce path makes zeros of it, so that nobody learns of it."""
    outs, lses = states(target, seed, 2)
    clean, _ = merged(target, (outs, lses))
    outs[1, 0, 0, 3] = special
    out, _ = merged(target, (outs, lses))
    if target.name == "sglang.dcp.comm.all_reduce":
        assert bool(out.isfinite().all())
    else:
        assert not math.isfinite(float(out[0, 0, 3]))
    out[0, 0, 3] = clean[0, 0, 3]
    assert torch.equal(out, clean)


@SOME
@given(SEEDS)
def test_equal_states_merge_to_themselves(target: Merge, seed: int) -> None:
    count = most(target)
    outs, lses = (x.expand(count, *x.shape[1:]) for x in states(target, seed, 1))
    out, lse = merged(target, (outs, lses))
    bound = allowed(target, (outs, lses))
    assert bool(((out - outs[0].double()).abs() <= bound[0]).all())
    if lse is not None:
        more = math.log2(count) if target.base is LseBase.TWO else math.log(count)
        assert bool(((lse - lses[0].double() - more).abs() <= bound[1]).all())


@SOME
@given(SEEDS)
def test_one_rank_gives_its_own_output_back(target: Merge, seed: int) -> None:
    if not target.name.startswith(("sglang.dcp.comm", "sglang.merge_state.")):
        pytest.skip("merges two states, or corrects the output of a rank among several")
    outs, lses = states(target, seed, 1)
    out, _ = merged(target, (outs, lses))
    assert torch.equal(out, outs[0].double())


@SOME
@given(SEEDS, st.booleans())
def test_merged_merges_are_the_merge_of_all(target: Merge, seed: int, neighbours: bool) -> None:
    if target.name not in WITH_LSE:
        pytest.skip("gives no log-sum-exp to merge by")
    outs, lses = states(target, seed, 4)
    pairs = [[0, 1], [2, 3]] if neighbours else [[0, 2], [1, 3]]
    inner = [merged(target, (outs[pair], lses[pair])) for pair in pairs]
    inner_bounds = [allowed(target, (outs[pair], lses[pair])) for pair in pairs]
    middle_outs = round_to(torch.stack([out for out, _ in inner]), outs.dtype)
    middle_lses = torch.stack([lse for _, lse in inner if lse is not None]).float()
    out, lse = merged(target, (middle_outs, middle_lses))
    base = target.base
    true_out, true_lse = merge_states(outs.double(), lses.double(), base)
    outer = allowed(target, (middle_outs, middle_lses))
    # An error d of each inner log-sum-exp, in natural units, moves the weights by factors within exp(-2d) .. exp(2d).
    unit = math.log(2.0) if base is LseBase.TWO else 1.0
    moved = torch.stack([bound[1] for bound in inner_bounds]).amax(0)
    errors = torch.stack([bound[0] for bound in inner_bounds]).amax(0)
    reach = (middle_outs.double().abs() + errors).amax(0)
    bound = outer[0] + errors + reach * torch.expm1(2 * unit * moved).unsqueeze(-1)
    assert bool(((out - true_out).abs() <= bound).all())
    assert lse is not None
    assert bool(((lse - true_lse).abs() <= outer[1] + moved).all())
