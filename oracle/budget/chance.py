"""Probable errors of the rows of one block of queries: roundings of different keys taken as independent.

A rounding that errs by at most c, uniformly, has variance c^2 / 3, and sums of independent ones are sub-Gaussian: of
mean 0 and half-widths c_j, they pass confidence * sqrt(sum c_j^2 / 3) with probability 2 exp(-confidence^2 / 2)
(Hoeffding; Ipsen and Zhou, arXiv 1906.10465). With the identity of `oracle.budget.rows`, to first order,

    o' - o = sum p_j d_j (v_j - o) + sum p_j (n_j v_j - z o)

so that each stage has a width (its root of summed squares: logits, weight casts, accumulation, partial results) and a
shift (what all keys share: scale, exponential, rescaling, casts of the query; and what follows from the data). The
bound is confidence / sqrt(3) times the root of the summed squared widths, plus the shifts, over 1 less the probable
error of the denominator, and never above the worst case.

Rounding errors are functions of the data, so independence is guarded where it can fail:

- Keys with the same logit round alike: their terms are counted as one (`multiplicity`). Where products with the query
  are rounded, keys that are equal in one dimension have that rounding in common: the log-sum-exp sees it, and so does
  a result that a sink draws away from the values; and values may follow what the keys share.
- Casting a weight errs by a saw-tooth of its logit. The cast is carried out for several running maxima, fixed and
  rising, near enough to each other to find weights that a step of the format takes for one, and the bound covers
  twice the largest sum over any prefix of the keys (`oracle.budget.casts`).
- Partial sums are as large as the largest prefix, plus four standard deviations for other orders.
- Adding equal weights, or weights that are equal but for less than the sum's last place, errs alike at every step: such
  errors are added (`_together`).
- Weights that their format cannot tell from 0 err one way: they count in full.
- Truncation has a mean, which counts in full.
- Logits held in a narrow dtype, and casts of the query, count in full.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.budget import rows as worst
from oracle.budget.arithmetic import DIVISION, MERGE, Arithmetic, random_records, ways
from oracle.budget.blocks import Rows, Values, WeightedSums
from oracle.budget.casts import simulated
from oracle.budget.formats import FP32
from oracle.budget.growth import UNIT
from oracle.budget.rows import Judged, Weights, multiplicity
from oracle.precision import KeyOrder, RankOwnership

_BLOCKS = 32
"""Prefixes are looked at after so many parts of the keys."""
_OTHER_ORDERS = 4.0
"""Standard deviations that a partial sum in another order is allowed."""
_RISEN = 4.0
"""Weight, in rows, that stands before the rises of the running maximum in random orders: mean 1, variance 1/2."""


def probable_rows(
    rows: Rows, found: Judged, a: Arithmetic, confidence: float, lse_includes_sink: bool
) -> tuple[Tensor, Tensor]:
    """Probable bounds on the errors of out [m, r, e] and lse [m, r, 1], nowhere above those of `found`."""
    model = Model.of(rows, found, a, confidence / math.sqrt(3))
    bounds = []
    for probable, most in ((model.out(), found.out), (model.lse(lse_includes_sink), found.lse)):
        # Not a number: as the worst case. Where that promises nothing, an overflow may be why.
        bounds.append(torch.fmin(probable, most).masked_fill_(most == math.inf, math.inf))
    return bounds[0], bounds[1]


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage's part: the sum of squared half-widths, and the shift. None: 0."""

    square: Tensor | None = None
    shift: Tensor | None = None

    def bound(self, factor: float) -> Tensor | float:
        if self.square is None:
            return 0.0 if self.shift is None else self.shift
        width = self.square.sqrt()
        return width * factor if self.shift is None else torch.add(self.shift, width, alpha=factor)

    def scaled(self, scale: Tensor) -> Stage:
        return Stage(
            None if self.square is None else self.square * scale.square(),
            None if self.shift is None else self.shift * scale,
        )

    def larger(self, other: Stage) -> Stage:
        """What covers both, of which each is given or none."""
        pairs = ((self.square, other.square), (self.shift, other.shift))
        return Stage(*(None if x is None or y is None else torch.maximum(x, y) for x, y in pairs))

    @staticmethod
    def total(*stages: Stage) -> Stage:
        return Stage(_sum(stage.square for stage in stages), _sum(stage.shift for stage in stages))


def _sum(terms: Iterable[Tensor | None]) -> Tensor | None:
    present = [term for term in terms if term is not None]
    return functools.reduce(torch.add, present) if present else None


@dataclass(frozen=True, eq=False)
class Model:
    """Stages of the numerator [m, r, e] and of the denominator [m, r, 1], both without the sink, whose own error is
    sink_error. factor: confidence / sqrt(3).
    """

    rows: Rows
    found: Judged
    a: Arithmetic
    factor: float
    numerator: Mapping[str, Stage]
    denominator: Mapping[str, Stage]
    sink_error: Tensor | None

    @staticmethod
    def of(rows: Rows, found: Judged, a: Arithmetic, factor: float) -> Model:
        weights, o = found.weights, rows.out
        p, rises = weights.p, _Rises.of(found, a)
        alike, p_square = multiplicity(found.logits.value), p.square()
        excess, noise = _logit_errors(found, a, factor, alike)
        cast = [] if a.p is None else _cast_errors(found, a, alike)
        excesses, noises, squares, *casts = _Moments.of(rows.values.sums(excess, noise, p_square, *cast), o)
        prefixes, together = Prefixes.of(rows, found, a), _together(p_square, alike, a)
        deviation = squares.square.sqrt()
        spread, beyond = squares.about_out, None
        if rows.sinks is not None:
            # How far the sink takes the result from that of the keys.
            beyond = ((rows.sinks - weights.lse).exp_() * o).square_()
            spread = spread + beyond
        largest, away = prefixes.largest(None), prefixes.largest(-o)
        far = torch.maximum(away.plain, _OTHER_ORDERS * spread.sqrt())
        numerator_cast, denominator_cast = _casts(a, prefixes, largest, away, casts, factor)
        shared, about_out = noises.total, noises.about_out
        if found.logits.alike is not None:
            alike_too = (p * found.logits.alike).square_().sum(-1, keepdim=True)
            shared = shared + alike_too
            if beyond is not None:
                about_out = about_out + alike_too * beyond
        partial = torch.add(largest.plain, deviation, alpha=_OTHER_ORDERS)
        numerator = {
            "logits": Stage(about_out, excesses.spread),
            "rescaling": Stage(None, far * (rises.count * a.exp_error)),
            "weight cast": numerator_cast,
            **_accumulation(partial, weights, a, rises, together),
            **({"value cast": Stage(None, found.value_cast)} if isinstance(found.value_cast, Tensor) else {}),
            **_narrowing(rows, found, deviation, a, prefixes),
        }
        denominator = {
            "logits": Stage(shared, excesses.total),
            "rescaling": Stage(None, rises.weight * a.exp_error),
            "weight cast": denominator_cast,
            "row sum": _row_sum(squares, weights, a, prefixes, rises, together),
        }
        return Model(rows, found, a, factor, numerator, denominator, _sink_error(rows, weights, a, rises))

    @functools.cached_property
    def _denominator(self) -> Tensor:
        return torch.as_tensor(Stage.total(*self.denominator.values()).bound(self.factor))

    def out_parts(self) -> dict[str, Tensor]:
        """What each stage of `out` would come to alone, to first order."""
        o, left = self.rows.out.abs(), self.found.weights.left
        parts = {**self.numerator, "row sum": self.denominator["row sum"].scaled(o)}
        alone = {name: left(torch.as_tensor(stage.bound(self.factor))) for name, stage in parts.items()}
        return {**alone, **self._apart(o)}

    def _apart(self, o: Tensor) -> dict[str, Tensor]:
        """Parts of `out` that the sink's share does not lessen."""
        weights, a = self.found.weights, self.a
        parts = {}
        if self.sink_error is not None:
            parts["sink"] = self.sink_error * o
        if a.merges:
            parts["normalisation"] = worst.normalisation(weights, a) * o
        return {**parts, "underflow": self.found.underflow}

    def out(self) -> Tensor:
        left, o = self.found.weights.left, self.rows.out.abs()
        row_sum = self.denominator["row sum"].scaled(o)
        error = left(torch.as_tensor(Stage.total(*self.numerator.values(), row_sum).bound(self.factor)))
        for part in self._apart(o).values():
            error = error + part
        least = 1 - left(self._denominator)
        if self.sink_error is not None:
            least = least - self.sink_error
        return (error / least).masked_fill_(~(least > 0), math.inf)

    def lse_parts(self, includes_sink: bool) -> dict[str, Tensor]:
        """What each stage of the log-sum-exp would come to alone, to first order."""
        left = self.found.weights.left if includes_sink else torch.as_tensor
        alone = {name: left(torch.as_tensor(stage.bound(self.factor))) for name, stage in self.denominator.items()}
        return {**alone, **self._lse_apart(includes_sink), "logarithm": self.found.log.logarithm}

    def _lse_apart(self, includes_sink: bool) -> dict[str, Tensor]:
        parts = {} if self.sink_error is None or not includes_sink else {"sink": self.sink_error}
        return {**parts, "underflow": self.found.log.underflow}

    def lse(self, includes_sink: bool) -> Tensor:
        """The bound on the log-sum-exp that `found` is about, which counts the sink if `includes_sink`."""
        error = self.found.weights.left(self._denominator) if includes_sink else self._denominator
        for part in self._lse_apart(includes_sink).values():
            error = error + part
        return self.found.log.logarithm - (-error).log1p()


@dataclass(frozen=True, eq=False)
class _Moments:
    """Of one weight w: total [m, r, 1], the sum of w; sums of w |v|, w v^2, w (v - o)^2, w |v - o|: [m, r, e]."""

    total: Tensor
    size: Tensor
    square: Tensor
    about_out: Tensor
    spread: Tensor

    @staticmethod
    def of(sums: WeightedSums, out: Tensor) -> list[_Moments]:
        about_out = sums.square(out)
        of_each = (sums.total, sums.size, sums.square(), about_out, sums.spread(out, about_out))
        return [_Moments(*parts) for parts in zip(*(x.unbind(1) for x in of_each), strict=True)]


def _logit_errors(found: Judged, a: Arithmetic, factor: float, alike: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the shift, p (e^d - 1), and of the squared widths."""
    weights, logits = found.weights, found.logits
    shift = worst.of_exponential(weights.exponential, logits.systematic, a).masked_fill_(weights.exact, 0.0)
    if a.merges:
        shift += _merging(weights.size, weights.below, weights, a)
    far = logits.width * factor
    grown = far.exp()
    # What e^d - 1 - d can be, and its product with the shift.
    shift.addcmul_(far.square_(), grown, value=0.5).mul_(grown).masked_fill_(logits.absent, 0.0)
    noise = (weights.p * logits.width).square_().mul_(alike)
    if logits.coherent is not None:
        noise += (weights.p * logits.coherent).square_()
    return shift.expm1_().mul_(weights.p), noise


def _sink_error(rows: Rows, weights: Weights, a: Arithmetic, rises: _Rises) -> Tensor | None:
    """As `Weights.sink_excess`, with probable rescaling; None without a sink."""
    if rows.sinks is None:
        return None
    size, below = rows.sinks.abs(), weights.top - rows.sinks
    error = worst.exponential(size + below, size, weights.top, a) + rises.count * a.exp_error
    if a.merges:
        error = error + _merging(size, below, weights, a)
    return error.expm1() * weights.sink


def _merging(size: Tensor, below: Tensor, weights: Weights, a: Arithmetic) -> Tensor:
    """As the worst case has it, but maxima rise in merges as often as in random orders."""
    counts = torch.tensor(a.merges, dtype=torch.float64)
    rises = float(torch.minimum(counts, random_records(counts)).sum())
    return worst.merge_level(size, below, weights.top, weights.full_lse, a) + rises * (a.exp_error + 2 * UNIT)


@dataclass(frozen=True, eq=False)
class _Rises:
    """How often the running maximum rises, at most, and the weight that stands before those rises: [m, r, 1].

    Counted in the order of the keys, backwards, and as in random orders. A tile that raises the maximum holds a key
    that exceeds all before it, so that counting keys covers every tiling.
    """

    count: Tensor
    weight: Tensor

    @staticmethod
    def of(found: Judged, a: Arithmetic) -> _Rises:
        s, before = found.logits.value, found.weights.p.cumsum(-1)
        count, weight = a.records, torch.full_like(a.records, _RISEN)
        for backwards in ways(a):
            highest = (s.flip(-1) if backwards else s).cummax(-1).values
            rises = highest[..., 1:] > highest[..., :-1]
            passed = (1 - before[..., :-1]).flip(-1) if backwards else before[..., :-1]
            count = torch.maximum(count, rises.sum(-1, keepdim=True, dtype=s.dtype))
            weight = torch.maximum(weight, (passed * rises).sum(-1, keepdim=True))
        # Equal weights raise nothing.
        count = count.minimum(a.rescales).masked_fill_(found.weights.all_exact, 0.0)
        return _Rises(count, weight.minimum(count))


@dataclass(frozen=True, eq=False)
class _Largest:
    """The largest of some prefix sums [m, r, e]: of weights, and of the errors of casting them, if they are cast."""

    plain: Tensor
    cast: Tensor | None


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Sums over the first blocks of keys of weights times [v - mean, 1] / unit, in the dtype of sums.

    sums [m, b, 1 + k, r, e + 1]: of the weights, and of the errors of casting them, at k running maxima; k = 0 where
    they are not cast.
    """

    values: Values
    block: int
    sums: Tensor

    @staticmethod
    def of(rows: Rows, found: Judged, a: Arithmetic) -> Prefixes:
        p = found.weights.p.to(rows.values.columns.dtype)
        r, block = p.shape[1], max(16, -(-p.shape[2] // _BLOCKS))
        is_cast = a.p is not None and a.p.unit_roundoff > FP32.unit_roundoff
        w = torch.cat([p, *simulated(found, a, p, rows.sinks is not None)], 1) if is_cast else p
        return Prefixes(rows.values, block, _prefix_sums(rows.values, w, block).unflatten(2, (-1, r)))

    @property
    def plain(self) -> Tensor:
        """[m, b, r, e + 1]: of the weights."""
        return self.sums[:, :, 0]

    @property
    def cast(self) -> Tensor | None:
        """[m, b, k, r, e + 1]: of the errors of casting them."""
        return self.sums[:, :, 1:] if self.sums.shape[2] > 1 else None

    def about(self, sums: Tensor, centre: Tensor | None) -> Tensor:
        """Sums [m, b, ..., r, e + 1] as those of w (v + centre) / unit. centre [m, r, e], by default 0."""
        shift = (self.values.mean if centre is None else self.values.mean + centre).to(sums.dtype)
        if self.values.unit != 1:
            shift = shift / self.values.unit
        shape = (shift.shape[0], *[1] * (sums.ndim - 3), *shift.shape[1:])
        return torch.addcmul(sums[..., :-1], shift.view(shape), sums[..., -1:])

    def largest(self, centre: Tensor | None) -> _Largest:
        """The largest |sum of w (v + centre)| over the prefixes: float64 [m, r, e]."""
        low, high = self.about(self.sums, centre).aminmax(dim=1)
        size = torch.maximum(high, low.neg_()).double()
        if self.values.unit != 1:
            size *= self.values.unit
        return _Largest(size[:, 0], size[:, 1:].amax(1) if size.shape[1] > 1 else None)

    def weight(self) -> Tensor:
        """Sums of the weights alone: float64 [m, b, r, 1]."""
        return self.plain[..., -1:].double()

    def parts(self, count: int) -> Tensor:
        """Sums of w v over `count` runs of keys, about equally long: float64 [m, c, r, e]."""
        total = self.about(self.plain, None).double() * self.values.unit
        blocks = total.shape[1]
        ends = sorted({max(0, (blocks * (i + 1)) // count - 1) for i in range(min(count, blocks))})
        sums = torch.stack([total[:, end] for end in ends], 1)
        return torch.cat([sums[:, :1], sums[:, 1:] - sums[:, :-1]], 1)


def _prefix_sums(values: Values, w: Tensor, block: int) -> Tensor:
    """Sums of w [m, r, n] over the first blocks of keys, times [v - mean, 1] / unit: [m, b, r, e + 1]."""
    m, r, n = w.shape
    blocks = -(-n // block)
    columns = values.columns[..., : values.dim + 1]
    if n % block:
        w, columns = F.pad(w, (0, blocks * block - n)), F.pad(columns, (0, 0, 0, blocks * block - n))
    parts = torch.matmul(w.view(m, r, blocks, block).transpose(1, 2), columns.unflatten(1, (blocks, block)))
    return parts.cumsum(1)


def _cast_errors(found: Judged, a: Arithmetic, alike: Tensor) -> list[Tensor]:
    """Of casting weights: squared half-widths, and errors of those that err one way, if the format has such."""
    moved = found.weights.p * found.rounding
    if a.p is None or a.p.smallest_normal <= FP32.smallest_normal:
        return [moved.square_().mul_(alike)]
    lost = found.rounding >= 1
    return [(moved * ~lost).square_().mul_(alike), moved * lost]


def _casts(
    a: Arithmetic, prefixes: Prefixes, largest: _Largest, away: _Largest, casts: list[_Moments], factor: float
) -> tuple[Stage, Stage]:
    """What casting weights does to the numerator and to the denominator: by chance, or twice what was simulated if
    that is more, and what errs one way. largest, away: about 0 and the result. casts: of `_cast_errors`."""
    if not casts:
        return Stage(), Stage()
    in_sum, square, lost = a.precision.row_sum_of_rounded_p, casts[0], casts[1] if len(casts) > 1 else None
    found = []
    if in_sum is not True:
        found.append(_covering(square.square, largest.cast, None if lost is None else lost.size, factor))
    if in_sum is not False:
        found.append(_covering(square.about_out, away.cast, None if lost is None else lost.spread, factor))
    numerator = found[0]
    if len(found) > 1:
        numerator = found[0].larger(found[1])
    if in_sum is False:
        return numerator, Stage()
    seen = None if prefixes.cast is None else prefixes.cast[..., -1:].abs().amax((1, 2)).double()
    return numerator, _covering(square.total, seen, None if lost is None else lost.total, factor)


def _covering(square: Tensor, seen: Tensor | None, lost: Tensor | None, factor: float) -> Stage:
    if seen is None:
        return Stage(square, lost)
    shift = torch.sub(2 * seen, square.sqrt(), alpha=factor).clamp_(min=0.0)
    return Stage(square, shift if lost is None else shift + lost)


def _together(p_square: Tensor, alike: Tensor, a: Arithmetic) -> Tensor:
    """How many additions of a row may round alike, at least 1: [m, r, 1].

    Adding equal terms errs by the same part of a last place at every step of a binade. Terms are as good as equal where
    they differ by less than the last place of their sum: where their deviation, in means, is below count / 2^23.
    """
    deviation = a.count * p_square.sum(-1, keepdim=True) - 1
    most = alike.amax(-1, keepdim=True).double()
    return torch.where(deviation < a.nearly_equal, a.count, most).clamp_(min=1.0)


def _accumulation(
    largest: Tensor, weights: Weights, a: Arithmetic, rises: _Rises, together: Tensor
) -> dict[str, Stage]:
    """Adding up values: the unit's roundings are of numbers up to the largest partial sum [m, r, e]."""
    width, bias = a.scatter(weights.integer)
    square = together * width.square()
    if a.merges:
        square = square + sum(a.merges) * UNIT**2
    fixed = (rises.count * 2 + (1 + DIVISION + MERGE * len(a.merges))) * UNIT
    return {
        "value accumulation": Stage(square * largest.square(), bias * largest if a.biased else None),
        "final roundings": Stage(None, fixed * largest),
    }


def _row_sum(
    squares: _Moments, weights: Weights, a: Arithmetic, prefixes: Prefixes, rises: _Rises, together: Tensor
) -> Stage:
    """Adding up weights: roundings of partial sums, whose squares add up to less than the count of keys.

    Forward and backward the partial sums are known; in any order t weights come to at most sqrt(t sum p^2).
    """
    forward = prefixes.weight()
    orders = [1 - F.pad(forward[:, :-1], (0, 0, 0, 0, 1, 0)) if backwards else forward for backwards in ways(a)]
    steps = [sums.square().sum(1) for sums in orders]
    most = (steps[0] if len(steps) == 1 else torch.maximum(*steps)) * prefixes.block
    if a.precision.key_order is KeyOrder.ANY:
        most *= 2
    most = torch.minimum(most, a.count + 1 - 0.5 / squares.total)
    square = torch.minimum(most, a.count) * UNIT**2
    if weights.integer is not None:
        square.masked_fill_(weights.integer, 0.0)
    bias = None
    if a.precision.row_sum_of_rounded_p is not False:
        width, bias = a.scatter(weights.integer)
        square = torch.maximum(square, width.square())
    square = square * together
    fixed = (rises.weight * 2 + (MERGE + MERGE * len(a.merges))) * UNIT
    return Stage(
        square + sum(a.merges) * UNIT**2 if a.merges else square,
        fixed if bias is None or not a.biased else fixed + bias,
    )


def _narrowing(rows: Rows, found: Judged, slack: Tensor, a: Arithmetic, prefixes: Prefixes) -> dict[str, Stage]:
    """Rounding partial results of splits and of ranks to their dtypes.

    Where the runs of keys end is not known: equal runs of several counts stand for them, and one standard deviation,
    which is `slack` [m, r, e].
    """
    p, stages = a.precision, {}
    if p.max_splits > 1:
        most = p.max_splits * p.ranks
        counts = {1, most, *(1 << i for i in range(most.bit_length()))}
        sums = torch.stack([prefixes.parts(c).square().sum(1) for c in sorted(counts)]).amax(0)
        stages["splits"] = Stage(((sums.sqrt() + slack) * a.partial.unit_roundoff).square())
    if p.ranks > 1:
        owned = []
        if p.rank_ownership is not RankOwnership.CYCLIC:
            owned += [prefixes.parts(1), prefixes.parts(p.ranks)]
        if p.rank_ownership is not RankOwnership.CONTIGUOUS:
            owned += [_cyclic(rows.values, found.weights.p, p.ranks)]
        square = torch.stack([x.square().sum(1) for x in owned]).amax(0).sqrt() + slack
        partial = torch.stack([torch.maximum(x.clamp(min=0).sum(1), (-x).clamp(min=0).sum(1)) for x in owned]).amax(0)
        u, reduce_u = a.rank.unit_roundoff, a.reduce.unit_roundoff
        stages["ranks"] = Stage(2 * (u * square).square() + (p.ranks - 1) * (reduce_u * (partial + slack)).square())
    return stages


def _cyclic(values: Values, p: Tensor, ranks: int) -> Tensor:
    """Sums of p v over the keys of each rank, dealt out one by one: float64 [m, ranks, r, e]."""
    columns = values.columns[..., : values.dim + 1]
    sums = torch.stack([p[..., i::ranks].to(columns.dtype) @ columns[:, i::ranks] for i in range(ranks)], 1).double()
    return sums[..., :-1] * values.unit + values.mean.unsqueeze(1) * sums[..., -1:]
