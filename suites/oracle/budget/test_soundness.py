"""No correct kernel exceeds its bounds, worst-case or probable, whatever it legitimately chooses, whatever the data."""

import math
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from oracle.attention import solve
from oracle.budget import budgets, casts, chance, judge, rows
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.verdict import Verdict
from suites.oracle.budget.inputs import picker, problem
from suites.oracle.budget.kernels import DTYPES, UNITS, Choices, run


def choices(seed: int, input_dtype: str) -> Choices:
    """Kernel number `seed`: each choice drawn on its own."""
    pick = picker(torch.Generator().manual_seed(seed ^ 0x5EED))
    p_dtype, p_scale = pick(
        (None, 1.0),
        ("bf16", 1.0),
        ("fp16", 1.0),
        ("e4m3fn", 1.0),
        ("e4m3fn", 448.0),
        ("e4m3fn", 256.0),
        ("e4m3fnuz", 240.0),
        ("e5m2", 100.0),
        ("e5m2fnuz", 57344.0),
    )
    splits, ranks = pick((1, 1), (1, 1), (2, 1), (5, 1), (1, 2), (3, 3))
    return Choices(
        tile=pick(1, 16, 32, 64, 256),
        order=pick("ascending", "descending", "random"),
        base_two=pick(True, False),
        scale_query=pick(True, False),
        fused_argument=pick(True, False),
        reciprocal=pick(True, False),
        unit=pick(*UNITS) if input_dtype != "fp32" else pick("blas", "chain", "reverse_chain"),
        q_cast=pick(None, None, None, "bf16", "e4m3fn"),
        qk_product=pick(None, None, None, "bf16", "fp16"),
        logit_dtype=pick("fp32", "fp32", "fp32", "bf16", "fp16"),
        exp_noise=pick("none", "random", "biased"),
        p_dtype=p_dtype,
        p_scale=p_scale,
        p_truncated=pick(False, False, True) and p_dtype is not None,
        sum_rounded=pick(True, False),
        splits=splits,
        partial_dtype=pick("fp32", "bf16", "fp16"),
        merge=pick("maximum", "absolute"),
        ranks=ranks,
        cyclic=pick(True, False),
        rank_dtype=pick("fp32", "bf16"),
        reduce_dtype=pick("fp32", "bf16"),
        sink=pick("merge", "initial"),
        flush=pick(True, False),
        out_dtype=pick("bf16", "fp16", "fp32"),
        out_truncated=pick(False, False, True),
        tanh_noise=pick(0.0, 2.0**-12),
        kv_cast=pick(None, None, "bf16", "fp16", "e4m3fn"),
        seed=seed,
    )


def plain(choice: Choices) -> Choices:
    """The same tiling and order with the arithmetic of an ordinary kernel, for which bounds are tight."""
    return replace(
        choice,
        q_cast=None,
        kv_cast=None,
        qk_product=None,
        logit_dtype="fp32",
        p_dtype="bf16",
        p_scale=1.0,
        p_truncated=False,
        sum_rounded=False,
        unit="blas",
        splits=1,
        ranks=1,
    )


def measure(seed: int, choice: Choices) -> dict[str, float]:
    """Assert that one kernel passes on one problem; how close it came to its bounds."""
    case, dtype, family = problem(seed)
    choice = replace(choice, seed=seed)
    result, solution = run(case, choice), solve(case)
    both = budgets(case, choice.precision(), input_dtype=dtype)
    bounds = both.probable
    label = f"seed {seed}, {family}, {dtype}, {choice}"
    error = (result.exact_out.double() - solution.out).abs()
    # Where nothing is promised anything goes; elsewhere the error before rounding is below the bound.
    assert bool(((error <= bounds.out) | (bounds.out == math.inf)).all()), label
    for tight, loose in ((bounds.out, both.worst_case.out), (bounds.lse, both.worst_case.lse)):
        assert bool((tight <= loose).all()), label
    verdict = judge(
        result.out,
        result.lse,
        solution,
        both,
        out_dtype=choice.out_dtype,
        precision=choice.precision(),
    )
    assert verdict.verdict in (Verdict.PASS, Verdict.VACUOUS), f"{label}\n{verdict}"
    judged = (bounds.out > 0) & (bounds.out < math.inf)
    ratio = (error / bounds.out)[judged]
    lse_judged = (bounds.lse > 0) & (bounds.lse < math.inf)
    lse_ratio = ((result.lse.double() - solution.lse).abs() / bounds.lse)[lse_judged]
    return {
        "median": float(ratio.median()) if len(ratio) else 0.0,
        "worst": float(ratio.max()) if len(ratio) else 0.0,
        "lse": float(lse_ratio.max()) if len(lse_ratio) else 0.0,
    }


@pytest.mark.parametrize("first", range(0, 260, 26))
def test_any_kernel_is_within_its_bounds(first: int) -> None:
    for seed in range(first, first + 26):
        measure(seed, choices(seed, problem(seed)[1]))


def test_an_ordinary_kernel_comes_near_its_bound() -> None:
    """The bound is no blank cheque: of ordinary kernels the worst element uses a fair part of it."""
    worst = [measure(seed, plain(choices(seed, problem(seed)[1])))["worst"] for seed in range(1000, 1052)]
    assert median(worst) > 0.05
    assert max(worst) > 0.3


def one_dimension(logits: torch.Tensor, values: torch.Tensor, sink: float | None = None) -> Problem:
    """One query whose logits and values are as given, [n]."""
    n, k, q = len(logits), torch.zeros(len(logits), 1, 16), torch.zeros(1, 1, 16)
    k[:, 0, 0], q[..., 0] = logits, 1
    sinks = None if sink is None else torch.tensor([sink])
    return Problem(q=q, k=k, v=values.view(n, 1, 1), q_lens=(1,), kv_lens=(n,), scale=1.0, causal=False, sinks=sinks)


@pytest.mark.parametrize("tile", [64, 80])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_weights_that_follow_a_rising_maximum(tile: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight is just below 1 when it is cast, and rounds up: no chance in that, so the cast is simulated."""
    ramp = torch.linspace(-0.1, 0.1, 16000)
    case = one_dimension(ramp if order == "ascending" else ramp.flip(0), torch.ones(16000))
    choice = Choices(tile=tile, order=order, p_dtype="bf16", out_dtype="fp32")
    error = (run(case, choice).exact_out.double() - solve(case).out).abs()

    def bound() -> torch.Tensor:
        # The smallest tile of the precision is smaller than the kernel's.
        return budgets(case, replace(choice.precision(), tile=16), input_dtype="fp32").probable.out

    assert bool((error <= bound()).all())
    monkeypatch.setattr(casts, "_TILES", 0)
    assert bool((error > bound()).all())


def test_weights_below_a_sink_that_is_the_first_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near-equal logits far below it share one cell of the format."""
    gen = torch.Generator().manual_seed(0)
    case = one_dimension(1e-3 * torch.rand(2000, generator=gen), torch.ones(2000), sink=6.69)
    choice = Choices(p_dtype="e5m2fnuz", p_scale=57344.0, sink="initial", sum_rounded=True, out_dtype="fp32")
    error = (run(case, choice).lse.double() - solve(case).lse).abs()

    def bound() -> torch.Tensor:
        return budgets(case, choice.precision(), input_dtype="fp32").probable.lse

    assert bool((error <= bound()).all())
    maxima = casts._running_maxima
    monkeypatch.setattr(casts, "_running_maxima", lambda found, a, sinks: maxima(found, a, False))
    monkeypatch.setattr(casts, "_between", lambda s, top, fmt, a: top)
    assert bool((error > bound()).all())


def test_sums_of_equal_weights_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a sink that comes first all weights are the same odd number, and each addition errs by the same part."""
    case = one_dimension(torch.zeros(60_000), torch.ones(60_000), sink=0.3)
    choice = Choices(tile=4, sink="initial", out_dtype="fp32")
    error = (run(case, choice).lse.double() - solve(case).lse).abs()

    def bound() -> torch.Tensor:
        return budgets(case, choice.precision(), input_dtype="fp32").probable.lse

    assert bool((error <= bound()).all())
    monkeypatch.setattr(chance, "_together", lambda p, alike, a: torch.ones_like(a.count))
    assert bool((error > bound()).all())


def test_keys_that_are_repeated_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand copies of few keys err as few keys do, which quadrature over all of them would not allow."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(m, 1, 64, generator=gen).bfloat16() for m in (1, 4, 4))
    case = Problem(
        q=q * 3, k=k.repeat(1000, 1, 1), v=v.repeat(1000, 1, 1), q_lens=(1,), kv_lens=(4000,), scale=0.125, causal=False
    )
    choice = Choices(tile=64, qk_product="bf16")
    error = (run(case, choice).lse.double() - solve(case).lse).abs()
    assert bool((error <= budgets(case, choice.precision(), input_dtype="bf16").probable.lse).all())
    monkeypatch.setattr(chance, "multiplicity", torch.ones_like)
    monkeypatch.setattr(rows, "equal_elements", lambda k: torch.zeros_like(k, dtype=torch.float32))
    assert bool((error > budgets(case, choice.precision(), input_dtype="bf16").probable.lse).all())


FLASH = Precision(source="casts weights to the dtype of the input", qk_product=None, row_sum_of_rounded_p=False)
EAGER = replace(FLASH, source="rounds logits, and weights once normalised", logit_dtype="input", p_normalised=True)


def torch_case(n: int, dtype: str) -> tuple[Problem, list[torch.Tensor]]:
    """A causal problem, and its operands as torch wants them."""
    gen = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(n, 4, 32, generator=gen).to(DTYPES[dtype]) for _ in range(3))
    case = Problem(q=q, k=k, v=v, q_lens=(n,), kv_lens=(n,), scale=32**-0.5)
    return case, [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]


def judged(case: Problem, out: torch.Tensor, dtype: str, precision: Precision) -> Verdict:
    both = budgets(case, precision, input_dtype=dtype)
    return judge(out[0].transpose(0, 1), None, solve(case), both, out_dtype=dtype, precision=precision).verdict


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("n", [40, 700])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_torch_attention_is_within_its_bounds(dtype: str, n: int, backend: SDPBackend) -> None:
    """A kernel that is not ours: torch's on the CPU. Its mathematical one keeps float32 inside."""
    case, operands = torch_case(n, dtype)
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=True)
    precision = replace(FLASH, p_dtype=None) if backend is SDPBackend.MATH else FLASH
    assert judged(case, out, dtype, precision) is Verdict.PASS


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("n", [40, 300])
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_within_its_bounds(dtype: str, n: int) -> None:
    """Run eagerly it rounds logits to the dtype of the input, and weights after they are normalised."""
    case, operands = torch_case(n, dtype)

    def causal(score: torch.Tensor, b: object, h: object, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return torch.where(i >= j, score, -math.inf)

    out = flex_attention(*operands, score_mod=causal)
    assert judged(case, out, dtype, EAGER) is Verdict.PASS
    if dtype == "bf16":
        assert judged(case, out, dtype, FLASH) is not Verdict.PASS


@pytest.mark.slow
def test_any_kernel_is_within_its_bounds_at_length() -> None:
    for seed in range(10_000, 14_000):
        measure(seed, choices(seed, problem(seed)[1]))
