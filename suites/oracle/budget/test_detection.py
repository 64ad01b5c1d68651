"""Each rounding or rule that a precision does not allow is caught, on an input that shows it.

A fault is a correct kernel run with other choices than it declares, on another problem than it was given, or
with its result changed. The same input passes without the fault.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from oracle.attention import solve
from oracle.budget import budgets, worst_case
from oracle.budget.judge import Judgement, judge
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.verdict import Verdict
from suites.oracle.budget.inputs import operands
from suites.oracle.budget.kernels import DTYPES, Choices, Result, run

KERNEL = Choices(tile=32)
BF16_WEIGHTS = replace(KERNEL, p_dtype="bf16")


def case(
    family: str = "normal", *, n: int = 123, t: int = 4, seed: int = 7, dtype: str = "bf16", **fields: object
) -> Problem:
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (x.to(DTYPES[dtype]) for x in operands(family, t, n, 4, 2, 24, 16, gen))
    return replace(Problem(q=q, k=k, v=v, q_lens=(t,), kv_lens=(n,), scale=24**-0.5), **fields)


def levels(depth: float, value: float = 1.0, *, n: int = 64) -> Problem:
    """One key at the maximum, its value 0; all others `depth` below it, with the same value."""
    k = torch.zeros(n, 1, 16)
    k[1:, :, 0] = -depth
    v = torch.full((n, 1, 8), value)
    v[0] = 0
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1
    return Problem(q=q, k=k, v=v, q_lens=(1,), kv_lens=(n,), scale=1.0)


def without_key(problem: Problem, key: int) -> Problem:
    keep = torch.arange(problem.k.shape[0]) != key
    return replace(problem, k=problem.k[keep], v=problem.v[keep], kv_lens=(problem.kv_lens[0] - 1,), causal=False)


def stale_value(problem: Problem, key: int) -> Problem:
    v = problem.v.clone()
    v[key] = problem.v[key - 1]
    return replace(problem, v=v)


SINKS = torch.tensor([3.0, 2.5, 4.0, 3.5])
PER_TOKEN = torch.linspace(0.5, 2.0, 123).view(-1, 1)
PER_HEAD = torch.tensor([[0.5, 0.75]])


@dataclass(frozen=True)
class Fault:
    name: str
    problem: Problem
    declared: Choices = KERNEL
    actual: Choices | None = None
    attended: Problem | None = None
    change: Callable[[Result], Result] | None = None
    seen_in: str = "out"


def lse_times(factor: float) -> Callable[[Result], Result]:
    return lambda result: replace(result, lse=result.lse * factor)


def faults() -> list[Fault]:
    plain, one = case(), case(t=1, causal=False)
    wide = case(q_descale=4.0)
    sinks, window = case(sinks=SINKS), case(window=40)
    capped, deep = case(q_descale=8.0, soft_cap=4.0), case("deep_negative")
    descaled = case(k_descale=PER_TOKEN, v_descale=PER_HEAD)
    subnormal = levels(90.0, 1e38)
    with_choice = [
        ("weights to bf16", plain, KERNEL, {"p_dtype": "bf16"}, "out"),
        ("weights to fp16", plain, KERNEL, {"p_dtype": "fp16"}, "out"),
        ("weights to fp8 where bf16 is allowed", plain, BF16_WEIGHTS, {"p_dtype": "e4m3fn"}, "out"),
        (
            "weights not scaled before fp8",
            levels(math.log(2.0**11)),
            replace(KERNEL, p_dtype="e4m3fn", p_scale=448.0),
            {"p_scale": 1.0},
            "out",
        ),
        ("weights truncated", levels(-math.log(0.5038)), BF16_WEIGHTS, {"p_truncated": True}, "out"),
        ("row sum of rounded weights", levels(0.0028), BF16_WEIGHTS, {"sum_rounded": True}, "lse"),
        ("logits in bf16", wide, KERNEL, {"logit_dtype": "bf16"}, "lse"),
        ("logits in fp16", wide, KERNEL, {"logit_dtype": "fp16"}, "lse"),
        ("products rounded to bf16", plain, KERNEL, {"qk_product": "bf16"}, "out"),
        ("query cast to fp8", plain, KERNEL, {"q_cast": "e4m3fn"}, "out"),
        ("13 bits in the accumulator", plain, KERNEL, {"unit": "short_fused"}, "out"),
        ("tanh of 2^-10", capped, KERNEL, {"tanh_noise": 2.0**-10}, "out"),
        ("exp in bf16", plain, KERNEL, {"exp_noise": "bf16"}, "out"),
        ("partials in bf16", plain, replace(KERNEL, splits=4), {"partial_dtype": "bf16"}, "out"),
        ("ranks in bf16", plain, replace(KERNEL, ranks=3), {"rank_dtype": "bf16"}, "out"),
        (
            "ranks added in bf16",
            plain,
            replace(KERNEL, ranks=3, out_dtype="fp32"),
            {"reduce_dtype": "bf16"},
            "out",
        ),
        ("output truncated", plain, KERNEL, {"out_truncated": True}, "out"),
        ("subnormals flushed", subnormal, replace(KERNEL, out_dtype="fp32"), {"flush": True}, "out"),
        ("no rescaling", case("rising"), KERNEL, {"rescale": False}, "out"),
    ]
    with_problem = [
        ("scale off by 1 %", plain, replace(plain, scale=plain.scale * 1.01), "out"),
        ("scale in bf16", wide, replace(wide, scale=float(torch.tensor(wide.scale).bfloat16())), "lse"),
        ("one key of 123 dropped", one, without_key(one, 61), "out"),
        ("one key of 123 dropped, seen in the sum", one, without_key(one, 61), "lse"),
        ("a stale value", plain, stale_value(plain, 50), "out"),
        ("window one longer", window, replace(window, window=41), "out"),
        ("window one shorter", window, replace(window, window=39), "out"),
        ("not causal", plain, replace(plain, causal=False), "out"),
        ("sink forgotten", sinks, replace(sinks, sinks=None), "out"),
        ("sink scaled", sinks, replace(sinks, sinks=SINKS * sinks.scale), "out"),
        ("cap forgotten", capped, replace(capped, soft_cap=None), "out"),
        ("key descale of the tensor", descaled, replace(descaled, k_descale=1.25), "out"),
        ("value descales of heads swapped", descaled, replace(descaled, v_descale=PER_HEAD.flip(1)), "out"),
    ]
    with_result = [
        ("lse in base 2", plain, lse_times(math.log2(math.e)), "lse"),
        ("lse off by 1e-3", deep, lse_times(1 + 1e-3 / 130), "lse"),
        ("out off by 1 %", plain, lambda r: replace(r, out=(r.exact_out * 1.01).to(r.out.dtype)), "out"),
        ("heads swapped", plain, lambda r: replace(r, out=r.out.flip(1)), "out"),
    ]
    return [
        *(Fault(name, p, c, replace(c, **other), None, None, seen) for name, p, c, other, seen in with_choice),
        *(Fault(name, p, BF16_WEIGHTS, None, wrong, None, seen) for name, p, wrong, seen in with_problem),
        *(Fault(name, p, KERNEL, None, None, change, seen) for name, p, change, seen in with_result),
    ]


def judged(fault: Fault, result: Result) -> Judgement:
    precision = fault.declared.precision()
    bounds = worst_case(fault.problem, precision, input_dtype=_name(fault.problem.q))
    return judge(
        result.out,
        result.lse,
        solve(fault.problem),
        bounds,
        out_dtype=fault.declared.out_dtype,
        precision=precision,
    )


def _name(x: Tensor) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype is x.dtype)


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault) -> None:
    clean = judged(fault, run(fault.problem, fault.declared))
    assert clean.verdict is Verdict.PASS, clean
    result = run(fault.attended or fault.problem, fault.actual or fault.declared)
    if fault.change is not None:
        result = fault.change(result)
    judgement = judged(fault, result)
    tally = judgement.out if fault.seen_in == "out" else judgement.lse
    assert tally is not None
    assert tally.verdict is Verdict.FAIL, judgement
    assert tally.worst is not None
    assert tally.worst.ratio > 1


def long_case(n: int = 8192) -> Problem:
    gen = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(m, h, 64, generator=gen).bfloat16() for m, h in ((1, 2), (n, 1), (n, 1)))
    return Problem(q=q * 0.7, k=k, v=v, q_lens=(1,), kv_lens=(n,), scale=0.125, causal=False)


LONG = Choices(tile=64, p_dtype="bf16", splits=8, merge="absolute")


@pytest.mark.parametrize(
    "name", ["a key dropped", "a stale value", "a key twice", "scale off by 2 %", "weights to fp8"]
)
def test_the_probable_bound_sees_at_8k_what_the_worst_case_cannot(name: str) -> None:
    problem = long_case()
    attended = {
        "a key dropped": lambda: without_key(problem, 4000),
        "a stale value": lambda: stale_value(problem, 4000),
        "a key twice": lambda: replace(
            problem,
            k=torch.cat([problem.k, problem.k[9:10]]),
            v=torch.cat([problem.v, problem.v[9:10]]),
            kv_lens=(problem.kv_lens[0] + 1,),
        ),
        "scale off by 2 %": lambda: replace(problem, scale=problem.scale * 1.02),
        "weights to fp8": lambda: problem,
    }[name]()
    faulty = replace(LONG, p_dtype="e4m3fn", p_scale=448.0) if name == "weights to fp8" else LONG
    precision, solution = LONG.precision(), solve(problem)
    both = budgets(problem, precision, input_dtype="bf16")

    def verdicts(result: Result) -> tuple[Verdict, Verdict]:
        options = {"out_dtype": "bf16", "precision": precision}
        return (
            judge(result.out, result.lse, solution, both, **options).out.verdict,
            judge(result.out, result.lse, solution, both.worst_case, **options).out.verdict,
        )

    assert verdicts(run(problem, LONG)) == (Verdict.PASS, Verdict.PASS)
    assert verdicts(run(attended, faulty)) == (Verdict.SUSPECT, Verdict.PASS)


def test_the_loosest_precision_still_sees_a_dropped_key() -> None:
    """With nothing known of the kernel, a key with half of the weight is missed by none."""
    problem = case("needle", t=1, causal=False)
    result = run(without_key(problem, 61), BF16_WEIGHTS)
    bounds = worst_case(problem, input_dtype="bf16")
    judgement = judge(result.out, result.lse, solve(problem), bounds, out_dtype="bf16", precision=Precision())
    assert judgement.out.verdict is Verdict.FAIL
    assert judgement.lse is not None
    assert judgement.lse.verdict is Verdict.FAIL


UNSEEN = {"scale off by 1 %", "scale in bf16", "lse off by 1e-3", "out off by 1 %"}
"""What the loosest precision lets pass, of faults other than in the arithmetic. docs/operations.md counts them."""


@pytest.mark.parametrize("fault", [f for f in faults() if f.actual is None], ids=lambda fault: fault.name)
def test_what_the_loosest_precision_sees(fault: Fault) -> None:
    result = run(fault.attended or fault.problem, fault.declared)
    if fault.change is not None:
        result = fault.change(result)
    bounds = worst_case(fault.problem, input_dtype=_name(fault.problem.q))
    solution, out_dtype = solve(fault.problem), fault.declared.out_dtype
    judgement = judge(result.out, result.lse, solution, bounds, out_dtype=out_dtype, precision=Precision())
    assert judgement.lse is not None
    seen = Verdict.FAIL in (judgement.out.verdict, judgement.lse.verdict)
    assert seen is (fault.name not in UNSEEN), judgement
