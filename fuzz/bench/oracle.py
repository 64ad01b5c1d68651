"""How fast the oracle is, and how much memory it takes, against torch's float64 attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzz.bench.report import ORACLE_CPU, ORACLE_CUDA, ORACLE_MATMUL, ORACLE_MEMORY, Figure, NotMeasured
from fuzz.bench.timing import ratio, shown, take_turns, threads
from oracle import philox
from oracle.attention import solve
from oracle.problem import Problem

SEED = 1
HEADS, DIM = 8, 128
CPU_LENGTH, CPU_LONGER = 2048, 4096
CPU_THREADS = 2
CUDA_LENGTH = 16384
MATMUL = 8192


def causal_problem(length: int, device: str) -> Problem:
    """One request of `length` tokens, float64, causal, `HEADS` heads of `DIM`."""
    q, k, v = (philox.normal(SEED, i, (length, HEADS, DIM), device).double() for i in range(3))
    return Problem(q=q, k=k, v=v, q_lens=(length,), kv_lens=(length,), scale=1 / math.sqrt(DIM))


def sdpa(problem: Problem) -> Callable[[], Tensor]:
    """torch's attention on the same operands, laid out as it likes them."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (problem.q, problem.k, problem.v))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=problem.scale)


def cpu_vs_sdpa() -> Figure:
    """Time of float64 SDPA over that of the oracle."""
    found = {}
    with threads(CPU_THREADS):
        for length, turns in ((CPU_LENGTH, 5), (CPU_LONGER, 3)):
            problem = causal_problem(length, "cpu")
            found[length] = take_turns({"sdpa": sdpa(problem), "oracle": partial(solve, problem)}, turns)
    faster = {length: ratio(times, "sdpa", "oracle") for length, times in found.items()}
    return Figure(
        ORACLE_CPU,
        faster[CPU_LENGTH],
        "times",
        f"torch SDPA float64, {CPU_LENGTH} tokens causal, {HEADS} heads, D {DIM}, {CPU_THREADS} threads",
        True,
        f"{shown(found[CPU_LENGTH])}; {CPU_LONGER} tokens: {faster[CPU_LONGER]:.3g} times, {shown(found[CPU_LONGER])}",
    )


_SHAPE = f"{HEADS} x {CUDA_LENGTH} x {DIM} causal"


@contextmanager
def _enough_memory() -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise NotMeasured(f"{_SHAPE} in float64 does not fit into this GPU's memory") from None
    finally:
        torch.cuda.empty_cache()


def cuda_vs_sdpa() -> Figure:
    """Time of float64 SDPA over that of the oracle, on the GPU."""
    with _enough_memory():
        problem = causal_problem(CUDA_LENGTH, "cuda")
        found = take_turns({"sdpa": sdpa(problem), "oracle": lambda: solve(problem)}, 5, torch.cuda.synchronize)
    return Figure(
        ORACLE_CUDA, ratio(found, "sdpa", "oracle"), "times", f"torch SDPA float64, {_SHAPE}", True, shown(found)
    )


def cuda_vs_matmul() -> Figure:
    """Useful float64 operations a second, as a share of what a large matrix product reaches."""
    with _enough_memory():
        problem = causal_problem(CUDA_LENGTH, "cuda")
        a, b = (philox.normal(SEED, i, (MATMUL, MATMUL), "cuda").double() for i in (3, 4))
        candidates = {"oracle": lambda: solve(problem), "matmul": lambda: a @ b}
        found = take_turns(candidates, 5, torch.cuda.synchronize)
    # Two products of 2 * D operations for every visible pair, and half of the pairs are visible.
    useful = 4 * HEADS * (CUDA_LENGTH * CUDA_LENGTH / 2) * DIM / found["oracle"].median
    rate = 2 * MATMUL**3 / found["matmul"].median
    return Figure(
        ORACLE_MATMUL,
        useful / rate,
        "share",
        f"a float64 matrix product of {MATMUL} cubed; the oracle on {_SHAPE}",
        True,
        f"{useful / 1e12:.3g} of {rate / 1e12:.3g} TFLOP/s; {shown(found)}",
    )


def cuda_memory_vs_sdpa() -> Figure:
    """Peak memory beyond the operands: the oracle's over that of float64 SDPA."""
    with _enough_memory():
        problem = causal_problem(CUDA_LENGTH, "cuda")
        peaks = {"oracle": _peak(lambda: solve(problem)), "sdpa": _peak(sdpa(problem))}
    return Figure(
        ORACLE_MEMORY,
        peaks["oracle"] / peaks["sdpa"],
        "share",
        f"peak memory of torch SDPA float64 beyond its operands, {_SHAPE}",
        False,
        ", ".join(f"{name} {peak / 1e9:.3g} GB" for name, peak in peaks.items()),
    )


def _peak(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
