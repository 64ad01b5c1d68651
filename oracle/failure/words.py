"""Numbers in few words: runs of indices, lists of lengths, a problem in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch

from oracle.budget.formats import FORMAT_OF_DTYPE
from oracle.problem import Problem

_LENGTHS_SHOWN = 6
_RUNS_SHOWN = 6


def dtype_name(dtype: torch.dtype) -> str:
    """`bf16` for torch.bfloat16; a dtype that budgets do not know has torch's name."""
    found = FORMAT_OF_DTYPE.get(dtype)
    return str(dtype).removeprefix("torch.") if found is None else found.name


def runs(numbers: Iterable[int]) -> str:
    """Ascending numbers, neighbours together: '0 to 3, 7, 9 to 12'."""
    parts = []
    for _, members in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        own = [number for _, number in members]
        parts.append(str(own[0]) if len(own) == 1 else f"{own[0]} to {own[-1]}")
    shown = ", ".join(parts[:_RUNS_SHOWN])
    return shown if len(parts) <= _RUNS_SHOWN else f"{shown}, ... ({len(parts)} runs)"


def count(number: int, noun: str) -> str:
    """'1 key', '3 keys', '2 queries'."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("ry") else f"{number} {noun}s"


def describe_lengths(q_lens: Sequence[int], contexts: Sequence[int]) -> str:
    """'1 query at the end of 40 keys' for one request; the lengths of several."""
    if len(q_lens) == 1:
        return f"{count(q_lens[0], 'query')} at the end of {count(contexts[0], 'key')}"
    one = "1 query" if set(q_lens) == {1} else f"{_lengths(q_lens)} queries"
    return f"{count(len(q_lens), 'request')} of {_lengths(contexts)} keys with {one} each"


def _lengths(numbers: Sequence[int]) -> str:
    if len(set(numbers)) <= 1:
        return str(numbers[0]) if numbers else "no"
    shown = ", ".join(map(str, numbers[:_LENGTHS_SHOWN]))
    return shown if len(numbers) <= _LENGTHS_SHOWN else f"{shown}, ... (together {sum(numbers)})"


def describe_heads(kv_heads: int, group: int) -> str:
    """'2 heads', or '8 heads over 2 kv heads'."""
    heads = count(kv_heads * group, "head")
    return heads if group == 1 else f"{heads} over {count(kv_heads, 'kv head')}"


def describe_dims(dim_qk: int, dim_v: int) -> str:
    """'dim 64', or 'dim 64 (values 32)'."""
    return f"dim {dim_qk}" if dim_v == dim_qk else f"dim {dim_qk} (values {dim_v})"


def describe_problem(problem: Problem) -> str:
    """A problem in one line: lengths, heads, dims, dtypes, options."""
    stored = {dtype_name(x.dtype) for x in (problem.k, problem.v)} - {dtype_name(problem.q.dtype)}
    parts = [
        describe_lengths(problem.q_lens, problem.contexts),
        describe_heads(problem.kv_heads, problem.group),
        describe_dims(problem.dim_qk, problem.dim_v),
        dtype_name(problem.q.dtype) + "".join(f", cache {name}" for name in sorted(stored)),
        "causal" if problem.causal else "not causal",
    ]
    if problem.window is not None:
        parts.append(f"window {problem.window}")
    if problem.sinks is not None:
        parts.append("sinks")
    if problem.soft_cap is not None:
        parts.append(f"soft cap {problem.soft_cap:g}")
    parts += [n for n in ("q_descale", "k_descale", "v_descale") if getattr(problem, n) is not None]
    return ", ".join([*parts, f"scale {problem.scale:.6g}"])
