"""What the soundness campaign and the adversarial search found: correct kernels beyond a bound."""

import math
from typing import Any

import pytest
import torch

from fuzz.buffers import Poison
from fuzz.instance import build
from oracle import philox
from oracle.attention import solve
from oracle.budget import budgets
from oracle.budget.formats import format_named
from oracle.precision import Precision, Rounding
from oracle.problem import Problem
from oracle.rounding import round_to, widen
from suites.fuzz.cases import decode_case
from suites.tolerance.adversarial import replay
from suites.tolerance.variants import Choices, cast, run


def _near_ties(n: int, dim: int) -> Problem:
    """Keys that are alike in all but two dimensions, and no two of them in both: n = 64 * 64 logits."""

    def normal(stream: int, *shape: int) -> torch.Tensor:
        return philox.normal(7, stream, shape).double()

    k = normal(1, 1, 1, dim).expand(n, 1, dim).clone()
    k[..., 0] = 1 + (torch.arange(n) % 64).double().unsqueeze(-1) / 128
    k[..., 1] = 1 + (torch.arange(n) // 64).double().unsqueeze(-1) / 128
    q, v = normal(0, 1, 1, dim), normal(2, n, 1, 8)
    q, k, v = (round_to(x, torch.bfloat16) for x in (q, k, v))
    return Problem(q=q, k=k, v=v, q_lens=(1,), kv_lens=(n,), scale=1 / math.sqrt(dim))


def test_products_of_keys_that_are_nearly_alike_round_alike() -> None:
    """Rounding q k of alike keys errs alike: the log-sum-exp is off by that error, however many keys there are."""
    problem = _near_ties(4096, 64)
    q, k = widen(problem.q)[0, 0], widen(problem.k)[:, 0]
    exact = torch.logsumexp(k @ q * problem.scale, 0)
    rounded = torch.logsumexp(widen(round_to(k * q, torch.bfloat16)).sum(-1) * problem.scale, 0)
    both = budgets(problem, Precision(qk_product="bf16", p_dtype=None), input_dtype="bf16")
    error = abs(float(rounded - exact))
    assert error > 1e-4
    assert error <= float(both.worst_case.lse)
    assert error <= float(both.probable.lse)


def test_weights_that_are_cast_against_the_sink_round_alike() -> None:
    """A kernel that begins with the sink as its maximum casts exp(s - sink): near-equal weights err alike.

    The casts that the probable bound simulates must contain that very maximum: of the others some are lucky.
    """
    n, count = 1024, 256
    sinks = 2.0 + torch.arange(count) / count
    q = torch.ones(1, count, 16)
    k = round_to(philox.normal(8, 0, (n, 1, 16)).double() * 2.0**-14, torch.float32)
    problem = Problem(q=q, k=k, v=torch.ones(n, 1, 1), q_lens=(1,), kv_lens=(n,), scale=1.0, sinks=sinks)
    logits = (k[:, 0].double().sum(-1)).unsqueeze(0)
    weight = (logits - sinks.double().unsqueeze(1)).exp()
    cast = widen(round_to(weight, torch.bfloat16))
    share = 1 / (1 + weight.sum(1))
    error = ((cast - weight).sum(1) * share).abs()
    precision = Precision(qk_product=None, p_dtype="bf16", row_sum_of_rounded_p=False)
    both = budgets(problem, precision, input_dtype="bf16")
    assert bool((error <= both.worst_case.out[0, :, 0]).all())
    assert bool((error <= both.probable.out[0, :, 0]).all())


def test_a_coarse_exponential_may_miss_1_at_0() -> None:
    """Then all weights of equal logits are off alike: it cancels in the output, and shows in the log-sum-exp."""
    q, k, v = torch.zeros(1, 1, 16), torch.ones(50, 1, 16), torch.ones(50, 1, 4)
    problem = Problem(q=q, k=k, v=v, q_lens=(1,), kv_lens=(50,), scale=0.25)
    for exp_error in (2.0**-13, 20 * 2.0**-23):
        both = budgets(problem, Precision(exp_error=exp_error), input_dtype="bf16")
        for bounds in (both.probable, both.worst_case):
            assert float(bounds.lse) >= math.log1p(exp_error)
    # An error of a few ulp is another matter: exp2(0) is 1 there.
    assert float(budgets(problem, Precision(), input_dtype="bf16").worst_case.lse) < 1e-5


@pytest.mark.parametrize("parts", [{"splits": 4}, {"splits": 7}, {"ranks": 4}, {"ranks": 4, "cyclic": True}], ids=str)
def test_splits_cast_weights_against_maxima_of_their_own(parts: dict[str, Any]) -> None:
    """Logits within a step or two of the format: each part's own maximum decides which weights round down."""
    n = 800
    ratios = []
    for seed in range(12):
        s = 0.2456 + philox.normal(seed, 0, (n, 1, 1)) * 4.7e-4
        v = round_to(1 + philox.normal(seed, 1, (n, 1, 16)).double() / 8, torch.bfloat16)
        problem = Problem(q=torch.ones(1, 1, 1), k=s, v=v, q_lens=(1,), kv_lens=(n,), scale=1.0)
        choices = Choices(tile=32, p_dtype="bf16", seed=seed, **parts)
        error = (run(problem, choices).wide.double() - solve(problem).out).abs()
        ratios.append(float((error / budgets(problem, choices.precision(), input_dtype="fp32").probable.out).max()))
    assert max(ratios) <= 1
    assert max(ratios) > 0.1


@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2", "bf16", "fp16"])
def test_weights_closer_together_than_a_step_may_all_be_at_its_middle(dtype: str) -> None:
    """Wherever a part's own maximum puts them: it may lie anywhere below the row's, and only some places are tried."""
    n, unit = 2048, format_named(dtype).unit_roundoff
    precision = Precision(qk_product=None, p_dtype=dtype, row_sum_of_rounded_p=True, max_splits=2)
    for middle in (0.8864, 0.8786, 0.72, 0.6602, 0.5666):
        s = math.log(middle) + philox.normal(3, 0, (n, 1, 1)).double() * (unit / 20)
        s[0] = 0.0
        problem = Problem(q=torch.ones(1, 1, 1), k=s, v=torch.ones(n, 1, 1), q_lens=(1,), kv_lens=(n,), scale=1.0)
        bound = float(budgets(problem, precision, input_dtype="fp32").probable.lse)
        near, errors = s[1:].flatten(), []
        for maximum in torch.linspace(float(near.max()), 0.0, 200).tolist():
            weights = (near - maximum).exp()
            moved = (widen(round_to(weights, format_named(dtype).dtype)) - weights).sum() * math.exp(maximum)
            errors.append(abs(float(moved / s.exp().sum())))
        assert max(errors) > unit / 3
        assert max(errors) <= bound


@pytest.mark.parametrize("deep", [True, False])
def test_logits_that_err_below_a_sink_may_underflow_beside_it(deep: bool) -> None:
    """Kernels whose maximum begins with the sink return -inf for the log-sum-exp of keys far below it."""
    size = 256.0 if deep else 0.5
    q, k = torch.full((1, 1, 64), size), torch.full((40, 1, 64), -size / 60)
    v, s = torch.ones(40, 1, 4), -(size**2) * 64 / 60
    problem = Problem(q=q, k=k, v=v, q_lens=(1,), kv_lens=(40,), scale=1.0, sinks=torch.tensor([s + math.log(40)]))
    both = budgets(problem, Precision(qk_product="bf16", p_dtype=None), input_dtype="bf16")
    # Each product may be off by 2^-9 of itself: here by 136 together, which exp does not survive in float32.
    for bounds in (both.probable, both.worst_case):
        assert (float(bounds.lse) == math.inf) == deep


def test_a_query_that_is_cast_moves_all_weights_away_from_the_largest() -> None:
    """What keys have in common cancels in the output, but not from the rounding of the weights that it has moved."""
    case = decode_case(
        context_lens=[803],
        query_lens=[1],
        num_kv_heads=1,
        seed=2030036803,
        group_size=16,
        head_dim=80,
        v_head_dim=48,
        dtype="fp16",
        kv_dtype="e5m2",
        soft_cap=0.01,
        scale=0.02,
        k_descale="tensor",
        v_descale="tensor",
        probe="near_ties",
    )
    problem = build(case, Poison.POSITIVE).problem
    assert problem is not None
    choices = Choices(tile=32, q_cast="e5m2", p_dtype="e5m2", sum_rounded=False, seed=1)
    error = (run(problem, choices).wide.double() - solve(problem).out).abs()
    ratio = float((error / budgets(problem, choices.precision(), input_dtype="fp16").probable.out).max())
    assert 0.1 < ratio <= 1


EDITS = [
    ["v", 202994, 4.0],
    ["k", 78342, 4.0],
    ["k", 679902, -1.0],
    ["k", 377758, 0.9],
    ["v", 258695, 0.0],
    ["k", 368715, 4.0],
    ["k", 958789, 0.5],
    ["q", 821160, 4.0],
    ["q", 254015, 2.0],
    ["q", 727653, 0.5],
    ["k", 718756, 1.1],
    ["v", 516239, 4.0],
    ["v", 498106, 2.0],
    ["v", 151070, 0.5],
    ["q", 941800, 4.0],
    ["k", 901944, 0.9],
    ["q", 952212, 0.9],
    ["q", 177681, -1.0],
    ["v", 529869, 0.0],
    ["q", 703788, -1.0],
    ["v", 652326, 0.5],
    ["q", 623965, 0.0],
    ["q", 456230, -1.0],
    ["k", 644296, -1.0],
]


def test_ranks_that_own_every_nth_key_have_tiles_of_their_own() -> None:
    """Found by the adversarial search: logits that rise, so that the tiles of each rank cast the same weights anew."""
    genes = {
        "keys": 4096,
        "dim": 16,
        "size": -3.5,
        "levels": 0,
        "arrangement": "ascending",
        "values": "one",
        "follow": 1.0,
        "offset": 0.0,
        "spread": 1.0,
        "frequency": 0.5,
        "phase": 0.1875,
        "sink": None,
        "soft_cap": None,
    }
    choices = {
        "tile": 16,
        "order": "ascending",
        "base_two": True,
        "scale_query": False,
        "fused_argument": False,
        "reciprocal": True,
        "unit": "block",
        "exp_noise": "random",
        "sum_rounded": True,
        "merge": "absolute",
        "sink": "initial",
        "flush": True,
        "sigmoid_tanh": True,
        "p_dtype": "bf16",
        "ranks": 2,
        "cyclic": True,
        "rank_dtype": "fp32",
        "reduce_dtype": "bf16",
        "splits": 3,
    }
    candidate = {"variant": "bf16 ranks", "seed": 471668822, "genes": genes, "choices": choices, "edits": EDITS}
    (score,) = replay([{"candidate": candidate}], "cpu")
    assert 0.5 < score.lse <= 1


def test_logits_that_err_by_more_than_their_tile_differs_leave_weights_below_its_maximum() -> None:
    """Keys ascend: a cast query scatters neighbouring logits, and all are cast below one that came out high."""
    n = 1 << 14
    q = round_to(philox.normal(3, 0, (1, 1, 64)).double() / 4, torch.bfloat16)
    k = round_to(philox.normal(3, 1, (n, 1, 64)).double(), torch.float8_e4m3fn)
    k = k[(widen(k)[:, 0] @ widen(q)[0, 0]).argsort()]
    problem = Problem(q=q, k=k, v=torch.ones(n, 1, 1), q_lens=(1,), kv_lens=(n,), scale=1 / 8)
    choices = Choices(tile=16, p_dtype="e4m3fn", q_cast="e4m3fn", seed=3)
    error = float((run(problem, choices).wide.double() - solve(problem).out).abs())
    bound = float(budgets(problem, choices.precision(), input_dtype="bf16").probable.out)
    assert bound / 6 < error <= bound


@pytest.mark.parametrize("rounding", list(Rounding))
def test_a_cast_query_moves_near_equal_weights_to_where_their_rounding_changes(rounding: Rounding) -> None:
    """Below a sink, where values follow the logits: half of the weights round up, and half down."""
    n = 4096
    q, k = torch.full((1, 1, 1), 1 + 1 / 32), 0.1 + philox.normal(5, 0, (n, 1, 1)).double() * 5e-4
    logits, changes = k.flatten(), 0.25 if rounding is Rounding.TOWARD_ZERO else 0.25 * (1 + 1 / 16)
    values = torch.sign(logits - logits.median()).view(n, 1, 1)
    sinks = torch.tensor([float(logits.median()) - math.log(changes)])
    problem = Problem(q=q.double(), k=k, v=values, q_lens=(1,), kv_lens=(n,), scale=1.0, sinks=sinks)
    precision = Precision(
        q_cast="e4m3fn", qk_product=None, p_dtype="e4m3fn", p_rounding=rounding, row_sum_of_rounded_p=False
    )
    # The query is cast to 1.
    weights = (logits - float(sinks)).exp()
    moved = cast(weights.float(), "e4m3fn", truncate=rounding is Rounding.TOWARD_ZERO) - weights
    error = abs(float((moved * values.flatten()).sum() / (1 + weights.sum())))
    bound = float(budgets(problem, precision, input_dtype="fp32").probable.out)
    assert bound / 4 < error <= bound


@pytest.mark.parametrize("sink", [None, 3.0])
def test_values_may_follow_an_element_of_the_keys(sink: float | None) -> None:
    """Keys of two numbers in each dimension: a rounded product with one is the same for half of the keys, and a value
    that tells the halves apart sees it; with a sink, so does any."""
    n, d, worst = 8192, 16, 0.0
    for seed in range(3):
        second = philox.bytes_(seed, 1, (n, 1, d), torch.device("cpu")) % 2 > 0
        k = round_to(torch.where(second, 1.1, -0.93).double() * torch.linspace(0.8, 1.2, d), torch.bfloat16)
        q = round_to(philox.normal(seed, 0, (1, 4, d)).double(), torch.bfloat16)
        v = round_to(torch.where(second[..., :8], 1.0, 1.0 if sink else -1.0).double(), torch.bfloat16)
        logits = widen(k)[:, 0] @ widen(q)[0].T / 4
        sinks = None if sink is None else (logits.logsumexp(0) + sink).float()
        problem = Problem(q=q, k=k, v=v, q_lens=(1,), kv_lens=(n,), scale=0.25, sinks=sinks)
        choices = Choices(qk_product="bf16", seed=seed)
        error = (run(problem, choices).wide.double() - solve(problem).out).abs()
        bound = budgets(problem, choices.precision(), input_dtype="bf16").probable.out
        assert bool((error <= bound).all())
        worst = max(worst, float((error / bound).max()))
    assert worst > 1 / 15


def test_the_weight_of_the_largest_key_may_be_no_number_of_its_format() -> None:
    """Keys that ascend, one in a tile: each has the weight of 1, times a scale that the format does not hold."""
    n = 4096
    k = (torch.arange(n) * 1.5 / n).double().view(n, 1, 1)
    v = torch.where(torch.arange(n) % 2 > 0, 0.75, 1.25).double().view(n, 1, 1)
    problem = Problem(q=torch.ones(1, 1, 1), k=k, v=v, q_lens=(1,), kv_lens=(n,), scale=1.0)
    choices = Choices(tile=1, p_dtype="e5m2", p_scale=100.0)
    error = float((run(problem, choices).wide.double() - solve(problem).out).abs())
    assert error > 0.03
    assert error <= float(budgets(problem, choices.precision(), input_dtype="fp32").probable.out)
