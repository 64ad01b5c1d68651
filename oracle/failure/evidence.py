"""A judgement as plain data: the worst element, where elements are wrong, and what explains them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oracle.budget.judge import Mark, Tally
from oracle.budget.stages import explain
from oracle.diagnose.decode import decode, lines
from oracle.diagnose.model import Surroundings
from oracle.diagnose.rows import request_of
from oracle.failure.grid import grid
from oracle.failure.words import runs
from oracle.precision import Precision
from oracle.problem import Problem

DECODED_ROWS = 3
"""Failing rows whose keys are read back."""
DECODED_LINES = 6


def evidence(tally: Tally, actual: Tensor, precision: Precision, q_lens: Sequence[int]) -> dict[str, Any]:
    """What a judgement of `actual` [tokens, heads(, dims)] says. Numbers that JSON does not have are text.

    index: (token, head, dim) or (token, head) of the worst element. Nothing is known of rows where all elements passed.
    """
    if tally.worst is None:
        raise ValueError("evidence: nothing was judged")
    worst, token = tally.worst, tally.worst.index[0]
    request = next(i for i in range(len(q_lens)) if token < sum(q_lens[: i + 1]))
    found: dict[str, Any] = {
        "index": list(worst.index),
        "request": request,
        "row": token - sum(q_lens[:request]),
        "expected": repr(worst.expected),
        "actual": repr(worst.actual),
        "bound": repr(worst.bound),
        "ratio": repr(worst.ratio),
        "failures": tally.failures,
        "suspects": tally.suspects,
        "elements": tally.elements,
        "rows": tally.failing_rows,
        "failing_rows": [list(row) for row in tally.first_failing_rows],
        "dtype": str(actual.dtype),
        "precision": precision.source,
        "loosest": list(precision.loosest()),
    }
    if tally.marks is not None:
        marks = tally.marks.cpu()
        found["not_finite"] = int((marks == Mark.NOT_FINITE).sum())
        found["grid"] = grid(marks if marks.ndim == 2 else marks.amax(-1), q_lens)
        if marks.ndim == 3:
            wrong = marks[worst.index[0], worst.index[1]].nonzero().flatten().tolist()
            found["dims"] = f"all {marks.shape[2]}" if len(wrong) == marks.shape[2] else runs(wrong)
    return found


def explanation(
    problem: Problem,
    out: Tensor,
    worst: Mapping[str, Any],
    *,
    precision: Precision,
    input_dtype: str,
    confidence: float,
    around: Surroundings | None = None,
) -> dict[str, Any]:
    """Why the worst element of `evidence` is wrong, apart from a diagnosis.

    position: of its query in its request. stages: what each stage of the arithmetic adds to its budget, the largest
    first. decoded: which keys the first failing rows attended to, as lines; not of a log-sum-exp. Works on the CPU.
    """
    problem = problem.to(torch.device("cpu"))
    token, head, *dim = worst["index"]
    request = request_of(problem, token)
    start, queries, length = problem.q_starts[request], problem.q_lens[request], problem.contexts[request]
    found: dict[str, Any] = {"position": length - queries + token - start}
    shares = explain(
        problem,
        precision,
        input_dtype=input_dtype,
        token=token,
        head=head,
        dim=dim[0] if dim else None,
        confidence=confidence,
    )
    found["stages"] = {name: share for name, share in shares.items() if 0 < share < math.inf}
    if dim and problem.kv_positions is None:
        around = around or Surroundings()
        rows = sorted({token, *(row for row, _ in worst["failing_rows"])}, key=lambda row: (row != token, row))
        decoded = decode(
            problem,
            out.cpu(),
            page_size=around.page_size,
            pages=around.pages,
            pool_k=around.pool_k,
            pool_v=around.pool_v,
            rows=sorted(rows[:DECODED_ROWS]),
        )
        told = (row for row in decoded if row.changes is not None)
        found["decoded"] = lines(told, around.page_size, around.pages)[:DECODED_LINES]
    return found
