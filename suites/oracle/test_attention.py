"""Extremes, each by name: huge logits, one-hot weights, sinks, empty rows, infinities, NaN, and memory."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oracle.attention import Solution, lse_with_sink, solve
from oracle.problem import Problem

INF, NAN = math.inf, math.nan
BLOCKS = pytest.mark.parametrize(
    "blocks", [{}, {"block_q": 1, "block_k": 1, "block_heads": 1}], ids=["default", "one by one"]
)


def by_logits(logits: list[list[float]], values: list[float], **fields: Any) -> Problem:
    """One head, whose logits [queries][keys] are exactly those given; all see all unless `causal`."""
    s = torch.tensor(logits, dtype=torch.float64)
    queries, keys = s.shape
    return Problem(
        q=s.view(queries, 1, keys),
        k=torch.eye(keys, dtype=torch.float64).view(keys, 1, keys),
        v=torch.tensor(values, dtype=torch.float64).view(keys, 1, 1),
        q_lens=(queries,),
        kv_lens=(keys,),
        **({"scale": 1.0, "causal": False} | fields),
    )


def random_problem(seed: int, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **fields: Any) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def draw(tokens: int, heads: int, dim: int) -> Tensor:
        return torch.randn(tokens, heads, dim, generator=g, dtype=torch.float64)

    return Problem(
        q=draw(sum(q_lens), 4, 8),
        k=draw(sum(kv_lens), 2, 8),
        v=draw(sum(kv_lens), 2, 5),
        q_lens=q_lens,
        kv_lens=kv_lens,
        **({"scale": 0.35} | fields),
    )


def outputs(solution: Solution) -> list[float]:
    return solution.out.flatten().tolist()


@BLOCKS
@pytest.mark.parametrize("size", [700.0, -700.0, 745.0, 5000.0, -5000.0, 1e300, -1e300])
def test_logits_far_beyond_the_range_of_exp(size: float, blocks: dict[str, int]) -> None:
    solution = solve(by_logits([[size, size]], [1.0, 3.0]), **blocks)
    assert outputs(solution) == [2.0]
    assert float(solution.lse) == size + math.log(2.0)


@BLOCKS
@pytest.mark.parametrize("size", [255.0, 700.0, 5000.0])
def test_logits_of_both_signs(size: float, blocks: dict[str, int]) -> None:
    solution = solve(by_logits([[size, -size, 0.0]], [1.0, 2.0, 3.0]), **blocks)
    assert outputs(solution) == [1.0]
    assert float(solution.lse) == size


@BLOCKS
def test_one_hot_softmax_picks_one_value_exactly(blocks: dict[str, int]) -> None:
    logits = [[900.0 if i == j else 0.0 for j in range(5)] for i in range(5)]
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert outputs(solve(by_logits(logits, values), **blocks)) == values


@BLOCKS
def test_the_largest_logit_may_come_last(blocks: dict[str, int]) -> None:
    solution = solve(by_logits([[-3000.0, 0.0, 3000.0]], [1.0, 2.0, 3.0]), **blocks)
    assert outputs(solution) == [3.0]
    assert float(solution.lse) == 3000.0


def test_one_key_is_its_value() -> None:
    solution = solve(by_logits([[0.3]], [0.7]))
    assert outputs(solution) == [0.7]
    assert float(solution.lse) == pytest.approx(0.3, abs=1e-16)


def test_a_window_of_one_sees_itself_only() -> None:
    p = by_logits([[0.0] * 4] * 4, [1.0, 2.0, 3.0, 4.0], causal=True, window=1)
    assert outputs(solve(p)) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("logit", [0.0, 800.0, -800.0])
@pytest.mark.parametrize(("distance", "share"), [(-2000.0, 1.0), (-40.0, 1.0), (0.0, 0.5), (2000.0, 0.0), (INF, 0.0)])
def test_sinks_far_above_and_below(logit: float, distance: float, share: float) -> None:
    p = by_logits([[logit]], [3.0], sinks=torch.tensor([logit + distance], dtype=torch.float64))
    solution = solve(p)
    assert outputs(solution) == pytest.approx([3.0 * share], rel=1e-15)
    assert float(solution.lse) == logit  # the sink is not in it


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    p = random_problem(1, (5,), (9,))
    with_sinks = replace(p, sinks=torch.full((4,), -INF))
    assert torch.equal(solve(with_sinks).out, solve(p).out)


def test_the_sink_is_neither_scaled_nor_capped() -> None:
    p = by_logits([[0.0]], [1.0], scale=100.0, soft_cap=0.5, sinks=torch.tensor([math.log(3.0)], dtype=torch.float64))
    assert outputs(solve(p)) == pytest.approx([0.25], rel=1e-15)


def test_lse_with_sink() -> None:
    p = by_logits([[0.0]], [1.0], sinks=torch.tensor([math.log(3.0)], dtype=torch.float64))
    assert p.sinks is not None
    assert float(lse_with_sink(solve(p).lse, p.sinks)) == pytest.approx(math.log(4.0), rel=1e-15)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, -5.0, 5.0, 900.0])], ids=["no sinks", "sinks"])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [((3,), (0,)), ((0,), (4,)), ((0,), (0,)), ((), ()), ((2, 0, 3), (0, 5, 0)), ((6, 1), (2, 0))],
)
def test_rows_and_requests_without_keys(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], sinks: Tensor | None
) -> None:
    solution = solve(random_problem(2, q_lens, kv_lens, sinks=sinks))
    assert solution.out.shape == (sum(q_lens), 4, 5)
    assert not solution.out.isnan().any()
    row = 0
    for q_len, context in zip(q_lens, kv_lens, strict=True):
        empty = slice(row, row + max(q_len - context, 0))
        assert bool((solution.out[empty] == 0).all())
        assert bool((solution.lse[empty] == -INF).all())
        assert bool(solution.lse[empty.stop : row + q_len].isfinite().all())
        row += q_len


def test_a_call_that_sees_none_of_the_keys_given() -> None:
    p = random_problem(3, (2,), (3,), context_lens=(20,), window=4)
    solution = solve(p)
    assert bool((solution.out == 0).all())
    assert bool((solution.lse == -INF).all())


POISON = pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e308])
WHERE = pytest.mark.parametrize("where", ["k", "v"])


@BLOCKS
@POISON
@WHERE
def test_invisible_keys_reach_nothing(where: str, poison: float, blocks: dict[str, int]) -> None:
    """Keys after the query, before the window, and of other requests, of this block and of others."""
    q_lens, kv_lens = (3, 1, 2), (5, 3, 7)
    clean = random_problem(4, q_lens, kv_lens, window=3)
    expected = solve(clean, **blocks)
    for j in range(sum(kv_lens)):
        poisoned = getattr(clean, where).clone()
        poisoned[j] = poison
        solution = solve(replace(clean, **{where: poisoned}), **blocks)
        rows = torch.tensor([not sees(clean, row, j) for row in range(sum(q_lens))])
        torch.testing.assert_close(solution.out[rows], expected.out[rows], rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(solution.lse[rows], expected.lse[rows], rtol=1e-14, atol=1e-15)


def sees(p: Problem, row: int, key: int) -> bool:
    request = sum(row >= start for start in p.q_starts[1:])
    if not p.kv_starts[request] <= key < p.kv_starts[request + 1]:
        return False
    at = p.contexts[request] - p.q_starts[request + 1] + row
    j = key - p.kv_starts[request]
    return j <= at and (p.window is None or at - p.window < j)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_poison_in_a_query_stays_in_its_row_and_head(poison: float) -> None:
    clean = random_problem(5, (4, 2), (6, 3))
    q = clean.q.clone()
    q[2, 1] = poison
    solution, expected = solve(replace(clean, q=q)), solve(clean)
    touched = torch.zeros(6, 4, dtype=torch.bool)
    touched[2, 1] = True
    assert bool(solution.out[touched].isnan().all())
    torch.testing.assert_close(solution.out[~touched], expected.out[~touched], rtol=1e-14, atol=1e-15)


@BLOCKS
def test_a_visible_nan_key_makes_the_row_nan(blocks: dict[str, int]) -> None:
    solution = solve(by_logits([[0.0, NAN, 1.0], [0.0, 1.0, 2.0]], [1.0, 2.0, 3.0]), **blocks)
    assert math.isnan(outputs(solution)[0])
    assert math.isnan(solution.lse[0, 0])
    assert math.isfinite(outputs(solution)[1])


def by_keys(keys: list[float], values: list[float], **fields: Any) -> Problem:
    """One query of 1, keys of one dimension: infinite logits without 0 * inf."""
    return Problem(
        q=torch.ones(1, 1, 1, dtype=torch.float64),
        k=torch.tensor(keys, dtype=torch.float64).view(-1, 1, 1),
        v=torch.tensor(values, dtype=torch.float64).view(-1, 1, 1),
        q_lens=(1,),
        kv_lens=(len(keys),),
        scale=1.0,
        **fields,
    )


@BLOCKS
@pytest.mark.parametrize("keys", [[INF, 0.0], [0.0, INF], [INF, INF], [INF, -INF], [INF, 800.0, -INF]])
def test_a_logit_of_infinity_makes_the_row_nan_and_its_lse_infinite(keys: list[float], blocks: dict[str, int]) -> None:
    solution = solve(by_keys(keys, [1.0] * len(keys)), **blocks)
    assert math.isnan(outputs(solution)[0])
    assert float(solution.lse) == INF


@BLOCKS
@pytest.mark.parametrize("keys", [[-INF, 0.5], [0.5, -INF], [-INF, 0.5, -INF]])
def test_a_logit_of_minus_infinity_has_no_weight(keys: list[float], blocks: dict[str, int]) -> None:
    solution = solve(by_keys(keys, [4.0 if k == 0.5 else 9.0 for k in keys]), **blocks)
    assert outputs(solution) == [4.0]
    assert float(solution.lse) == 0.5


def test_a_row_of_minus_infinities_is_empty() -> None:
    solution = solve(by_keys([-INF, -INF], [1.0, 2.0]))
    assert outputs(solution) == [0.0]
    assert float(solution.lse) == -INF


def test_the_soft_cap_makes_infinite_logits_finite() -> None:
    solution = solve(by_keys([INF, -INF], [1.0, 0.0], soft_cap=2.0))
    assert outputs(solution) == pytest.approx([1 / (1 + math.exp(-4.0))], rel=1e-15)


@BLOCKS
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([INF, 1.0], INF),
        ([1.0, -INF], -INF),
        ([INF, INF], INF),
        ([INF, -INF], NAN),
        ([NAN, 1.0], NAN),
        ([NAN, INF], NAN),
    ],
)
@pytest.mark.parametrize("keys", [[0.0, 0.0], [5000.0, 0.0], [0.0, 5000.0]])
def test_infinite_and_nan_values_of_visible_keys(
    keys: list[float], values: list[float], expected: float, blocks: dict[str, int]
) -> None:
    """Also where the weight underflows: it is not zero, so an infinity stays one, in whatever block it
    comes.
    """
    solution = solve(by_keys(keys, values), **blocks)
    assert outputs(solution) == pytest.approx([expected], nan_ok=True)
    assert math.isfinite(solution.lse)


@BLOCKS
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_zero_weight_times_an_infinite_value_is_nan(value: float, blocks: dict[str, int]) -> None:
    assert math.isnan(outputs(solve(by_keys([0.0, -INF], [1.0, value]), **blocks))[0])


def test_other_dimensions_of_a_flawed_value_are_untouched() -> None:
    p = random_problem(6, (3,), (4,))
    v = p.v.clone()
    v[0, 0, 2] = INF
    solution, expected = solve(replace(p, v=v)), solve(p)
    assert bool((solution.out[:, :2, 2] == INF).all())
    v[0, 0, 2] = p.v[0, 0, 2]
    solution.out[:, :2, 2] = expected.out[:, :2, 2]
    torch.testing.assert_close(solution.out, expected.out, rtol=1e-14, atol=1e-15)


def test_values_of_the_largest_magnitude() -> None:
    """Where the weighted sum before the division fits float64, however large the logits."""
    solution = solve(by_logits([[0.0, 0.0], [500.0, 500.0]], [1e307, 1e307]))
    assert outputs(solution) == pytest.approx([1e307, 1e307], rel=1e-13)


def test_strided_operands() -> None:
    p = random_problem(7, (30,), (50,))
    strided = replace(
        p,
        q=p.q.transpose(0, 1).contiguous().transpose(0, 1),
        k=torch.stack([p.k, p.k], -1)[..., 0],
        v=p.v.flip(0).contiguous().flip(0),
    )
    torch.testing.assert_close(solve(strided).out, solve(p).out, rtol=1e-14, atol=1e-15)


def test_operands_are_not_changed() -> None:
    p = random_problem(8, (30,), (50,), v_descale=2.0, k_descale=3.0, soft_cap=5.0)
    before = [x.clone() for x in (p.q, p.k, p.v)]
    solve(p)
    assert all(torch.equal(a, b) for a, b in zip((p.q, p.k, p.v), before, strict=True))


def test_an_explicit_device_moves_the_problem() -> None:
    p = random_problem(9, (3, 2), (5, 4), sinks=torch.zeros(4), k_descale=torch.ones(9, 1))
    assert torch.equal(solve(p, device="cpu").out, solve(p).out)


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *found])
        return result


@pytest.mark.parametrize("queries", [1 << 12, 1])
def test_memory_grows_with_the_block_not_with_the_square(queries: int) -> None:
    p = random_problem(10, (queries,), (1 << 12,))
    block = 64 * 32 * 2
    with Largest() as largest:
        solve(p, block_q=64, block_k=32, block_heads=2)
    operands = max(p.q.shape[0] * 4 * 8, p.k.shape[0] * 2 * (5 + 8))
    assert largest.elements <= max(operands, block)


def test_the_memory_test_would_notice_a_square() -> None:
    with Largest() as largest:
        torch.ones(100, 1) @ torch.ones(1, 100)
    assert largest.elements == 100 * 100
