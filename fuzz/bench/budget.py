"""What the budget costs on top of the oracle."""

from __future__ import annotations

import importlib
import math

import torch

from fuzz.bench.report import WORST_CASE, WORST_CASE_CUDA, Figure
from fuzz.bench.timing import nothing, ratio, shown, take_turns, threads
from oracle import philox
from oracle.attention import solve
from oracle.budget import worst_case
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.rounding import round_to

SEED = 2
REQUESTS, CONTEXT = 4, 8192
KV_HEADS, GROUP, DIM = 4, 4, 128
THREADS = 2

SUITE = "suites.tolerance.detection"
"""Emulated faults are a suite, above this room: it is loaded by name, as the built-in targets are."""


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
    """Time of the worst-case budget over that of the oracle alone."""
    problem = decode_problem(device)
    candidates = {
        "oracle": lambda: solve(problem),
        "budget": lambda: worst_case(problem, Precision(), input_dtype="bf16"),
    }
    with threads(THREADS):
        found = take_turns(candidates, 5, nothing if device == "cpu" else torch.cuda.synchronize)
    return Figure(
        WORST_CASE if device == "cpu" else WORST_CASE_CUDA,
        ratio(found, "budget", "oracle"),
        "times",
        f"the oracle alone, {REQUESTS} queries over {CONTEXT} keys, {KV_HEADS * GROUP} heads, D {DIM}, bf16",
        False,
        shown(found),
    )


def detected() -> Figure:
    """Share of the emulated faults that the probable budget detects."""
    figure: Figure = importlib.import_module(SUITE).share_detected()
    return figure
