"""What a target returned for a problem, and how well another answer would explain it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.attention import Solution, lse_with_sink, solve
from oracle.budget import Bounds, probable
from oracle.budget.formats import FORMAT_OF_DTYPE, Format, format_named
from oracle.budget.judge import passes
from oracle.convention import Convention, EmptyLse, EmptyOut
from oracle.kinds import LseBase
from oracle.precision import Precision, Rounding
from oracle.problem import Problem
from oracle.rounding import widen

EMPTY_LSE = {
    EmptyLse.NEGATIVE_INFINITY: -math.inf,
    EmptyLse.POSITIVE_INFINITY: math.inf,
    EmptyLse.UNDEFINED: math.nan,
}
"""What a row without a key holds; NaN: anything."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What a target would return for some rows: a solution and its bounds, in the target's convention.

    lse is in natural units and counts the sink if the target's does. judged: bool [T], rows that are judged at all.
    """

    solution: Solution
    bounds: Bounds


@dataclass(frozen=True, eq=False)
class Fit:
    """How well an answer explains what was returned for some rows [T, H].

    passes: bool, every element within its budget. ratio: worst error over budget, inf where it has none.
    undefined: bool, the answer has an element that is not a number, or that may be any.
    out_square, lse_square: sums of squared errors, less the last rounding, over the variances that bounds stand for.
    """

    passes: Tensor
    ratio: Tensor
    out_square: Tensor
    lse_square: Tensor | None
    undefined: Tensor

    def where(self, chosen: Tensor, other: Fit) -> Fit:
        """This fit in the `chosen` rows, the other one elsewhere."""
        squares = None
        if self.lse_square is not None and other.lse_square is not None:
            squares = torch.where(chosen, self.lse_square, other.lse_square)
        return Fit(
            torch.where(chosen, self.passes, other.passes),
            torch.where(chosen, self.ratio, other.ratio),
            torch.where(chosen, self.out_square, other.out_square),
            squares,
            torch.where(chosen, self.undefined, other.undefined),
        )

    def at(self, rows: Tensor) -> Fit:
        """The fit of some rows, bool [T, H], as [n]."""
        lse = None if self.lse_square is None else self.lse_square[rows]
        return Fit(self.passes[rows], self.ratio[rows], self.out_square[rows], lse, self.undefined[rows])

    def misfit(self, dims: int) -> tuple[float, float]:
        """Twice the negative log-likelihood of normal errors whose variance is that of the residuals: out and lse."""
        count = self.out_square.numel()
        lse = 0.0 if self.lse_square is None else _entropy(self.lse_square, count)
        return _entropy(self.out_square, count * dims), lse


_FLOOR = 0.02
"""Of the mean of squares: errors seldom have a tenth of the deviation that bounds allow, so less tells nothing."""


def _entropy(square: Tensor, count: int) -> float:
    mean = float(square.sum()) / max(1, count)
    return count * math.log(mean + _FLOOR) if math.isfinite(mean) else math.inf


@dataclass(frozen=True, eq=False)
class Subject:
    """A problem on the CPU and what a target returned for it.

    out [Tq, Hq, D_v] and lse [Tq, Hq] (or None) as returned; lse in the convention's base.
    """

    problem: Problem
    out: Tensor
    lse: Tensor | None
    precision: Precision
    input_dtype: str
    convention: Convention
    confidence: float

    @property
    def unit(self) -> float:
        """Of the returned log-sum-exp, in natural units."""
        return math.log2(math.e) if self.convention.lse_base is LseBase.TWO else 1.0

    def answer(self, posed: Problem) -> Answer:
        """What a right kernel returns for a problem, if it keeps to the convention and precision."""
        solution = solve(posed)
        bounds = probable(
            posed,
            self.precision,
            input_dtype=self.input_dtype,
            lse_includes_sink=self.convention.lse_includes_sink,
            confidence=self.confidence,
            solution=solution,
        )
        return Answer(self.in_convention(solution, posed.sinks), bounds)

    def in_convention(self, solution: Solution, sinks: Tensor | None) -> Solution:
        """A solution of the oracle with the log-sum-exp that the convention asks for, in natural units."""
        if self.convention.lse_includes_sink and sinks is not None:
            return Solution(solution.out, lse_with_sink(solution.lse, sinks))
        return solution

    def fit(self, answer: Answer, tokens: Sequence[int] | None = None, heads: slice = slice(None)) -> Fit:
        """Compare what was returned for some tokens (None: all) and heads with an answer for those rows."""
        index = slice(None) if tokens is None else torch.tensor(list(tokens), dtype=torch.int64)
        solution, bounds = answer.solution, answer.bounds
        empty = (bounds.keys == 0).unsqueeze(-1)
        out_format = FORMAT_OF_DTYPE[self.out.dtype]
        zero = 0.0 if self.convention.empty_out is EmptyOut.ZERO else math.nan
        out = Compared.of(
            self.out[index][:, heads],
            solution.out.masked_fill(empty.unsqueeze(-1), zero),
            bounds.out.masked_fill(empty.unsqueeze(-1), 0.0),
            out_format,
            self.precision.out_rounding,
            self.confidence,
        )
        accepted, ratio = out.passes.all(-1), out.ratio.amax(-1)
        undefined = (solution.out.isnan() | (bounds.out == math.inf)).any(-1) | solution.lse.isnan()
        if self.lse is None:
            return Fit(accepted, ratio, out.square.sum(-1), None, undefined)
        expected = solution.lse.masked_fill(empty, EMPTY_LSE[self.convention.empty_lse]) * self.unit
        radius = bounds.lse * self.unit + (solution.lse * self.unit).abs().nan_to_num(posinf=0.0) * 2.0**-51
        lse = Compared.of(
            self.lse[index][:, heads],
            expected,
            radius.masked_fill(empty, 0.0),
            format_named(self.precision.lse_dtype),
            Rounding.NEAREST_EVEN,
            self.confidence,
        )
        return Fit(accepted & lse.passes, torch.maximum(ratio, lse.ratio), out.square.sum(-1), lse.square, undefined)


@dataclass(frozen=True, eq=False)
class Compared:
    """Elementwise comparison of a tensor with an expectation."""

    passes: Tensor
    ratio: Tensor
    square: Tensor

    @staticmethod
    def of(
        actual: Tensor, expected: Tensor, bound: Tensor, fmt: Format, rounding: Rounding, confidence: float
    ) -> Compared:
        """confidence: standard deviations in a bound."""
        bound = bound.nan_to_num(nan=math.inf, posinf=math.inf)  # a bound that is not a number promises nothing
        anything = expected.isnan() & (bound == 0)
        accepted = passes(actual, expected.masked_fill(anything, 0.0), bound, rounding) | anything
        seen = widen(actual)
        spacing = _spacing(torch.maximum(seen.abs(), expected.abs()).nan_to_num(0.0, 0.0, 0.0), fmt)
        error = (seen - expected).abs()
        error = error.masked_fill((seen == expected) | (accepted & ~error.isfinite()), 0.0)
        # Numbers lie closer below a power of two than above it: what counts is the side that `expected` is on.
        size = seen.abs().nan_to_num(0.0, 0.0, 0.0)
        side = _spacing(torch.where(size > expected.abs(), size * (1 - 2.0**-40), size), fmt)
        slack = side / 2 if rounding is Rounding.NEAREST_EVEN else side
        beyond = (error - slack).clamp(min=0.0)
        ratio = torch.where(beyond == 0, 0.0, beyond / bound).nan_to_num(nan=math.inf, posinf=math.inf)
        # What failed is beyond its budget, however rounding at a power of two counts the slack.
        ratio = torch.where(accepted, ratio.clamp(max=1.0), ratio.clamp(min=1.0 + 2.0**-20))
        # What the last rounding may have done is no error: nothing is gained by an answer nearer to the rounded number.
        variance = (spacing / 8).square() + (bound / confidence).square()
        return Compared(accepted, ratio, (beyond.square() / variance).nan_to_num(nan=math.inf))


def _spacing(magnitude: Tensor, fmt: Format) -> Tensor:
    """Distance of neighbouring numbers of a format."""
    exponent = (torch.frexp(magnitude).exponent - 1).masked_fill(magnitude == 0, -1022)
    spacing = torch.ldexp(torch.full_like(magnitude, 2 * fmt.unit_roundoff), exponent)
    return spacing.clamp(min=2 * fmt.half_subnormal)
