"""Worst-case errors of the rows of one block of queries, stage by stage.

Write the weights that a kernel effectively gives its keys as p_j exp(d_j), errors that touch only the
numerator as factors 1 + n_j, and errors that touch only the denominator as 1 + z. Since
sum_j p_j (v_j - o) = 0 (a sink is one more key, with value 0), its result before the output is rounded obeys

    o' - o = [ sum p_j (e^d_j - 1)(v_j - o) + sum p_j e^d_j (n_j v_j - z o) ] / D,  D = sum p_j e^d_j (1 + z)
    lse' - lse = ln D

exactly. The bounds follow from |d_j| <= eps_j, |n_j| <= eta_j, |z| <= zeta, with e^eps - 1 kept as it is:
nothing is dropped as second order. Errors common to all keys move o by no more than the values' spread.

Assumed of a kernel, beside what its `Precision` says: its running maximum is the largest logit met so far
(or the sink, if larger), one number wherever it is used, so that its own error cancels; tiles follow the
order of positions; casts whose rounding has no field in `Precision` round to nearest; split results are
normalised before they are stored; merge weights and log-sum-exp are float32.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.budget.formats import FP32, Format, format_named
from oracle.budget.growth import UNIT, compound, contraction, gamma
from oracle.precision import Precision, Rounding
from oracle.rounding import round_to, widen

_LOG2E = math.log2(math.e)
_DIVISION = 10
"""Roundings of the final division or multiplication by a reciprocal, and of descales of the values."""
_MERGE = 4
"""Roundings of weighting one partial result and normalising."""
_CAP = 3
"""Roundings of dividing by the cap, and of multiplying by it and by log2(e)."""
_LSE = 6
"""Roundings of adding the maximum to the logarithm and of changing base."""
_DESCALE = 2
"""Roundings of multiplying by the descales of query and key."""


@dataclass(frozen=True, eq=False)
class Rows:
    """h kv heads, r rows (queries times heads of the group), n keys; all float64.

    q [h, r, d], k [h, n, d]: as the caller gave them; q_factor [h | 1, r | 1, 1] (the scale included) and
    k_factor [h | 1, 1, n | 1] scale them.
    v [h, n, e]: descaled, finite. hidden: bool [r, n], True where a key is not visible.
    count [r, 1]: how many keys are.
    reach [h, r, e]: largest |v| over the visible keys. sinks [h, r, 1] or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_factor: Tensor
    k_factor: Tensor
    hidden: Tensor
    count: Tensor
    reach: Tensor
    sinks: Tensor | None
    soft_cap: float | None


class Arithmetic:
    """A `Precision` read for rows with `count` visible keys: formats resolved, operations counted."""

    def __init__(self, precision: Precision, input_dtype: str, count: Tensor) -> None:
        self.precision = precision
        self.q_cast = _format(precision.q_cast, input_dtype)
        self.kv_cast = _format(precision.kv_cast, input_dtype)
        self.product = _format(precision.qk_product, input_dtype)
        self.logit = format_named(precision.logit_dtype, input_dtype)
        self.p = _format(precision.p_dtype, input_dtype)
        self.partial = format_named(precision.partial_dtype, input_dtype)
        self.rank = format_named(precision.rank_dtype, input_dtype)
        self.reduce = format_named(precision.reduce_dtype, input_dtype)
        self.count = count
        self.rescales = ((count - 1) / precision.tile).ceil().clamp(min=0)
        """How often the running maximum can change: steps that n neighbouring keys can touch, less one."""
        self.exp_error = -math.log1p(-precision.exp_error) if precision.exp_error < 1 else math.inf
        self.merges = [n for n in (precision.max_splits, precision.ranks) if n > 1]
        """How many partial results are merged at each level."""
        self.tiny = FP32.absolute_error(precision.flush_subnormals)

    def absolute(self, fmt: Format) -> float:
        return fmt.absolute_error(self.precision.flush_subnormals)

    def log_error(self, size: Tensor) -> Tensor:
        """Error of the logarithm of a sum of `count` terms at most 1, or of one with |logarithm| <= size."""
        return self.precision.log_error * torch.maximum(size, self.count.clamp(min=math.e).log())


def _format(name: str | None, input_dtype: str) -> Format | None:
    return None if name is None else format_named(name, input_dtype)


def bound_rows(rows: Rows, arithmetic: Arithmetic, lse_includes_sink: bool) -> tuple[Tensor, Tensor]:
    """Bounds on the errors of out [h, r, e] and lse [h, r] before they are rounded to their dtypes."""
    s, logit_error = _logits(rows, arithmetic)
    weights = _Weights.of(rows, arithmetic, s, logit_error)
    rounding = _p_rounding(weights, arithmetic)
    sums = _Sums.of(rows, weights, rounding, arithmetic)
    out = _out_bound(rows, weights, sums, arithmetic)
    lse = _lse_bound(weights, sums, arithmetic, lse_includes_sink)
    # Not a number: infinite logits or errors, about which nothing can be said.
    return out.nan_to_num(nan=math.inf, posinf=math.inf), lse.nan_to_num(nan=math.inf, posinf=math.inf).squeeze(-1)


def _logits(rows: Rows, a: Arithmetic) -> tuple[Tensor, Tensor]:
    """Logits [h, r, n], -inf where a key has no weight, and bounds on their errors."""
    p = a.precision
    q, k_t = rows.q * rows.q_factor, rows.k.transpose(1, 2)
    s = (q @ k_t).mul_(rows.k_factor)
    k_size = k_t.abs()
    size = q.abs() @ k_size
    cast_error = torch.zeros(())
    if a.q_cast is not None:
        cast_error = (_cast_error(rows.q, a.q_cast, a) * rows.q_factor.abs()) @ k_size
        size += cast_error
        cast_error = cast_error.mul_(rows.k_factor.abs())
    key_error = _kv_cast_error(rows.k * rows.k_factor.transpose(1, 2), a)
    if key_error is not None:
        # The query that they meet may be a cast one.
        query = q.abs() if a.q_cast is None else q.abs() + _cast_error(rows.q, a.q_cast, a) * rows.q_factor.abs()
        key_error = query @ key_error.transpose(1, 2)
        cast_error = cast_error + key_error
    size *= rows.k_factor.abs()
    if key_error is not None:
        size = size + key_error
    dim = rows.q.shape[2]
    growth = float(contraction(p.qk, torch.tensor(float(dim), dtype=torch.float64)))
    product = 0.0 if a.product is None else a.product.unit_roundoff
    relative = compound(product, growth, p.scale_error, _DESCALE * UNIT)
    smallest = 2 * a.tiny + (0.0 if a.product is None else a.absolute(a.product))
    unit_of_product = rows.q_factor.abs() * rows.k_factor.abs()
    error = (size * relative).add_(cast_error.to(size)).add_((1 + unit_of_product) * (2 * dim * smallest))
    error = _round_logit(s, error, 1 + unit_of_product, a)
    largest = min(a.logit.max, FP32.max, FP32.max if a.product is None else a.product.max)
    # Products are formed before scaling, or of scaled queries: either may underflow or overflow.
    error.masked_fill_(size > largest * unit_of_product.clamp(max=1.0), math.inf)
    if rows.soft_cap is not None:
        s, error = _soft_cap(s, error, rows.soft_cap, p.tanh_error)
        error = _round_logit(s, error, 1 + unit_of_product, a)
    error.masked_fill_((s.abs() + error) * _LOG2E > a.logit.max, math.inf)
    s.masked_fill_(rows.hidden, -math.inf)
    return s, error.masked_fill_(s == -math.inf, 0.0)


def _cast_error(x: Tensor, fmt: Format, a: Arithmetic) -> Tensor:
    """Bound on the error of casting x to fmt: 0 where fmt holds x, inf beyond its range."""
    error = torch.clamp(x.abs() * fmt.unit_roundoff, min=a.absolute(fmt))
    error.masked_fill_(widen(round_to(x, fmt.dtype)) == x, 0.0)
    return error.masked_fill_(x.abs() > fmt.max, math.inf)


def _kv_cast_error(x: Tensor, a: Arithmetic) -> Tensor | None:
    """Bound on the error of casting descaled keys or values; None where there is no cast, or no error."""
    if a.kv_cast is None:
        return None
    error = _cast_error(x, a.kv_cast, a)
    return error if bool(error.any()) else None


def _round_logit(s: Tensor, error: Tensor, units: Tensor, a: Arithmetic) -> Tensor:
    """Errors once the logits, scaled or not, are held in their dtype."""
    u = a.logit.unit_roundoff
    return (s.abs() * u).add_(error * (1 + u)).add_(a.absolute(a.logit) * units)


def _soft_cap(s: Tensor, error: Tensor, cap: float, tanh_error: float) -> tuple[Tensor, Tensor]:
    """Capped logits and their errors: the cap is monotone, so the ends of the error interval bound it."""
    error = error + s.abs() * (_CAP * UNIT)
    capped = (s / cap).tanh().mul_(cap)
    up = ((s + error) / cap).tanh().mul_(cap).sub_(capped)
    down = capped - ((s - error) / cap).tanh().mul_(cap)
    return capped, torch.maximum(up, down).add_(capped.abs() * (_CAP * UNIT)).add_(cap * (tanh_error + 2.0**-50))


@dataclass(frozen=True, eq=False)
class _Weights:
    """Softmax weights and the errors of their logarithms, over all n keys; columns [h, r, 1] belong to rows.

    p: of the visible keys without the sink, summing to 1. excess, deficit: p (e^eps - 1) and p (1 - e^-eps).
    depth: how far below the row's maximum a logit may be when its weight is formed, errors included.
    share: what the sink leaves, exp(lse) / (exp(lse) + exp(sink)). sink, sink_excess, sink_deficit: the
    sink's own weight and errors; 0 without one. top: the maximum, the sink included. lse: sink excluded.
    """

    p: Tensor
    excess: Tensor
    deficit: Tensor
    depth: Tensor
    share: Tensor
    sink: Tensor
    sink_excess: Tensor
    sink_deficit: Tensor
    top: Tensor
    lse: Tensor
    full_lse: Tensor

    @staticmethod
    def of(rows: Rows, a: Arithmetic, s: Tensor, logit_error: Tensor) -> "_Weights":
        no_weight = s == -math.inf
        largest = s.amax(-1, keepdim=True)
        # Rows without any weight are exact, and left out by the caller: any finite number does.
        largest = largest.masked_fill(largest == -math.inf, 0.0)
        p = (s - largest).exp_()
        total = p.sum(-1, keepdim=True)
        p /= total
        lse = largest + total.log()
        top = largest if rows.sinks is None else torch.maximum(largest, rows.sinks)
        full_lse = lse if rows.sinks is None else torch.logaddexp(lse, rows.sinks)
        size = s.abs().masked_fill_(no_weight, 0.0)
        below = (top - s).masked_fill_(no_weight, 0.0)
        error = _exponential(size, below, top, logit_error, a)
        highest = (s + error).amax(-1, keepdim=True).sub_(largest).clamp_(min=0.0)
        depth = below + error + highest
        error += a.rescales * a.exp_error + _merge_error(size, below, top, full_lse, a)
        error.masked_fill_(no_weight, 0.0)
        sink = sink_error = torch.zeros_like(lse)
        if rows.sinks is not None:
            sink = (rows.sinks - full_lse).exp_()
            size, below = rows.sinks.abs(), top - rows.sinks
            sink_error = _exponential(size, below, top, torch.zeros_like(sink), a)
            sink_error = sink_error + a.rescales * a.exp_error + _merge_error(size, below, top, full_lse, a)
        return _Weights(
            p=p,
            excess=error.expm1().mul_(p),
            deficit=error.neg_().expm1_().neg_().mul_(p),
            depth=depth,
            share=(lse - full_lse).exp_(),
            sink=sink,
            sink_excess=sink_error.expm1() * sink,
            sink_deficit=-(-sink_error).expm1() * sink,
            top=top,
            lse=lse,
            full_lse=full_lse,
        )


def _exponential(size: Tensor, below: Tensor, top: Tensor, logit_error: Tensor, a: Arithmetic) -> Tensor:
    """Error of the logarithm of exp(s - top), formed in one step or in several, whose sizes add up."""
    k = a.precision.exp_argument_roundings
    error = (logit_error * 2).add_(size).add_(below).mul_(k * UNIT).add_(logit_error)
    return error.add_(torch.maximum(size, top.abs()), alpha=2 * UNIT).add_(a.exp_error)


def _merge_error(size: Tensor, below: Tensor, top: Tensor, full_lse: Tensor, a: Arithmetic) -> Tensor | float:
    """Error of the logarithms of the weights that partial results are merged with.

    A partial result that holds the key has a log-sum-exp between the key's logit and that of the whole row.
    """
    if not a.merges:
        return 0.0
    k = a.precision.exp_argument_roundings
    largest = torch.maximum(size, torch.maximum(top.abs(), full_lse.abs()))
    level = a.log_error(below) + largest * ((_LSE + 2 * k) * UNIT)
    return level * len(a.merges) + sum(a.merges) * (a.exp_error + 2 * UNIT)


def _p_rounding(weights: _Weights, a: Arithmetic) -> Tensor:
    """Bound eta [h, r, n] on the relative error of casting weights for the second product.

    A weight is formed against a running maximum, between its own logit and the row's largest: at most 1, and
    at least exp(-depth). Rounded to nearest it moves no farther than to 1, which the format holds.
    """
    p, fmt = a.precision, a.p
    if fmt is None:
        return torch.zeros((), dtype=torch.float64, device=weights.p.device)
    if p.p_scale > fmt.max * (1 + fmt.unit_roundoff / 2):
        return torch.full_like(weights.p, math.inf)
    directed = 2.0 if p.p_rounding is Rounding.TOWARD_ZERO else 1.0
    error = weights.depth.exp().mul_(a.absolute(fmt) / p.p_scale)
    error.clamp_(min=fmt.unit_roundoff).mul_(directed)
    scale = torch.tensor(p.p_scale, dtype=torch.float64)
    if p.p_rounding is Rounding.NEAREST_EVEN and bool(widen(round_to(scale, fmt.dtype)) == scale):
        error = torch.minimum(error, weights.depth.expm1())
    error.clamp_(max=1.0)
    return error if p.p_scale == 1 else error.add_(2 * UNIT)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over the keys: spread, rounded, size [h, r, e]; excess, deficit, weight, common [h, r, 1].

    spread: sum of p (e^eps - 1) |v - o|. rounded: what casting weights does to the numerator.
    size: sum of p e^eps (1 + eta) |v|. excess, deficit: of the weights. weight: sum of p e^eps (1 + eta).
    common: what casting weights does to the denominator. o: with the sink.
    """

    spread: Tensor
    rounded: Tensor
    size: Tensor
    excess: Tensor
    deficit: Tensor
    weight: Tensor
    common: Tensor
    out: Tensor

    @staticmethod
    def of(rows: Rows, weights: _Weights, rounding: Tensor, a: Arithmetic) -> "_Sums":
        v = rows.v
        out = (weights.p @ v) * weights.share
        values = _Values.of(v, rows.count)
        grown = weights.p + weights.excess
        excess = weights.excess.sum(-1, keepdim=True)
        in_sum = a.precision.row_sum_of_rounded_p
        if a.p is None:
            rounded, size, cast = torch.zeros_like(out), grown @ values.size, torch.zeros_like(excess)
        else:
            moved = grown * rounding
            cast = moved.sum(-1, keepdim=True)
            rounded = size = moved @ values.size
            if in_sum is not False:
                spread = values.spread(moved, cast, size, out)
                rounded = spread if in_sum else torch.maximum(spread, rounded)
            size = size + grown @ values.size
        value_error = _kv_cast_error(v, a)
        if value_error is not None:
            moved_values = (grown if a.p is None else grown + moved) @ value_error
            rounded, size = rounded + moved_values, size + moved_values
        return _Sums(
            spread=values.spread(weights.excess, excess, weights.excess @ values.size, out),
            rounded=rounded,
            size=size,
            excess=excess,
            deficit=weights.deficit.sum(-1, keepdim=True),
            weight=1 + excess + cast,
            common=torch.zeros_like(cast) if in_sum is False else cast,
            out=out,
        )


@dataclass(frozen=True, eq=False)
class _Values:
    """Values as the sums need them: |v|, and v and its square about the mean, which keeps digits."""

    mean: Tensor
    size: Tensor
    centred: Tensor
    squared: Tensor
    count: Tensor

    @staticmethod
    def of(v: Tensor, count: Tensor) -> "_Values":
        mean = v.mean(1, keepdim=True)
        centred = v - mean
        return _Values(mean, v.abs(), centred, centred.square(), count)

    def spread(self, w: Tensor, total: Tensor, size: Tensor, out: Tensor) -> Tensor:
        """Bound on sum_j w_j |v_j - o| by Cauchy-Schwarz, or from the sums of w and of w |v| if less."""
        o = out - self.mean
        first, second = w @ self.centred, w @ self.squared
        square = second - 2 * o * first + o.square() * total
        lost = (second + o.square() * total) * ((self.count + 4) * 2.0**-50)
        return torch.minimum((total * (square.clamp_(min=0.0) + lost)).sqrt_(), size + out.abs() * total)


def _out_bound(rows: Rows, weights: _Weights, sums: _Sums, a: Arithmetic) -> Tensor:
    o = sums.out.abs()
    numerator, denominator = _sum_errors(a)
    partial, partial_absolute = _partial_rounding(rows, a)
    linear = compound(numerator, partial)
    denominator = denominator + _normalisation(weights, a)
    steps = rows.count * (a.rescales + 2) + sum(a.merges) + 8
    underflow = a.tiny * steps * (1 + rows.reach) + partial_absolute * 2
    error = weights.share * (sums.spread + sums.rounded + linear * sums.size) + weights.sink_excess * o
    total = weights.share * sums.weight + weights.sink + weights.sink_excess
    error = error + denominator * total * o + underflow
    least = 1 - weights.share * (sums.deficit + sums.common) - weights.sink_deficit
    least = least * (1 - denominator - a.tiny * steps)
    return torch.where(least > 0, error / least, math.inf)


def _sum_errors(a: Arithmetic) -> tuple[Tensor, Tensor]:
    """Relative errors [r, 1] of accumulating numerators, and of the row sum."""
    p = a.precision
    levels = sum(a.merges) + _MERGE * len(a.merges)
    values = contraction(p.pv, a.count, a.rescales + 1)
    numerator = compound(values, gamma(2 * a.rescales + 1 + _DIVISION + levels))
    weights = gamma(a.count)
    if p.row_sum_of_rounded_p is not False:
        # Rounded weights may be summed by the matrix unit, as one more column of the values.
        weights = torch.maximum(weights, values)
    return torch.as_tensor(numerator), torch.as_tensor(compound(weights, gamma(2 * a.rescales + _MERGE + levels)))


def _partial_rounding(rows: Rows, a: Arithmetic) -> tuple[Tensor, float]:
    """Relative error [h, r, e] of storing partial results, and the absolute one below the normal range.

    Magnitudes of partial results, weighted, add up to at most the sum of p |v|. A rank casts its result, and
    its share of the whole; the shares are added in any order.
    """
    p = a.precision
    relative, absolute, largest = 0.0, 0.0, math.inf
    if p.max_splits > 1:
        relative, absolute, largest = a.partial.unit_roundoff, a.absolute(a.partial), a.partial.max
    if p.ranks > 1:
        u, reduce_u = a.rank.unit_roundoff, a.reduce.unit_roundoff
        relative = math.expm1(math.log1p(relative) + 2 * math.log1p(u) + (p.ranks - 1) * math.log1p(reduce_u))
        absolute += 2 * a.absolute(a.rank) + (p.ranks - 1) * a.absolute(a.reduce)
        largest = min(largest, a.rank.max, a.reduce.max)
    too_large = rows.reach * (1 + relative) > largest
    return torch.full_like(rows.reach, relative).masked_fill_(too_large, math.inf), absolute


def _normalisation(weights: _Weights, a: Arithmetic) -> Tensor | float:
    """Error of normalising by exp(lse_i - lse) in merges: that of the log-sum-exp."""
    if not a.merges:
        return 0.0
    size = torch.maximum(weights.full_lse.abs(), weights.top.abs())
    k = a.precision.exp_argument_roundings
    level = a.log_error((weights.full_lse - weights.top).abs()) + size * ((_LSE + 2 * k) * UNIT) + a.exp_error
    return (level * len(a.merges)).expm1()


def _lse_bound(weights: _Weights, sums: _Sums, a: Arithmetic, includes_sink: bool) -> Tensor:
    """[h, r, 1]. The logarithm of the sum's relative error, and the error of the logarithm itself."""
    _, denominator = _sum_errors(a)
    lse = weights.full_lse if includes_sink else weights.lse
    underflow = a.tiny * a.count * (a.rescales + 2) * (weights.top - lse).exp()
    denominator = denominator + underflow
    up, down = sums.excess + sums.common, sums.deficit + sums.common
    if includes_sink:
        up = weights.share * up + weights.sink_excess
        down = weights.share * down + weights.sink_deficit
    above = up.log1p() + denominator.log1p()
    # log1p gives NaN beyond -1, which the caller reads as no bound.
    below = -(-down).log1p() - (-denominator).log1p()
    size = torch.maximum(lse.abs(), weights.top.abs())
    final = a.log_error((lse - weights.top).abs()) + size * (_LSE * UNIT)
    return torch.maximum(above, below) + final
