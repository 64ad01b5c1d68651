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
  are rounded, keys that are equal in one dimension have that rounding in common, which the log-sum-exp sees.
- Casting a weight errs by a saw-tooth of its logit. The cast is carried out for several running maxima, fixed and
  rising, and the bound covers twice the largest sum over any prefix of the keys (`_simulated`).
- Partial sums are as large as the largest prefix, plus four standard deviations for other orders.
- Adding equal weights, or weights that are equal but for less than the sum's last place, errs alike at every step: such
  errors are added (`_together`).
- Weights that their format cannot tell from 0 err one way: they count in full.
- Truncation has a mean, which counts in full.
- Logits held in a narrow dtype, and casts of the query, count in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.budget import rows as worst
from oracle.budget.arithmetic import Arithmetic
from oracle.budget.blocks import Rows, Values, WeightedSums
from oracle.budget.formats import FP32, Format
from oracle.budget.growth import UNIT, scatter
from oracle.budget.rows import Judged, Weights, multiplicity
from oracle.precision import KeyOrder, RankOwnership, Rounding

_BLOCKS = 32
"""Prefixes are looked at after so many parts of the keys."""
_OFFSETS = 4
"""Running maxima for which casts are simulated, over one binade."""
_TILES = 4
"""Sizes of tiles for which they are: the smallest allowed, and doubled again and again."""
_MOST_PARTS = 64
"""Runs of keys whose own maxima are looked at, at most."""
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
        least = torch.minimum(probable.nan_to_num(nan=math.inf), most)
        # Where the worst case promises nothing, an overflow may be why.
        bounds.append(least.masked_fill_(most == math.inf, math.inf))
    return bounds[0], bounds[1]


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage's part: the sum of squared half-widths, and the shift."""

    square: Tensor | float = 0.0
    shift: Tensor | float = 0.0

    def bound(self, factor: float) -> Tensor:
        return factor * torch.as_tensor(self.square).sqrt() + self.shift

    def scaled(self, scale: Tensor) -> Stage:
        return Stage(self.square * scale * scale, self.shift * scale)

    @staticmethod
    def total(stages: dict[str, Stage]) -> Stage:
        square: Tensor | float = 0.0
        shift: Tensor | float = 0.0
        for stage in stages.values():
            square, shift = square + stage.square, shift + stage.shift
        return Stage(square, shift)


@dataclass(frozen=True, eq=False)
class Model:
    """Stages of the numerator [m, r, e] and of the denominator [m, r, 1], both without the sink, whose own error is
    sink_error. factor: confidence / sqrt(3).
    """

    rows: Rows
    found: Judged
    a: Arithmetic
    factor: float
    numerator: dict[str, Stage]
    denominator: dict[str, Stage]
    sink_error: Tensor

    @staticmethod
    def of(rows: Rows, found: Judged, a: Arithmetic, factor: float) -> Model:
        weights, o = found.weights, rows.out
        p, rises = weights.p, _Rises.of(found, a)
        alike = multiplicity(found.logits.value)
        excess, noise = _logit_errors(found, a, factor, alike)
        cast = [] if a.p is None else _cast_errors(found, a, alike)
        excesses, noises, squares, *casts = rows.values.sums(excess, noise, p.square(), *cast)
        prefixes, together = Prefixes.of(rows, found, a), _together(p, alike, a)
        spread = squares.square(o) + (weights.sink / weights.share * o).square()
        away = torch.maximum(prefixes.largest(prefixes.plain, -o), _OTHER_ORDERS * spread.sqrt())
        numerator_cast, denominator_cast = _casts(rows, a, prefixes, casts, factor)
        numerator = {
            "logits": Stage(noises.square(o), excesses.spread(o)),
            "rescaling": Stage(0.0, rises.count * a.exp_error * away),
            "weight cast": numerator_cast,
            **_accumulation(squares, weights, a, prefixes, rises, together),
            "value cast": Stage(0.0, found.value_cast),
            **_narrowing(rows, found, squares, a, prefixes),
        }
        denominator = {
            "logits": Stage(noises.total + (p * found.logits.alike).square_().sum(-1, keepdim=True), excesses.total),
            "rescaling": Stage(0.0, rises.weight * a.exp_error),
            "weight cast": denominator_cast,
            "row sum": _row_sum(squares, weights, a, prefixes, rises, together),
        }
        return Model(rows, found, a, factor, numerator, denominator, _sink_error(rows, weights, a, rises))

    def out_parts(self) -> dict[str, Tensor]:
        """What each stage of `out` would come to alone, to first order."""
        weights, o, a = self.found.weights, self.rows.out.abs(), self.a
        steps = a.count * (a.rescales + 2) + sum(a.merges) + 8
        _, partial = worst.partial_rounding(self.rows, a)
        parts = {name: stage.bound(self.factor) * weights.share for name, stage in self.numerator.items()}
        return {
            **parts,
            "row sum": self.denominator["row sum"].bound(self.factor) * o * weights.share,
            "sink": self.sink_error * o,
            "normalisation": worst.normalisation(weights, a) * o,
            "underflow": a.tiny * steps * (1 + self.rows.reach) + partial * 2,
        }

    def out(self) -> Tensor:
        parts, share = self.out_parts(), self.found.weights.share
        row_sum = self.denominator["row sum"].scaled(self.rows.out.abs())
        error = Stage.total({**self.numerator, "row sum": row_sum}).bound(self.factor) * share
        error = error + parts["sink"] + parts["normalisation"] + parts["underflow"]
        least = 1 - Stage.total(self.denominator).bound(self.factor) * share - self.sink_error
        return torch.where(least > 0, error / least, math.inf)

    def lse_parts(self, includes_sink: bool) -> dict[str, Tensor]:
        """What each stage of the log-sum-exp would come to alone, to first order."""
        weights, a = self.found.weights, self.a
        lse, share = (weights.full_lse, weights.share) if includes_sink else (weights.lse, torch.ones_like(weights.lse))
        return {
            **{name: stage.bound(self.factor) * share for name, stage in self.denominator.items()},
            "sink": self.sink_error if includes_sink else torch.zeros_like(lse),
            "underflow": a.tiny * a.count * (a.rescales + 2) * (weights.top - lse).exp(),
            "logarithm": worst.final_lse_error(weights, lse, a),
        }

    def lse(self, includes_sink: bool) -> Tensor:
        parts = self.lse_parts(includes_sink)
        error = Stage.total(self.denominator).bound(self.factor)
        if includes_sink:
            error = error * self.found.weights.share
        return parts["logarithm"] - (-(error + parts["sink"] + parts["underflow"])).log1p()


def _logit_errors(found: Judged, a: Arithmetic, factor: float, alike: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the shift, p (e^d - 1), and of the squared widths."""
    weights, logits = found.weights, found.logits
    absent = logits.value == -math.inf
    size = logits.value.abs().masked_fill_(absent, 0.0)
    below = (weights.top - logits.value).masked_fill_(absent, 0.0)
    shift = worst.exponential(size, below, weights.top, logits.systematic, a).masked_fill_(weights.exact, 0.0)
    shift += _merging(size, below, weights, a)
    far = logits.width * factor
    grown = far.exp()
    # What e^d - 1 - d can be, and its product with the shift.
    shift = far.square_().mul_(grown).mul_(0.5).add_(shift).mul_(grown).masked_fill_(absent, 0.0)
    return shift.expm1_().mul_(weights.p), (weights.p * logits.width).square_().mul_(alike)


def _sink_error(rows: Rows, weights: Weights, a: Arithmetic, rises: _Rises) -> Tensor:
    """As `Weights.sink_excess`, with probable rescaling."""
    if rows.sinks is None:
        return torch.zeros_like(weights.sink)
    size, below = rows.sinks.abs(), weights.top - rows.sinks
    error = worst.exponential(size, below, weights.top, torch.zeros_like(size), a)
    error = error + _merging(size, below, weights, a) + rises.count * a.exp_error
    return error.expm1() * weights.sink


def _random_records(n: Tensor) -> Tensor:
    """A bound on the number of records in a random order of n: their mean and variance are at most ln n + 1."""
    return n.log() + 4 * n.log().sqrt() + 1


def _merging(size: Tensor, below: Tensor, weights: Weights, a: Arithmetic) -> Tensor | float:
    """As the worst case has it, but maxima rise in merges as often as in random orders."""
    if not a.merges:
        return 0.0
    counts = torch.tensor(a.merges, dtype=torch.float64)
    rises = float(torch.minimum(counts, _random_records(counts)).sum())
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
        s, p = found.logits.value, found.weights.p
        counts, weights = [_random_records(a.rescales + 1)], [torch.full_like(a.rescales, _RISEN)]
        before = p.cumsum(-1)
        for skipped, backwards in ((KeyOrder.DESCENDING, False), (KeyOrder.ASCENDING, True)):
            if a.precision.key_order is skipped:
                continue
            highest = (s.flip(-1) if backwards else s).cummax(-1).values
            rises = (highest[..., 1:] > highest[..., :-1]).to(p.dtype)
            counts.append(rises.sum(-1, keepdim=True))
            passed = (1 - before[..., :-1]).flip(-1) if backwards else before[..., :-1]
            weights.append((rises * passed).sum(-1, keepdim=True))
        # Equal weights raise nothing.
        even = (found.weights.exact | (s == -math.inf)).all(-1, keepdim=True)
        count = torch.stack(counts).amax(0).minimum(a.rescales).masked_fill_(even, 0.0)
        return _Rises(count, torch.stack(weights).amax(0).minimum(count))


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Sums over the first blocks of keys of weights times [v - mean, 1] / unit, in the dtype of sums.

    plain [m, b, r, e + 1]: of the weights. cast [m, b, k, r, e + 1]: of the errors of casting them, at k running
    maxima; None where they are not cast.
    """

    values: Values
    block: int
    plain: Tensor
    cast: Tensor | None

    @staticmethod
    def of(rows: Rows, found: Judged, a: Arithmetic) -> Prefixes:
        p = found.weights.p.to(rows.values.columns.dtype)
        r, block = p.shape[1], max(16, -(-p.shape[2] // _BLOCKS))
        simulated = a.p is not None and a.p.unit_roundoff > FP32.unit_roundoff
        w = torch.cat([p, _simulated(found, a, p, rows.sinks is not None).flatten(1, 2)], 1) if simulated else p
        sums = _prefix_sums(rows.values, w, block)
        cast = sums[:, :, r:].unflatten(2, (-1, r)) if simulated else None
        return Prefixes(rows.values, block, sums[:, :, :r], cast)

    def about(self, sums: Tensor, centre: Tensor | float) -> Tensor:
        """Sums [m, b, ..., r, e + 1] as those of w (v + centre) / unit, centre [m, r, e]."""
        shift = (self.values.mean + centre) / self.values.unit
        shape = (shift.shape[0], *[1] * (sums.ndim - 3), *shift.shape[1:])
        return sums[..., :-1] + shift.to(sums.dtype).view(shape) * sums[..., -1:]

    def largest(self, sums: Tensor, centre: Tensor | float) -> Tensor:
        """The largest |sum of w (v + centre)| over the prefixes: float64 [m, r, e]."""
        moved = self.about(sums, centre)
        low, high = moved.flatten(1, -3).aminmax(dim=1)
        return torch.maximum(high, -low).double() * self.values.unit

    def weight(self) -> Tensor:
        """Sums of the weights alone: float64 [m, b, r, 1]."""
        return self.plain[..., -1:].double()

    def parts(self, count: int) -> Tensor:
        """Sums of w v over `count` runs of keys, about equally long: float64 [m, c, r, e]."""
        total = self.about(self.plain, 0.0).double() * self.values.unit
        blocks = total.shape[1]
        ends = sorted({max(0, (blocks * (i + 1)) // count - 1) for i in range(min(count, blocks))})
        sums = total[:, ends]
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


def _simulated(found: Judged, a: Arithmetic, p: Tensor, sinks: bool) -> Tensor:
    """Errors of weights cast at several running maxima: [m, k, r, n] like p, which is rounded to the dtype of sums."""
    weights, fmt, s = found.weights, a.p, found.logits.value
    assert fmt is not None
    scales, errors = a.precision.p_scale, []
    for top in _running_maxima(found, a, sinks):
        # What a weight is in units of p.
        scale = (weights.lse - top).exp_().mul_(scales).nan_to_num_(nan=1.0, posinf=1.0).clamp_(2.0**-100, 2.0**100)
        scale = scale.to(p.dtype)
        x = (p * scale).float()
        error = _cast(x, fmt, a.precision.p_rounding is Rounding.TOWARD_ZERO).sub_(x).to(p.dtype).div_(scale)
        # A key at its maximum has the weight 1; one above it raises it.
        errors.append(error.masked_fill_(s >= top, 0.0))
    return torch.stack(errors, 1)


def _running_maxima(found: Judged, a: Arithmetic, sinks: bool) -> Iterator[Tensor]:
    """Running maxima that weights may be formed against: [m, r, 1 | n].

    The row's own and some below it, within a binade; the sink, with which kernels may begin; those of splits and ranks,
    which begin anew; and those of tiles of several sizes, which rise along with the logits where these do.
    """
    s = found.logits.value
    if a.precision.p_normalised:
        yield found.weights.full_lse
        return
    m, r, n = s.shape
    highest = s.amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    yield from (highest - i / _OFFSETS * math.log(2.0) for i in range(_OFFSETS))
    if sinks and a.precision.sink_first is not False:
        yield found.weights.top
    yield from _maxima_of_parts(s, a)
    for i in range(_TILES):
        tile = min(a.precision.tile << i, n)
        if i and tile == n:
            return
        tops = F.pad(s, (0, -n % tile), value=-math.inf).view(m, r, -1, tile).amax(-1)
        for skipped, backwards in ((KeyOrder.DESCENDING, False), (KeyOrder.ASCENDING, True)):
            if a.precision.key_order is not skipped:
                running = (tops.flip(-1) if backwards else tops).cummax(-1).values
                running = (running.flip(-1) if backwards else running).masked_fill_(running == -math.inf, 0.0)
                yield running.unsqueeze(-1).expand(-1, -1, -1, tile).flatten(2)[..., :n]


def _maxima_of_parts(s: Tensor, a: Arithmetic) -> Iterator[Tensor]:
    """The largest logits of runs of keys, about as many as splits and ranks may make, and of every N-th key: [m, r, n].

    Where the runs end is not known: equal ones of several lengths stand for them.
    """
    p, (m, r, n) = a.precision, s.shape
    parts, count = min(p.max_splits * p.ranks, _MOST_PARTS), 2
    while parts > 1 and count < 2 * parts:
        length = -(-n // count)
        tops = F.pad(s, (0, -n % length), value=-math.inf).view(m, r, -1, length).amax(-1, keepdim=True)
        yield tops.masked_fill_(tops == -math.inf, 0.0).expand(-1, -1, -1, length).flatten(2)[..., :n]
        count *= 2
    if p.ranks > 1 and p.rank_ownership is not RankOwnership.CONTIGUOUS:
        tops = F.pad(s, (0, -n % p.ranks), value=-math.inf).view(m, r, -1, p.ranks).amax(2, keepdim=True)
        tops.masked_fill_(tops == -math.inf, 0.0)
        yield tops.expand(-1, -1, -(-n // p.ranks), -1).flatten(2)[..., :n]


def _cast(x: Tensor, fmt: Format, toward_zero: bool) -> Tensor:
    """float32 x >= 0 rounded to a narrower format, ties upward, without regard to its range: a simulation."""
    dropped = 24 + round(math.log2(fmt.unit_roundoff))
    half = 0 if toward_zero else 1 << (dropped - 1)
    normal = (x.view(torch.int32) + half).bitwise_and_(-1 << dropped).view(torch.float32)
    if fmt.smallest_normal <= FP32.smallest_normal:
        return normal
    step = 2 * fmt.half_subnormal
    fixed = (x / step).floor_() if toward_zero else (x / step).round_()
    return torch.where(x < fmt.smallest_normal, fixed.mul_(step), normal)


def _cast_errors(found: Judged, a: Arithmetic, alike: Tensor) -> list[Tensor]:
    """Of casting weights: squared half-widths, and errors of those that err one way, if the format has such."""
    moved = found.weights.p * found.rounding
    if a.p is None or a.p.smallest_normal <= FP32.smallest_normal:
        return [moved.square_().mul_(alike)]
    lost = found.rounding >= 1
    return [(moved * ~lost).square_().mul_(alike), moved * lost]


def _casts(
    rows: Rows, a: Arithmetic, prefixes: Prefixes, casts: list[WeightedSums], factor: float
) -> tuple[Stage, Stage]:
    """What casting weights does to the numerator and to the denominator: by chance, or twice what was simulated if
    that is more, and what errs one way. casts: sums of `_cast_errors`."""
    if not casts:
        return Stage(), Stage()
    in_sum, o = a.precision.row_sum_of_rounded_p, rows.out
    square, lost = casts[0], casts[1] if len(casts) > 1 else None
    found = []
    if in_sum is not True:
        seen = 0.0 if prefixes.cast is None else prefixes.largest(prefixes.cast, 0.0)
        found.append(_covering(square.square(), seen, 0.0 if lost is None else lost.size, factor))
    if in_sum is not False:
        seen = 0.0 if prefixes.cast is None else prefixes.largest(prefixes.cast, -o)
        found.append(_covering(square.square(o), seen, 0.0 if lost is None else lost.spread(o), factor))
    numerator = Stage(
        torch.stack([torch.as_tensor(x.square) for x in found]).amax(0),
        torch.stack([torch.as_tensor(x.shift) for x in found]).amax(0),
    )
    if in_sum is False:
        return numerator, Stage()
    seen = 0.0 if prefixes.cast is None else prefixes.cast[..., -1:].abs().amax((1, 2)).double()
    return numerator, _covering(square.total, seen, 0.0 if lost is None else lost.total, factor)


def _covering(square: Tensor, seen: Tensor | float, lost: Tensor | float, factor: float) -> Stage:
    return Stage(square, (2 * seen - factor * square.sqrt()).clamp_(min=0.0) + lost)


def _together(p: Tensor, alike: Tensor, a: Arithmetic) -> Tensor:
    """How many additions of a row may round alike, at least 1: [m, r, 1].

    Adding equal terms errs by the same part of a last place at every step of a binade. Terms are as good as equal where
    they differ by less than the last place of their sum: where their deviation, in means, is below count / 2^23.
    """
    deviation = a.count * p.square().sum(-1, keepdim=True) - 1
    even = deviation < (a.count * (2 * UNIT)).square()
    return torch.where(even, a.count, alike.amax(-1, keepdim=True).double()).clamp(min=1.0)


def _accumulation(
    squares: WeightedSums, weights: Weights, a: Arithmetic, prefixes: Prefixes, rises: _Rises, together: Tensor
) -> dict[str, Stage]:
    """Adding up values: the unit's roundings are of numbers up to the largest partial sum."""
    width, bias = _scatter(weights, a)
    width = width * together.sqrt()
    largest = prefixes.largest(prefixes.plain, 0.0) + _OTHER_ORDERS * squares.square().sqrt()
    fixed = (2 * rises.count + 1 + worst.DIVISION + worst.MERGE * len(a.merges)) * UNIT
    return {
        "value accumulation": Stage((width.square() + sum(a.merges) * UNIT**2) * largest.square(), bias * largest),
        "final roundings": Stage(0.0, fixed * largest),
    }


def _scatter(weights: Weights, a: Arithmetic) -> tuple[Tensor, Tensor]:
    width, bias = scatter(a.precision.pv, a.count, a.rescales + 1)
    return width.masked_fill(weights.integer, 0.0), bias.masked_fill(weights.integer, 0.0)


def _row_sum(
    squares: WeightedSums, weights: Weights, a: Arithmetic, prefixes: Prefixes, rises: _Rises, together: Tensor
) -> Stage:
    """Adding up weights: roundings of partial sums, whose squares add up to less than the count of keys.

    Forward and backward the partial sums are known; in any order t weights come to at most sqrt(t sum p^2).
    """
    sums = prefixes.weight()
    forward, backward = sums, 1 - F.pad(sums[:, :-1], (0, 0, 0, 0, 1, 0))
    ways = [forward] if a.precision.key_order is not KeyOrder.DESCENDING else []
    ways += [backward] if a.precision.key_order is not KeyOrder.ASCENDING else []
    steps = torch.stack([way.square().sum(1) for way in ways]).amax(0) * prefixes.block
    if a.precision.key_order is KeyOrder.ANY:
        steps = 2 * steps
    steps = torch.minimum(steps, a.count - 0.5 / squares.total + 1)
    square = torch.minimum(steps, a.count).masked_fill(weights.integer, 0.0) * UNIT**2
    bias = torch.zeros_like(a.count)
    if a.precision.row_sum_of_rounded_p is not False:
        width, bias = _scatter(weights, a)
        square = torch.maximum(square, width.square())
    square = square * together
    fixed = (2 * rises.weight + worst.MERGE + worst.MERGE * len(a.merges)) * UNIT
    return Stage(square + sum(a.merges) * UNIT**2, bias + fixed)


def _narrowing(rows: Rows, found: Judged, squares: WeightedSums, a: Arithmetic, prefixes: Prefixes) -> dict[str, Stage]:
    """Rounding partial results of splits and of ranks to their dtypes.

    Where the runs of keys end is not known: equal runs of several counts stand for them, and one standard deviation.
    """
    p, stages = a.precision, {}
    slack = squares.square().sqrt()
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
