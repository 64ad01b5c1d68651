"""What the soundness campaign and the adversarial search found: correct kernels beyond a bound."""

import math
from typing import Any

import pytest
import torch

from oracle import philox
from oracle.attention import solve
from oracle.budget import budgets
from oracle.budget.formats import format_named
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.rounding import round_to, widen
from suites.tolerance.variants import Choices, run


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
