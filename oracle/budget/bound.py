"""The budget of a problem: how far a correct kernel of a given precision may be from the oracle, per element.

`oracle.budget.rows` derives the worst case, `oracle.budget.chance` says what the probable bound assumes; here both are
put together from blocks of rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from oracle.attention import Solution, solve
from oracle.budget.arithmetic import Arithmetic
from oracle.budget.blocks import Block, blocks
from oracle.budget.bounds import Bounds, Budgets
from oracle.budget.chance import probable_rows
from oracle.budget.formats import format_named
from oracle.budget.rows import bound_rows
from oracle.precision import Precision
from oracle.problem import Problem

CONFIDENCE = 6.5
"""That of a million elements of which one is beyond its probable bound with probability 1e-3."""


def worst_case(
    problem: Problem,
    precision: Precision | None = None,
    *,
    input_dtype: str,
    lse_includes_sink: bool = False,
    block_logits: int | None = None,
    solution: Solution | None = None,
) -> Bounds:
    """Bound the rounding errors of any kernel that keeps to `precision` (default: the loosest) on `problem`.

    input_dtype: name of the dtype of the query that the kernel gets, which "input" stands for.
    lse_includes_sink: the log-sum-exp judged counts the sink.
    block_logits: logits held at a time (a few dozen float64 tensors of that many elements; at least those of
    one query). Runs on the problem's device. Non-finite values are taken as absent, since the results that
    they reach are judged without a bound. solution: what `solve` says of the problem, if it is at hand; else it is
    solved here. Raises ValueError for an unknown dtype name.
    """
    format_named(input_dtype)
    precision = precision or Precision()
    found = _Writer.of(problem)
    for block in blocks(problem, (solution or solve(problem)).out, block_logits):
        arithmetic = Arithmetic(precision, input_dtype, block.rows.count, block.rows.q.device)
        rows = bound_rows(block.rows, arithmetic, lse_includes_sink)
        found.describe(block)
        found.write(block, rows.out, rows.lse)
    return found.bounds


def budgets(
    problem: Problem,
    precision: Precision | None = None,
    *,
    input_dtype: str,
    lse_includes_sink: bool = False,
    confidence: float = CONFIDENCE,
    block_logits: int | None = None,
    solution: Solution | None = None,
) -> Budgets:
    """Both bounds at once; arguments are those of `worst_case`.

    confidence: see `Budgets`; `confidence_for` finds it. Raises ValueError as `worst_case`, and if it is not above 0.
    """
    if not confidence > 0:
        raise ValueError(f"confidence: {confidence}; above 0")
    format_named(input_dtype)
    precision = precision or Precision()
    worst = _Writer.of(problem)
    likely = worst.beside()
    for block in blocks(problem, (solution or solve(problem)).out, block_logits):
        arithmetic = Arithmetic(precision, input_dtype, block.rows.count, block.rows.q.device)
        rows = bound_rows(block.rows, arithmetic, lse_includes_sink, chance=True)
        worst.describe(block)
        worst.write(block, rows.out, rows.lse)
        likely.write(block, *probable_rows(block.rows, rows, arithmetic, confidence, lse_includes_sink))
    return Budgets(worst.bounds, likely.bounds, confidence)


def probable(
    problem: Problem,
    precision: Precision | None = None,
    *,
    input_dtype: str,
    lse_includes_sink: bool = False,
    confidence: float = CONFIDENCE,
    block_logits: int | None = None,
    solution: Solution | None = None,
) -> Bounds:
    """The probable bound of `budgets` alone."""
    return budgets(
        problem,
        precision,
        input_dtype=input_dtype,
        lse_includes_sink=lse_includes_sink,
        confidence=confidence,
        block_logits=block_logits,
        solution=solution,
    ).probable


def confidence_for(elements: int, risk: float) -> float:
    """The confidence at which all of `elements` keep to a probable bound, but for a probability of `risk`.

    sqrt(2 ln(2 elements / risk)): 6.5 for a million elements and 1e-3, 7.5 for a thousand million. Raises ValueError
    unless elements >= 1 and 0 < risk < 1.
    """
    if elements < 1 or not 0 < risk < 1:
        raise ValueError(f"elements and risk: {elements}, {risk}; at least 1, and between 0 and 1")
    return math.sqrt(2 * math.log(2 * elements / risk))


class _Writer:
    """Bounds that blocks are written to. Rows without a key have the bound 0."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    @staticmethod
    def of(problem: Problem) -> _Writer:
        tokens, heads = problem.q.shape[0], problem.q_heads
        shape, rows = (tokens, heads, problem.dim_v), tokens * heads
        wide = torch.zeros(rows * (2 * problem.dim_v + 1), dtype=torch.float64, device=problem.device)
        out, reach, lse = wide.split((rows * problem.dim_v, rows * problem.dim_v, rows))
        keys = torch.zeros(tokens, dtype=torch.int64, device=problem.device)
        return _Writer(Bounds(out.view(shape), lse.view(shape[:2]), reach.view(shape), keys))

    def beside(self) -> _Writer:
        """One for other bounds on the same rows."""
        mine = self.bounds
        return _Writer(replace(mine, out=torch.zeros_like(mine.out), lse=torch.zeros_like(mine.lse)))

    def write(self, block: Block, out: torch.Tensor, lse: torch.Tensor) -> None:
        """out [m, r, e] and lse [m, r, 1] of a block's rows."""
        self.bounds.out[block.tokens] = block.by_token(out)
        self.bounds.lse[block.tokens] = block.by_token(lse).squeeze(-1)

    def describe(self, block: Block) -> None:
        """What a block's rows see."""
        self.bounds.reach[block.tokens] = block.by_token(block.rows.reach)
        self.bounds.keys[block.tokens] = block.keys()
