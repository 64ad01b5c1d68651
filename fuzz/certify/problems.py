"""Small fixed attention problems, each with the same problem misread as a real kernel might misread it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle import philox
from oracle.problem import Problem

_SEED = 20


@dataclass(frozen=True)
class Example:
    """A problem and wrong versions of it, by what is wrong."""

    name: str
    problem: Problem
    misread: dict[str, Problem]


def _problem(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], *, kv_heads: int, group: int) -> Problem:
    def draw(stream: int, *shape: int) -> Tensor:
        return philox.normal(_SEED, stream, shape).double()

    return Problem(
        q=draw(0, sum(q_lens), kv_heads * group, 16),
        k=draw(1, sum(kv_lens), kv_heads, 16),
        v=draw(2, sum(kv_lens), kv_heads, 8),
        q_lens=q_lens,
        kv_lens=kv_lens,
        scale=1 / math.sqrt(16),
    )


def _window() -> Example:
    problem = replace(_problem((9, 1, 4), (9, 12, 21), kv_heads=1, group=2), window=5)
    return Example("window", problem, {"a window one key wider": replace(problem, window=6)})


def _causal() -> Example:
    problem = _problem((7, 3), (7, 19), kv_heads=2, group=1)
    late = replace(problem, context_lens=tuple(n + 1 for n in problem.kv_lens), kv_positions=problem.positions())
    return Example("chunked causal", problem, {"a diagonal one key late": late})


def _grouped() -> Example:
    problem = _problem((4,), (11,), kv_heads=3, group=2)
    # Reads kv head h % 3 where h // 2 is meant.
    order = [h for g in range(3) for h in range(6) if h % 3 == g]
    return Example("grouped heads", problem, {"heads grouped by remainder": _with_heads_from(problem, order)})


def _with_heads_from(problem: Problem, order: list[int]) -> Problem:
    """Keys and values per query head, so that query head order[i] reads the kv head of query head i."""
    kv = torch.empty(len(order), dtype=torch.int64)
    kv[order] = torch.arange(len(order)) // problem.group
    return replace(problem, k=problem.k[:, kv], v=problem.v[:, kv])


def _sink() -> Example:
    problem = _problem((3, 2), (8, 5), kv_heads=2, group=2)
    problem = replace(problem, sinks=philox.normal(_SEED, 3, 4).double())
    scaled = replace(problem, sinks=problem.sinks * problem.scale if problem.sinks is not None else None)
    return Example("sink", problem, {"no sink": replace(problem, sinks=None), "a scaled sink": scaled})


def _cap() -> Example:
    problem = replace(_problem((6,), (14,), kv_heads=2, group=1), soft_cap=1.5)
    return Example("soft cap", problem, {"no cap": replace(problem, soft_cap=None)})


def _extreme() -> Example:
    problem = replace(_problem((5, 2), (5, 9), kv_heads=2, group=1), scale=60.0, causal=False)
    return Example("logits of hundreds", problem, {"a scale off by 1e-9": replace(problem, scale=60.0 * (1 + 1e-9))})


def examples() -> tuple[Example, ...]:
    """Every example, built anew; float64 on the CPU. Every query sees at least one key."""
    return (_window(), _causal(), _grouped(), _sink(), _cap(), _extreme())
