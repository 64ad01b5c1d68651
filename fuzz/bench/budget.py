"""What the budget costs on top of the oracle."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from fuzz.bench.launches import Remote, counted, counts_of
from fuzz.bench.report import (
    PROBABLE,
    PROBABLE_CUDA,
    PROBABLE_LAUNCHES,
    WORST_CASE,
    WORST_CASE_CUDA,
    WORST_CASE_LAUNCHES,
    Figure,
)
from fuzz.bench.timing import nothing, ratio, shown, take_turns, threads
from oracle import philox
from oracle.attention import solve
from oracle.budget import budgets, worst_case
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.rounding import round_to

SEED = 2
REQUESTS, CONTEXT = 4, 8192
KV_HEADS, GROUP, DIM = 4, 4, 128
THREADS = 2

SUITE = "suites.tolerance"
"""Emulated kernels and faults are a suite, above this room: it is loaded by name, as the built-in targets are."""


def decode_problem(device: str) -> Problem:
    """Rows as decoding has them: one query a request over a long context, bf16 values, grouped heads."""

    def draw(stream: int, tokens: int, heads: int) -> torch.Tensor:
        return round_to(philox.normal(SEED, stream, (tokens, heads, DIM), device).double(), torch.bfloat16)

    return Problem(
        q=draw(0, REQUESTS, KV_HEADS * GROUP),
        k=draw(1, REQUESTS * CONTEXT, KV_HEADS),
        v=draw(2, REQUESTS * CONTEXT, KV_HEADS),
        q_lens=(1,) * REQUESTS,
        kv_lens=(CONTEXT,) * REQUESTS,
        scale=1 / math.sqrt(DIM),
    )


def worst_case_cost(device: str) -> Figure:
    """Time that the worst-case budget adds, over that of the oracle alone."""
    return _cost(device, WORST_CASE if device == "cpu" else WORST_CASE_CUDA, worst_case)


def probable_cost(device: str) -> Figure:
    """Time that both budgets together add, over that of the oracle alone."""
    return _cost(device, PROBABLE if device == "cpu" else PROBABLE_CUDA, budgets)


def _cost(device: str, name: str, budget: Callable[..., object]) -> Figure:
    problem = decode_problem(device)
    solution = solve(problem)
    candidates = {
        "oracle": lambda: solve(problem),
        "budget": lambda: budget(problem, Precision(), input_dtype="bf16", solution=solution),
    }
    with threads(THREADS):
        found = take_turns(candidates, 5, nothing if device == "cpu" else torch.cuda.synchronize)
    return Figure(
        name,
        ratio(found, "budget", "oracle"),
        "times",
        f"the oracle alone, whose result the budget is given: {REQUESTS} queries over {CONTEXT} keys, "
        f"{KV_HEADS * GROUP} heads, D {DIM}, bf16, loosest precision",
        False,
        shown(found),
    )


def worst_case_launches() -> Figure:
    """Kernels that the worst-case budget launches on a GPU."""
    return _launches(WORST_CASE_LAUNCHES, worst_case)


def probable_launches() -> Figure:
    """Kernels that both budgets together launch on a GPU."""
    return _launches(PROBABLE_LAUNCHES, budgets)


def _launches(name: str, budget: Callable[..., object]) -> Figure:
    problem = decode_problem("cpu")
    with counted():
        problem = replace(problem, q=Remote.of(problem.q), k=Remote.of(problem.k), v=Remote.of(problem.v))
        solution = solve(problem)
    alone = counts_of(lambda: solve(problem))
    found = counts_of(lambda: budget(problem, Precision(), input_dtype="bf16", solution=solution))
    return Figure(
        name,
        found.total,
        "launches",
        f"nothing; the oracle alone makes {alone.total}. The problem of the cost, on an imagined GPU",
        False,
        f"budget: {found}; oracle: {alone}",
    )


def detected() -> Figure:
    """Share of the emulated faults that the probable budget detects."""
    figure: Figure = importlib.import_module(f"{SUITE}.detection").share_detected()
    return figure


def tightness() -> Figure:
    """How near to the probable budget the errors of correct kernels come."""
    figure: Figure = importlib.import_module(f"{SUITE}.tightness").tightness()
    return figure
