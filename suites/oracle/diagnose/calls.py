"""Calls to diagnose: a problem, and what a kernel that solved another one would return for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle import philox
from oracle.attention import Solution, lse_with_sink, solve
from oracle.convention import Convention
from oracle.diagnose import Diagnosis, Surroundings, diagnose
from oracle.problem import Problem
from oracle.rounding import round_to

CONVENTION = Convention(source="this test")


def normal(stream: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return round_to(philox.normal(11, stream, shape).double(), dtype)


def problem(keys: int = 60, queries: int = 3, **fields: Any) -> Problem:
    """One request, 4 heads over 2 kv heads."""
    given: dict[str, Any] = {
        "q": normal(1, queries, 4, 16),
        "k": normal(2, keys, 2, 16),
        "v": normal(3, keys, 2, 16),
        "q_lens": (queries,),
        "kv_lens": (keys,),
        "scale": 0.23,
    }
    return Problem(**(given | fields))


def returned(solved: Problem, convention: Convention = CONVENTION) -> tuple[Tensor, Tensor]:
    """out in bfloat16 and lse in float32 of a kernel that solves a problem without any other error."""
    solution = solve(solved)
    if convention.lse_includes_sink and solved.sinks is not None:
        solution = Solution(solution.out, lse_with_sink(solution.lse, solved.sinks))
    return round_to(solution.out, torch.bfloat16), solution.lse.float()


def said(
    asked: Problem,
    out: Tensor,
    lse: Tensor | None,
    convention: Convention = CONVENTION,
    around: Surroundings | None = None,
) -> Diagnosis:
    return diagnose(asked, out, lse, input_dtype="bf16", convention=convention, around=around)


def solved_instead(asked: Problem, *, with_lse: bool = True, **fields: Any) -> Diagnosis:
    """The diagnosis of a kernel that solves `asked` with some fields changed."""
    out, lse = returned(replace(asked, **fields))
    return said(asked, out, lse if with_lse else None)
