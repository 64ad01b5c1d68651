"""The rules of other projects, on results that they must reject and accept."""

import math

import pytest
import torch

from fuzz.buffers import Poison
from fuzz.instance import build
from oracle.attention import Solution, lse_with_sink, solve
from suites.fuzz.cases import decode_case
from suites.oracle.tolerance.test_kernel import decoding
from suites.tolerance.kernel import Recipe, Result, read, run
from suites.tolerance.peers import PEERS, Fixed, TwiceTheBaseline, baseline_error, largest_error

EXPECTED = torch.tensor([1.0, -2.0, 0.0, math.inf]).double().view(1, 1, 4)
TRUTH = Solution(EXPECTED, torch.tensor([[3.0]]).double())


def result(out: list[float], lse: float = 3.0) -> Result:
    wide = torch.tensor(out).view(1, 1, -1)
    return Result(wide, wide, torch.tensor([[lse]]), {})


@pytest.mark.parametrize(
    ("rule", "out", "lse", "rejected"),
    [
        (Fixed("", 0.0, 0.25, ""), [1.25, -2.25, -0.25, math.inf], 9.0, False),
        (Fixed("", 0.0, 0.25, ""), [1.26, -2.0, 0.0, math.inf], 3.0, True),
        (Fixed("", 0.125, 0.0, ""), [1.125, -1.75, 0.0, math.inf], 3.0, False),
        (Fixed("", 0.125, 0.0, ""), [1.0, -2.0, 0.001, math.inf], 3.0, True),
        (Fixed("", 0.0, 0.25, "", share=0.25), [9.0, -2.0, 0.0, math.inf], 3.0, False),
        (Fixed("", 0.0, 0.25, "", share=0.25), [9.0, 9.0, 0.0, math.inf], 3.0, True),
        (Fixed("", 0.0, 0.25, ""), [1.0, -2.0, math.nan, math.inf], 3.0, True),
        (Fixed("", 0.0, 0.25, ""), [1.0, -2.0, 0.0, -math.inf], 3.0, True),
        (Fixed("", 0.0, 0.25, "", of="lse"), [9.0, 9.0, 9.0, 9.0], 3.25, False),
        (Fixed("", 0.0, 0.25, "", of="lse"), [1.0, -2.0, 0.0, math.inf], 3.26, True),
    ],
)
def test_fixed_rules(rule: Fixed, out: list[float], lse: float, rejected: bool) -> None:
    assert rule.rejects(result(out, lse), TRUTH, math.nan) is rejected


@pytest.mark.parametrize(("error", "rejected"), [(0.5, False), (0.51, True), (math.nan, True)])
def test_the_rule_with_a_baseline(error: float, rejected: bool) -> None:
    truth = Solution(torch.zeros(1, 1, 2).double(), TRUTH.lse)
    assert TwiceTheBaseline("", 2.0, 0.1, "").rejects(result([error, 0.0]), truth, 0.2) is rejected


def test_no_rule_rejects_the_truth() -> None:
    problem = decoding().problem
    assert problem is not None
    assert problem.sinks is not None
    solution = solve(problem)
    truth = Solution(solution.out, lse_with_sink(solution.lse, problem.sinks))
    exact = Result(truth.out.float(), truth.out.float(), truth.lse.float(), {})
    assert [rule.name for rule in PEERS if rule.rejects(exact, truth, 0.0)] == []
    wrong = Result(exact.out + 1, exact.out + 1, exact.lse + 1, {})
    assert [rule.name for rule in PEERS if not rule.rejects(wrong, truth, 0.0)] == []


def test_the_baseline_is_attention_in_its_dtype() -> None:
    """In float32 it is nearly exact, in bf16 about as far off as a bf16 kernel; descales and hidden poison included."""
    case = decode_case(
        context_lens=[123],
        query_lens=[4],
        kv_dtype="e4m3fn",
        dtype="bf16",
        k_descale="head",
        v_descale="tensor",
        index_form="page_table",
        kv_layout="nhd",
        window=50,
        soft_cap=20.0,
    )
    instance = build(case, Poison.POSITIVE)
    assert instance.problem is not None
    truth, operands = solve(instance.problem), read(instance)
    errors = {dtype: baseline_error(operands, dtype, truth) for dtype in ("fp32", "fp16", "bf16")}
    assert errors["fp32"] < 1e-5 < errors["fp16"] < errors["bf16"]
    kernel = largest_error(run(instance, Recipe()).out.double(), truth)
    assert 0.3 < errors["bf16"] / kernel < 10
