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

- Keys with the same logit round alike: their terms are counted as one (`_multiplicity`).
- Casting a weight errs by a saw-tooth of its logit. The cast is carried out for several running maxima, and the bound
  covers twice the largest sum over any prefix of the keys (`_Casts`).
- Partial sums are as large as the largest prefix, plus four standard deviations for other orders.
- Weights below the normal range of their format err one way: they count in full.
- Truncation has a mean, which counts in full.
- Accumulations whose logits are rounded to a narrow dtype, and casts of the query, count in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.budget import rows as worst
from oracle.budget.formats import FP32, Format
from oracle.budget.growth import UNIT, scatter
from oracle.budget.rows import Arithmetic, Judged, Rows, Values
from oracle.precision import KeyOrder, RankOwnership, Rounding

_BLOCKS = 64
"""Prefixes are looked at after so many parts of the keys."""
_OFFSETS = 8
"""Running maxima for which casts are simulated, over one binade."""
_OTHER_ORDERS = 4.0
"""Standard deviations that a partial sum in another order is allowed."""


def probable_rows(
    rows: Rows, found: Judged, a: Arithmetic, confidence: float, lse_includes_sink: bool
) -> tuple[Tensor, Tensor]:
    """Probable bounds on the errors of out [h, r, e] and lse [h, r, 1], nowhere above those of `found`."""
    model = _Model.of(rows, found, a, confidence / math.sqrt(3))
    out = torch.minimum(model.out().nan_to_num(nan=math.inf), found.out)
    lse = torch.minimum(model.lse(lse_includes_sink).nan_to_num(nan=math.inf), found.lse)
    # Where the worst case promises nothing, an overflow may be why.
    return out.masked_fill(found.out == math.inf, math.inf), lse.masked_fill(found.lse == math.inf, math.inf)


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage's part: the sum of squared half-widths, and the shift."""

    square: Tensor | float
    shift: Tensor | float


@dataclass(frozen=True, eq=False)
class _Model:
    """Stages of the numerator [h, r, e] and of the denominator [h, r, 1], the sink left out of the latter."""

    rows: Rows
    found: Judged
    a: Arithmetic
    factor: float
    numerator: dict[str, Stage]
    denominator: dict[str, Stage]
    sink_error: Tensor

    @staticmethod
    def of(rows: Rows, found: Judged, a: Arithmetic, factor: float) -> _Model:
        weights, logits, values = found.weights, found.logits, found.values
        records = _records(logits.value, a)
        absent = logits.value == -math.inf
        size = logits.value.abs().masked_fill_(absent, 0.0)
        below = (weights.top - logits.value).masked_fill_(absent, 0.0)
        shift = worst.exponential(size, below, weights.top, logits.systematic, a) + _merging(size, below, weights, a)
        reach = logits.width * factor
        # What e^d - 1 - d and its product with the shift can be.
        shift = (shift + reach.square() * reach.exp() / 2).mul_(reach.exp()).masked_fill_(absent, 0.0)
        alike = _multiplicity(logits.value)
        p, o, share = weights.p, found.sums.out, weights.share
        excess, noise = shift.expm1_().mul_(p), (p * logits.width).square_().mul_(alike)
        sink_error = torch.zeros_like(weights.sink)
        if rows.sinks is not None:
            size, below = rows.sinks.abs(), weights.top - rows.sinks
            sink_error = worst.exponential(size, below, weights.top, torch.zeros_like(size), a)
            sink_error = (sink_error + _merging(size, below, weights, a) + records * a.exp_error).expm1()
            sink_error = sink_error * weights.sink
        prefixes = _Prefixes.of(values, p)
        spread = values.spread_square(p.square(), o) + (weights.sink / share * o).square()
        away = torch.maximum(prefixes.largest(values.mean - o), _OTHER_ORDERS * spread.sqrt())
        total = excess.sum(-1, keepdim=True)
        casts = _Casts.of(rows, found, a, alike, factor)
        numerator = {
            "logits": Stage(values.spread_square(noise, o), values.spread(excess, total, excess @ values.size, o)),
            "rescaling": Stage(0.0, records * a.exp_error * away),
            "weight cast": casts.out(),
            **_accumulation(found, a, prefixes, records),
            **_narrowing(rows, found, a, prefixes),
        }
        denominator = {
            "logits": Stage(noise.sum(-1, keepdim=True), total),
            "rescaling": Stage(0.0, records * a.exp_error),
            "weight cast": casts.sum(),
            "row sum": _row_sum(a, records),
        }
        return _Model(rows, found, a, factor, numerator, denominator, sink_error)

    def out(self) -> Tensor:
        weights, o = self.found.weights, self.found.sums.out.abs()
        error = self._total(self.numerator, {"row sum": o}) * weights.share
        error = error + self.sink_error * o + self._underflow()
        error = error + worst.normalisation(weights, self.a) * o
        least = 1 - self._total(self.denominator, {}) * weights.share - self.sink_error
        return torch.where(least > 0, error / least, math.inf)

    def lse(self, includes_sink: bool) -> Tensor:
        weights, a = self.found.weights, self.a
        lse = weights.full_lse if includes_sink else weights.lse
        error = self._total(self.denominator, {})
        if includes_sink:
            error = error * weights.share + self.sink_error
        error = error + a.tiny * a.count * (a.rescales + 2) * (weights.top - lse).exp()
        return -(-error).log1p() + worst.final_lse_error(weights, lse, a)

    def _total(self, stages: dict[str, Stage], scaled: dict[str, Tensor]) -> Tensor:
        """The bound that stages have together; those of the denominator named in `scaled` join, so scaled."""
        terms: list[tuple[Stage, Tensor | float]] = [(stage, 1.0) for stage in stages.values()]
        terms += [(self.denominator[name], scale) for name, scale in scaled.items()]
        square: Tensor | float = 0.0
        shift: Tensor | float = 0.0
        for stage, scale in terms:
            square = square + stage.square * scale * scale
            shift = shift + stage.shift * scale
        return self.factor * torch.as_tensor(square).sqrt() + shift

    def _underflow(self) -> Tensor:
        a = self.a
        steps = a.count * (a.rescales + 2) + sum(a.merges) + 8
        _, partial = worst.partial_rounding(self.rows, a)
        return a.tiny * steps * (1 + self.rows.reach) + partial * 2


def _records(s: Tensor, a: Arithmetic) -> Tensor:
    """How often the running maximum rises, at most: counted in both orders, or as in random ones. [h, r, 1].

    A tile that raises it holds a key that exceeds all before it, so that counting keys covers every tiling.
    """
    counts = []
    if a.precision.key_order is not KeyOrder.DESCENDING:
        counts.append(_rises(s))
    if a.precision.key_order is not KeyOrder.ASCENDING:
        counts.append(_rises(s.flip(-1)))
    # The number of records of a random order of n: mean and variance at most ln n + 1.
    steps = (a.rescales + 1).log()
    counts.append((steps + 4 * steps.sqrt() + 1).expand_as(counts[0]))
    return torch.stack(counts).amax(0).minimum(a.rescales)


def _rises(s: Tensor) -> Tensor:
    highest = s.cummax(-1).values
    return (highest[..., 1:] > highest[..., :-1]).sum(-1, keepdim=True, dtype=torch.float64)


def _merging(size: Tensor, below: Tensor, weights: worst.Weights, a: Arithmetic) -> Tensor | float:
    """As the worst case has it, but maxima rise in merges as often as in random orders."""
    if not a.merges:
        return 0.0
    rises = sum(min(n, math.log(n) + 4 * math.sqrt(math.log(n)) + 1) for n in a.merges)
    return worst.merge_level(size, below, weights.top, weights.full_lse, a) + rises * (a.exp_error + 2 * UNIT)


def _multiplicity(s: Tensor) -> Tensor:
    """How many keys of the row have the same logit, at least 1: counted by hashing, so never too few. [h, r, n]."""
    bits = (s + 0.0).to(torch.float32).view(torch.int32).long() & 0xFFFFFFFF
    size = 4 + max(1, s.shape[-1] - 1).bit_length()
    bucket = ((bits * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - size)
    present = (s > -math.inf).to(torch.float32)
    counts = torch.zeros(*s.shape[:-1], 1 << size, device=s.device).scatter_add_(-1, bucket, present)
    return counts.gather(-1, bucket).clamp_(min=1.0).double()


@dataclass(frozen=True, eq=False)
class _Prefixes:
    """Sums of weights, and of weights times centred values, over the first blocks of keys: [h, b, r, 1 | e]."""

    values: Tensor
    weights: Tensor
    mean: Tensor
    deviation: Tensor
    """sqrt(sum p^2 v^2) [h, r, e]."""

    @staticmethod
    def of(values: Values, w: Tensor) -> _Prefixes:
        sums = prefix_sums(values, w)
        square = w.square()
        return _Prefixes(
            sums[..., :-1],
            sums[..., -1:],
            values.mean,
            values.spread_square(square, torch.zeros_like(values.mean)).sqrt(),
        )

    def about(self, centre: Tensor) -> Tensor:
        """Prefix sums of w (v - mean + centre)."""
        return self.values + centre.unsqueeze(1) * self.weights

    def largest(self, centre: Tensor) -> Tensor:
        return self.about(centre).abs().amax(1)

    def parts(self, count: int) -> Tensor:
        """Sums of w v over `count` runs of keys, about equally long: [h, c, r, e]."""
        total = self.about(self.mean)
        blocks = total.shape[1]
        ends = sorted({max(0, (blocks * (i + 1)) // count - 1) for i in range(min(count, blocks))})
        sums = total[:, ends]
        return torch.cat([sums[:, :1], sums[:, 1:] - sums[:, :-1]], 1)


def prefix_sums(values: Values, w: Tensor) -> Tensor:
    """Sums of w [h, r, n] over the first blocks of keys, times [v - mean, 1]: [h, b, r, e + 1]."""
    h, r, n = w.shape
    block = max(16, -(-n // _BLOCKS))
    blocks = -(-n // block)
    padded = F.pad(w, (0, blocks * block - n)).view(h, r, blocks, block).transpose(1, 2)
    columns = F.pad(F.pad(values.centred, (0, 1), value=1.0), (0, 0, 0, blocks * block - n))
    return (padded @ columns.view(h, blocks, block, -1)).cumsum(1)


@dataclass(frozen=True, eq=False)
class _Casts:
    """What casting weights for the second product does.

    own, own_sum: squared widths of sum e_j v_j and sum e_j, e_j the error of weight j; about: of sum e_j (v_j - o).
    full*: sums of |e_j| over weights that err one way, times |v|, 1, |v - o|. seen*: the largest of those three sums
    over a prefix, as simulated. most*: bounds on them all, whatever the signs.
    """

    stages: dict[str, Stage]

    @staticmethod
    def of(rows: Rows, found: Judged, a: Arithmetic, alike: Tensor, factor: float) -> _Casts:
        if a.p is None:
            nothing = Stage(0.0, 0.0)
            return _Casts({"numerator": nothing, "denominator": nothing})
        values, weights, o = found.values, found.weights, found.sums.out
        moved = weights.p * found.rounding.expand_as(weights.p)
        one_way = found.rounding > 2.5 * a.p.unit_roundoff
        fully = moved * one_way
        square = (moved - fully).square_().mul_(alike)
        seen = _simulated(rows, found, a)
        in_sum = a.precision.row_sum_of_rounded_p
        total, full = (x.sum(-1, keepdim=True) for x in (moved, fully))
        apart = _bounded(
            values.spread_square(square, torch.zeros_like(values.mean)),
            fully @ values.size,
            _largest(seen, values.mean),
            moved @ values.size,
            factor,
        )
        together = _bounded(
            values.spread_square(square, o),
            values.spread(fully, full, fully @ values.size, o),
            _largest(seen, values.mean - o),
            values.spread(moved, total, moved @ values.size, o),
            factor,
        )
        of_sum = _bounded(square.sum(-1, keepdim=True), full, seen[..., -1:].abs().amax((1, 2)), total, factor)
        numerator = apart if in_sum is False else together if in_sum else _worse(apart, together)
        return _Casts({"numerator": numerator, "denominator": of_sum if in_sum is not False else Stage(0.0, 0.0)})

    def out(self) -> Stage:
        return self.stages["numerator"]

    def sum(self) -> Stage:
        return self.stages["denominator"]


def _bounded(square: Tensor, full: Tensor, seen: Tensor, most: Tensor, factor: float) -> Stage:
    """A stage that covers chance and twice what was seen, plus what errs one way, but no more than `most`."""
    by_chance = factor * square.sqrt()
    total = torch.minimum(torch.maximum(by_chance, 2 * seen) + full, most)
    width = torch.minimum(by_chance, total)
    return Stage((width / factor).square(), total - width)


def _worse(one: Stage, other: Stage) -> Stage:
    return Stage(
        *(torch.maximum(*map(torch.as_tensor, pair)) for pair in ((one.square, other.square), (one.shift, other.shift)))
    )


def _largest(seen: Tensor, centre: Tensor) -> Tensor:
    """Of simulated sums [h, b, k, r, e + 1] of e (v - mean) and e: the largest |sum of e (v - mean + centre)|."""
    return (seen[..., :-1] + centre[:, None, None] * seen[..., -1:]).abs().amax((1, 2))


def _simulated(rows: Rows, found: Judged, a: Arithmetic) -> Tensor:
    """Errors of weights cast at several running maxima, summed over prefixes: [h, b, k, r, e + 1]."""
    weights, s, fmt = found.weights, found.logits.value, a.p
    assert fmt is not None
    h, r, n = s.shape
    if fmt.unit_roundoff <= FP32.unit_roundoff:
        return torch.zeros(h, 1, 1, r, found.values.v.shape[2] + 1, dtype=s.dtype, device=s.device)
    highest = s.amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    exact = s == highest
    errors = []
    for i in range(_OFFSETS):
        # Kernels that begin with the sink as their maximum stay there.
        top = weights.top if i % 2 else highest
        x = ((s - top).exp_().mul_(a.precision.p_scale * 2.0 ** (-i / _OFFSETS))).float()
        error = (_cast(x, fmt, a.precision.p_rounding is Rounding.TOWARD_ZERO) - x).div_(
            x.clamp_(min=FP32.smallest_normal)
        )
        errors.append(error.double().mul_(weights.p).masked_fill_(exact, 0.0))
    sums = prefix_sums(found.values, torch.stack(errors, 1).view(h, -1, n))
    return sums.view(h, sums.shape[1], _OFFSETS, r, -1)


def _cast(x: Tensor, fmt: Format, toward_zero: bool) -> Tensor:
    """float32 x >= 0 rounded to a narrower format, ties upward, without regard to its range: a simulation."""
    dropped = 24 + round(math.log2(fmt.unit_roundoff))
    half = 0 if toward_zero else 1 << (dropped - 1)
    normal = ((x.view(torch.int32) + half) >> dropped << dropped).view(torch.float32)
    if fmt.smallest_normal <= FP32.smallest_normal:
        return normal
    step = 2 * fmt.half_subnormal
    fixed = (x / step).floor_() if toward_zero else (x / step).round_()
    return torch.where(x < fmt.smallest_normal, fixed.mul_(step), normal)


def _accumulation(found: Judged, a: Arithmetic, prefixes: _Prefixes, records: Tensor) -> dict[str, Stage]:
    """Adding up values: the unit's roundings are of numbers up to the largest partial sum."""
    width, bias = scatter(a.precision.pv, a.count, a.rescales + 1)
    size = found.weights.p @ found.values.size
    largest = prefixes.largest(prefixes.mean) + _OTHER_ORDERS * prefixes.deviation
    largest = torch.minimum(largest, size)
    fixed = (2 * records + 1 + worst.DIVISION + worst.MERGE * len(a.merges)) * UNIT
    return {
        "value accumulation": Stage((width.square() + sum(a.merges) * UNIT**2) * largest.square(), bias * largest),
        "final roundings": Stage(0.0, fixed * largest),
    }


def _row_sum(a: Arithmetic, records: Tensor) -> Stage:
    square, bias = a.count * UNIT**2, torch.zeros_like(a.count)
    if a.precision.row_sum_of_rounded_p is not False:
        width, bias = scatter(a.precision.pv, a.count, a.rescales + 1)
        square = torch.maximum(square, width.square())
    fixed = (2 * records + worst.MERGE + worst.MERGE * len(a.merges)) * UNIT
    return Stage(square + sum(a.merges) * UNIT**2, bias + fixed)


def _narrowing(rows: Rows, found: Judged, a: Arithmetic, prefixes: _Prefixes) -> dict[str, Stage]:
    """Rounding partial results of splits and of ranks to their dtypes.

    Where the runs of keys end is not known: equal runs of several counts stand for them, a quarter more, and two
    standard deviations of the sum.
    """
    p, stages = a.precision, {}
    slack = 2 * prefixes.deviation
    if p.max_splits > 1:
        counts = {1, p.max_splits * p.ranks, *(1 << i for i in range((p.max_splits * p.ranks).bit_length()))}
        sums = torch.stack([prefixes.parts(c).square().sum(1) for c in sorted(counts)]).amax(0)
        stages["splits"] = Stage(((1.25 * sums.sqrt() + slack) * a.partial.unit_roundoff).square(), 0.0)
    if p.ranks > 1:
        owned = []
        if p.rank_ownership is not RankOwnership.CYCLIC:
            owned += [prefixes.parts(1), prefixes.parts(p.ranks)]
        if p.rank_ownership is not RankOwnership.CONTIGUOUS:
            owned += [_cyclic(found, p.ranks)]
        square = torch.stack([x.square().sum(1) for x in owned]).amax(0).sqrt() * 1.25 + slack
        partial = torch.stack([torch.maximum(x.clamp(min=0).sum(1), (-x).clamp(min=0).sum(1)) for x in owned]).amax(0)
        partial = 1.25 * partial + slack
        u, reduce_u = a.rank.unit_roundoff, a.reduce.unit_roundoff
        stages["ranks"] = Stage(2 * (u * square).square() + (p.ranks - 1) * (reduce_u * partial).square(), 0.0)
    return stages


def _cyclic(found: Judged, ranks: int) -> Tensor:
    """Sums of p v over the keys of each rank, dealt out one by one: [h, ranks, r, e]."""
    p, v = found.weights.p, found.values.v
    return torch.stack([p[..., i::ranks] @ v[:, i::ranks] for i in range(ranks)], 1)
