"""What a GPU would be asked to do is counted, and comes to the same results."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fuzz.bench.launches import Counts, Remote, counted, counts_of
from oracle import philox
from oracle.attention import solve
from oracle.budget import budgets
from oracle.precision import Precision
from oracle.problem import Problem


def problem(**changes: Any) -> Problem:
    q, k, v = (philox.normal(3, i, (n, 2, 16), "cpu").bfloat16() for i, n in enumerate((2, 600, 600)))
    return replace(Problem(q=q, k=k, v=v, q_lens=(1, 1), kv_lens=(300, 300), scale=0.25), **changes)


def remote(case: Problem) -> Problem:
    return replace(case, q=Remote.of(case.q), k=Remote.of(case.k), v=Remote.of(case.v))


def inner(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, Remote)
    return x.numbers


def test_launches_copies_and_waits() -> None:
    x = torch.arange(6.0).view(2, 3)

    def run() -> Counts:
        there = Remote.of(x)
        with counted() as counts:
            there.transpose(0, 1)
            assert (there * 2)[1].numbers.tolist() == [6.0, 8.0, 10.0]
            assert float(there.sum()) == 15
            assert there.cpu().tolist() == x.tolist()
            torch.ones(3) * 2
            there.add_(torch.ones(3).to(there.device, non_blocking=True))
        return counts

    counts = run()
    assert counts.launches == {"mul": 1, "sum": 1, "add_": 1}
    assert (counts.copies, counts.waits) == (2, 2)
    assert x.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_an_imagined_tensor_alone_computes_nothing() -> None:
    with pytest.raises(RuntimeError, match="within `counted`"):
        Remote.of(torch.ones(2)) + 1


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, Precision()),
        ({"window": 100}, Precision(max_splits=4, partial_dtype="bf16")),
        ({"soft_cap": 5.0, "k_descale": 0.5, "v_descale": 2.0}, Precision(ranks=3, q_cast="fp16", p_dtype="e4m3fn")),
    ],
)
def test_the_budget_waits_once_for_the_device_and_says_the_same_there(
    changes: dict[str, object], precision: Precision
) -> None:
    case = problem(**changes)
    here = budgets(case, precision, input_dtype="bf16", solution=solve(case))
    with counted():
        there = remote(case)
        solution = solve(there)
        found = budgets(there, precision, input_dtype="bf16", solution=solution)
    for mine, other in ((here.probable, found.probable), (here.worst_case, found.worst_case)):
        torch.testing.assert_close(inner(other.out), mine.out, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(inner(other.lse), mine.lse, rtol=1e-5, atol=0.0)
        assert inner(other.keys).tolist() == mine.keys.tolist()
    counts = counts_of(lambda: budgets(there, precision, input_dtype="bf16", solution=solution))
    assert counts.waits == 1
    assert counts.total > 100
