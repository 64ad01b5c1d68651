"""Judging a kernel's result against the oracle's, within the budget.

An element passes if some number within its bound of the exact value rounds to it: rounding is monotone, so
it must lie between the rounded ends of that interval, and where the bound is far below the spacing of the
output's dtype, equal the rounded exact value.

What is not finite:

- An exact NaN (non-finite values among the visible keys) asks for a result that is not finite, whichever: NaN
  and infinities trade places when the same terms are added in another order.
- An exact infinity asks for that infinity (in a format that has none: for the largest number of that sign,
  or NaN), unless its bound is infinite.
- Where the exact value is finite, an infinity passes only if the interval reaches it after rounding, a NaN
  only if the bound is infinite, or if the interval overflows a format that may turn overflow into NaN (fp8).

An element is vacuous if its bound is above 0 and at least the largest |v| that its row sees in its dimension:
nearly every weighting of the visible values would pass. Where all are 0, what underflow may cost is not vacuous. A
log-sum-exp is vacuous if its bound is at least ln 2: half of the weight could be missing. A failing vacuous element
still fails.

Given `Budgets`, an element beyond its probable bound and within the worst case is suspect; vacuity and ratios go by the
probable bound.
"""

import math
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.bits import bits
from oracle.budget.bounds import Bounds, Budgets
from oracle.budget.formats import Format, format_named
from oracle.fp8 import FORMAT_OF_DTYPE as FP8_OF_DTYPE
from oracle.fp8 import Overflow
from oracle.kinds import LseBase
from oracle.precision import Precision, Rounding
from oracle.rounding import inside, interval, round_to, widen
from oracle.verdict import Verdict, worst

VACUOUS_LSE = math.log(2.0)
_NEARLY_ZERO = 2.0**-100
"""A bound below says of values that are all 0 what it should: that their mean is."""
_ROWS_SHOWN = 8


class Mark(IntEnum):
    """How an element was judged, the mildest first."""

    WITHIN = 0
    SUSPECT = 1
    """beyond the probable budget, within the worst case"""
    BEYOND = 2
    NOT_FINITE = 3
    """beyond it, and not a number, or infinite"""


@dataclass(frozen=True)
class Element:
    """One element: its index ((token, head, dim), or (token, head)), and what was expected and seen there.

    ratio: the least error before rounding that explains `actual`, over `bound` (the probable one, if there is one);
    above 1 it fails, or is suspect.
    """

    index: tuple[int, ...]
    expected: float
    actual: float
    bound: float
    ratio: float


@dataclass(frozen=True)
class Tally:
    """The judgement of one tensor: elements judged, those that failed, those whose bound says nothing.

    worst: the element with the largest ratio of error to bound, whatever the verdict: the margin.
    failing_rows: how many rows have an element that failed, or is suspect.
    """

    verdict: Verdict
    elements: int
    failures: int
    vacuous: int
    worst: Element | None
    failing_rows: int
    first_failing_rows: tuple[tuple[int, int], ...]
    """(token, head), the first few."""
    suspects: int = 0
    """Elements beyond the probable bound and within the worst case."""
    ratios: Tensor | None = field(default=None, compare=False, repr=False)
    """Where an element failed or is suspect: the ratio of every element, -1 where it is not judged."""
    marks: Tensor | None = field(default=None, repr=False, compare=False)
    """Where an element failed or is suspect: the `Mark` of every element, uint8."""


@dataclass(frozen=True)
class Judgement:
    """The more severe of the two tallies' verdicts, and the tallies. lse: None if there was none to judge."""

    verdict: Verdict
    out: Tally
    lse: Tally | None


def judge(
    out: Tensor,
    lse: Tensor | None,
    solution: Solution,
    bounds: Bounds | Budgets,
    *,
    out_dtype: str,
    precision: Precision,
    expected_empty_out: float | None = 0.0,
    expected_empty_lse: float | None = -math.inf,
    lse_base: LseBase = LseBase.NATURAL,
) -> Judgement:
    """Judge out [Tq, Hq, D_v] and lse [Tq, Hq] (None: the target returns none) of a target.

    solution: its lse counts the sink if the target's does. expected_empty_*: what rows without a visible key
    must hold, exactly; None: anything, they are not judged. lse_base: of the target's `lse`.
    A tally is FAIL if an element fails, else SUSPECT if one is suspect, else VACUOUS if most of its elements are, or if
    there are none.
    Raises TypeError if a tensor's dtype is not the one that `out_dtype` or `precision` names, ValueError if
    its shape is not the solution's.
    """
    where = solution.out.device
    tight, loose = (bounds.probable, bounds.worst_case) if isinstance(bounds, Budgets) else (bounds, bounds)
    empty = tight.keys == 0
    hollow = (tight.out >= tight.reach) & ((tight.reach > 0) | (tight.out > _NEARLY_ZERO))
    rows = _Values("out", out.to(where), solution.out, tight.out, loose.out, hollow)
    tally = _tally(rows, format_named(out_dtype), precision.out_rounding, empty, expected_empty_out)
    if lse is None:
        return Judgement(tally.verdict, tally, None)
    unit = math.log2(math.e) if lse_base is LseBase.TWO else 1.0
    # What is added covers the roundings of the change of base.
    slack = (solution.lse * unit).abs().nan_to_num(posinf=0.0) * 2.0**-51
    radius, last = (x.lse * unit + slack for x in (tight, loose))
    rows = _Values("lse", lse.to(where), solution.lse * unit, radius, last, tight.lse >= VACUOUS_LSE)
    lse_tally = _tally(rows, format_named(precision.lse_dtype), Rounding.NEAREST_EVEN, empty, expected_empty_lse)
    return Judgement(worst((tally.verdict, lse_tally.verdict)), tally, lse_tally)


@dataclass(frozen=True, eq=False)
class _Values:
    """A tensor to judge [Tq, Hq, ...], what is expected of it, its bounds, and where the first of them says nothing.

    bound: beyond it an element is suspect; beyond `last`, which may be the same tensor, it fails.
    """

    name: str
    actual: Tensor
    expected: Tensor
    bound: Tensor
    last: Tensor
    vacuous: Tensor


def _tally(values: _Values, fmt: Format, rounding: Rounding, empty: Tensor, expected_empty: float | None) -> Tally:
    actual, expected = values.actual, values.expected
    if actual.dtype != fmt.dtype:
        raise TypeError(f"{values.name}: allowed is {fmt.dtype}, got {actual.dtype}")
    if actual.shape != expected.shape:
        raise ValueError(f"{values.name}: allowed is shape {list(expected.shape)}, got {list(actual.shape)}")
    hollow = empty.view(-1, *[1] * (actual.ndim - 1)).expand_as(expected)
    expected = expected.masked_fill(hollow, 0.0 if expected_empty is None else expected_empty)
    bound = values.bound.masked_fill(hollow, 0.0)
    judged = ~hollow if expected_empty is None else torch.ones_like(hollow)
    beyond = judged & ~passes(actual, expected, bound, rounding)
    failed = beyond
    if values.last is not values.bound and bool(beyond.any()):
        failed = beyond & ~passes(actual, expected, values.last.masked_fill(hollow, 0.0), rounding)
    vacuous = judged & values.vacuous & (bound > 0)
    elements, failures, suspects, hollow_count = (int(x.sum()) for x in (judged, failed, beyond & ~failed, vacuous))
    verdict = Verdict.PASS
    if failures or suspects:
        verdict = Verdict.FAIL if failures else Verdict.SUSPECT
    elif 2 * hollow_count > elements or not elements:
        verdict = Verdict.VACUOUS
    rows = beyond.flatten(2).any(-1).nonzero() if beyond.ndim == 3 else beyond.nonzero()
    ratios = _ratios(actual, expected, bound, fmt, rounding, judged, beyond)
    return Tally(
        verdict=verdict,
        elements=elements,
        failures=failures,
        vacuous=hollow_count,
        worst=_worst(actual, expected, bound, ratios) if bool(judged.any()) else None,
        failing_rows=len(rows),
        first_failing_rows=tuple((int(token), int(head)) for token, head in rows[:_ROWS_SHOWN].tolist()),
        suspects=suspects,
        ratios=ratios if failures or suspects else None,
        marks=_marks(actual, beyond, failed) if len(rows) else None,
    )


def _marks(actual: Tensor, beyond: Tensor, failed: Tensor) -> Tensor:
    return beyond.to(torch.uint8) + failed + (failed & ~widen(actual).isfinite())


def passes(actual: Tensor, expected: Tensor, bound: Tensor, rounding: Rounding) -> Tensor:
    """Elementwise, by the rules that the module states: whether `actual` is within `bound` of `expected`."""
    numbers = expected.masked_fill(expected.isnan(), 0.0)
    if rounding is Rounding.NEAREST_EVEN:
        low, high = interval(numbers, bound, actual.dtype)
    else:
        # One step of float64 outward covers the rounding of these ends themselves.
        low, high = (
            _truncate((numbers + side * bound).nextafter(numbers + side * math.inf), actual.dtype) for side in (-1, 1)
        )
    accepted = inside(actual, low, high)
    seen = widen(actual)
    may_be_nan = bound == math.inf
    if actual.dtype in FP8_OF_DTYPE:
        over, under = (_overflows(side * numbers + bound, actual.dtype) for side in (1, -1))
        may_be_nan = may_be_nan | over | under
        accepted |= (over & (seen == math.inf)) | (under & (seen == -math.inf))
    accepted |= may_be_nan & seen.isnan()
    return torch.where(expected.isnan(), ~seen.isfinite(), accepted)


def _overflows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Where x rounds above the largest number of an fp8 dtype."""
    return widen(round_to(x, dtype, Overflow.NAN)).isnan() & (x > 0)


def _truncate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded toward zero: the nearest value, or the one before it. Infinity stays."""
    nearest = round_to(x, dtype)
    beyond = widen(nearest).abs() > x.abs()
    # One code less is one value nearer to zero, for either sign.
    return (bits(nearest) - beyond.to(bits(nearest).dtype)).view(dtype)


def _ratios(
    actual: Tensor,
    expected: Tensor,
    bound: Tensor,
    fmt: Format,
    rounding: Rounding,
    judged: Tensor,
    failed: Tensor,
) -> Tensor:
    """Error over bound, elementwise: above 1 what failed, -1 what is not judged."""
    error = _least_error(widen(actual), expected, fmt, rounding)
    ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=0.0, posinf=math.inf)
    # What failed without a ratio, such as a NaN, is beyond all bounds; what passed by overflow is at none.
    passed_by_overflow = ~failed & ~(widen(actual).abs() < fmt.max)
    ratio = torch.where(failed, ratio.masked_fill(~(ratio > 1), math.inf), ratio.clamp(max=1.0))
    return ratio.masked_fill(passed_by_overflow, 0.0).masked_fill(~judged, -1.0)


def _worst(actual: Tensor, expected: Tensor, bound: Tensor, ratio: Tensor) -> Element:
    """The element farthest beyond, or nearest to, its bound."""
    index = tuple(int(i) for i in (ratio == ratio.max()).nonzero()[0])
    return Element(
        index=index,
        expected=float(expected[index]),
        actual=float(widen(actual)[index]),
        bound=float(bound[index]),
        ratio=float(ratio[index]),
    )


def _least_error(actual: Tensor, expected: Tensor, fmt: Format, rounding: Rounding) -> Tensor:
    """Distance from `expected` to the nearest number that rounds to `actual`."""
    outward = expected.abs() >= actual.abs()
    # Below a power of two the spacing is half of that above.
    magnitude = torch.where(outward, actual.abs(), actual.abs().nextafter(torch.zeros_like(actual)))
    # frexp calls the exponent of 0 zero; the spacing there is that of the subnormals.
    exponent = (torch.frexp(magnitude).exponent - 1).masked_fill(magnitude == 0, -1022)
    spacing = torch.ldexp(torch.full_like(actual, 2 * fmt.unit_roundoff), exponent)
    spacing = spacing.clamp(min=2 * fmt.half_subnormal)
    slack = spacing / 2
    if rounding is Rounding.TOWARD_ZERO:
        slack = spacing.masked_fill(~outward & (actual != 0), 0.0)
    return ((actual - expected).abs() - slack).clamp(min=0.0)
