"""Worst-case errors of the rows of one block of queries, stage by stage.

Write the weights that a kernel effectively gives its keys as p_j exp(d_j), errors that touch only the
numerator as factors 1 + n_j, and errors that touch only the denominator as 1 + z. Since
sum_j p_j (v_j - o) = 0 (a sink is one more key, with value 0), its result before the output is rounded obeys

    o' - o = [ sum p_j (e^d_j - 1)(v_j - o) + sum p_j e^d_j (n_j v_j - z o) ] / D,  D = sum p_j e^d_j (1 + z)
    lse' - lse = ln D

exactly. The bounds follow from |d_j| <= eps_j, |n_j| <= eta_j, |z| <= zeta, with e^eps - 1 kept as it is:
nothing is dropped as second order. Errors common to all keys move o by no more than the values' spread.

Assumed of a kernel, beside what its `Precision` says: its running maximum is the largest logit met so far
(or the sink, if larger and not known to come later), one number wherever it is used, so that its own error
cancels; tiles follow the order of positions; casts whose rounding has no field in `Precision` round to nearest;
split results are normalised before they are stored; merge weights and log-sum-exp are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.budget.arithmetic import Arithmetic
from oracle.budget.blocks import FLOOR, Rows, slack_of
from oracle.budget.formats import FP32, Format, holds
from oracle.budget.growth import UNIT, compound, contraction, gamma, scatter
from oracle.precision import Rounding
from oracle.rounding import round_to, widen

_LOG2E = math.log2(math.e)
DIVISION = 10
"""Roundings of the final division or multiplication by a reciprocal, and of descales of the values."""
MERGE = 4
"""Roundings of weighting one partial result and normalising."""
_CAP = 3
"""Roundings of dividing by the cap, and of multiplying by it and by log2(e)."""
_LSE = 6
"""Roundings of adding the maximum to the logarithm and of changing base."""
_NOTHING = 2.0**-100
"""An argument so small has the exponential 1, whatever computes it."""
_ODD = 0x1E3779B1
"""Multiplies bits to hash them; what overflows is lost."""
_DESCALE = 2
"""Roundings of multiplying by the descales of query and key."""


@dataclass(frozen=True, eq=False)
class Judged:
    """What the worst case found, for the probable bound to start from."""

    logits: Logits
    weights: Weights
    rounding: Tensor
    value_cast: Tensor | float
    """what casting values does to the numerator, as a bound"""
    out: Tensor
    lse: Tensor


def bound_rows(rows: Rows, arithmetic: Arithmetic, lse_includes_sink: bool, chance: bool = False) -> Judged:
    """Bounds on the errors of out [m, r, e] and lse [m, r, 1] before they are rounded to their dtypes.

    chance: with what the probable bound needs.
    """
    logits = logits_of(rows, arithmetic, chance)
    weights = Weights.of(rows, arithmetic, logits.value, logits.error)
    rounding = _p_rounding(weights, arithmetic)
    sums = Sums.of(rows, weights, rounding, arithmetic)
    out = _out_bound(rows, weights, sums, arithmetic)
    lse = _lse_bound(weights, sums, arithmetic, lse_includes_sink)
    # Not a number: infinite logits or errors, about which nothing can be said.
    out, lse = (x.nan_to_num(nan=math.inf, posinf=math.inf) for x in (out, lse))
    return Judged(logits, weights, rounding, sums.value_cast, out, lse)


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits of one block and their errors, all [m, r, n].

    value: -inf where a key has no weight. error: bound on all of the error. width, systematic: the part of the error
    that roundings of this key alone make has mean 0 and this half-width (as `growth.scatter` has it), what is left is
    at most `systematic`. alike: a half-width more, if what keys share is summed: elements of keys that are equal in a
    dimension have the same product with the query, and it is rounded the same way.
    """

    value: Tensor
    error: Tensor
    width: Tensor
    systematic: Tensor
    alike: Tensor


def logits_of(rows: Rows, a: Arithmetic, chance: bool) -> Logits:
    """The logits of a block. chance: width and systematic too.

    Errors of casting the query, of scales and of descales act on all keys alike.
    """
    p = a.precision
    q = rows.q * rows.q_factor
    s = (q @ rows.k.transpose(1, 2)).mul_(rows.k_factor)
    q_size, k_factor = q.abs(), rows.k_factor.abs()
    fixed: Tensor | float = 0.0
    if a.q_cast is not None:
        moved = _cast_error(rows.q, a.q_cast, a) * rows.q_factor.abs()
        fixed = _product_sums(moved, rows, 1) * k_factor
        q_size = q_size + moved
    size = _product_sums(q_size, rows, 1).mul_(k_factor)
    key_error, moved_keys = _key_cast_error(rows, a), torch.zeros(())
    if key_error is not None:
        moved_keys = q_size @ key_error.transpose(1, 2)
        fixed, size = fixed + moved_keys, size + moved_keys
    terms = torch.tensor(float(rows.q.shape[2]), dtype=torch.float64)
    product = 0.0 if a.product is None else a.product.unit_roundoff
    relative = compound(product, float(contraction(p.qk, terms)), p.scale_error, _DESCALE * UNIT)
    smallest = 2 * a.tiny + (0.0 if a.product is None else a.absolute(a.product))
    unit_of_product = rows.q_factor.abs() * k_factor
    # No rounding of a product, be it to zero, errs by more than the product.
    fixed = torch.minimum((1 + unit_of_product) * (2 * rows.q.shape[2] * smallest), 4 * size).add_(fixed)
    error = (size * relative).add_(fixed)
    width, systematic, alike = (torch.zeros((), device=s.device) for _ in range(3))
    if chance:
        spread, bias = (float(x) for x in scatter(p.qk, terms))
        width = size * spread
        if product:
            square = _product_sums(q_size, rows, 2).mul_((k_factor * product).square())
            # Products of keys that were cast: at most their own size more.
            width = width.square_().add_(square).sqrt_().add_(moved_keys * product)
            alike = _shared_products(q_size, rows, moved_keys if key_error is not None else None) * product
        width.mul_(1 + relative)
        systematic = (size * compound(bias, p.scale_error, _DESCALE * UNIT)).add_(fixed)
        systematic = _round_logit(s, systematic, 1 + unit_of_product, a)
    error = _round_logit(s, error, 1 + unit_of_product, a)
    largest = min(a.logit.max, FP32.max, FP32.max if a.product is None else a.product.max)
    # Products are formed before scaling, or of scaled queries: either may underflow or overflow.
    error.masked_fill_(size > largest * unit_of_product.clamp(max=1.0), math.inf)
    if rows.soft_cap is not None:
        if chance:
            slope = 1 - ((s.abs() - error).clamp_(min=0.0) / rows.soft_cap).tanh_().square_()
            width, alike = width * slope, alike * slope
            capped, systematic = _soft_cap(s, systematic, rows.soft_cap, p.tanh_error)
            systematic = _round_logit(capped, systematic, 1 + unit_of_product, a)
        s, error = _soft_cap(s, error, rows.soft_cap, p.tanh_error)
        error = _round_logit(s, error, 1 + unit_of_product, a)
    error.masked_fill_((s.abs() + error) * _LOG2E > a.logit.max, math.inf)
    s.masked_fill_(rows.hidden, -math.inf)
    absent = s == -math.inf
    error.masked_fill_(absent, 0.0)
    if chance:
        width.masked_fill_(absent, 0.0)
        systematic.masked_fill_(absent, 0.0)
        alike = alike.expand_as(s).masked_fill(absent, 0.0)
    return Logits(s, error, width, systematic, alike)


def _shared_products(q_size: Tensor, rows: Rows, moved_keys: Tensor | None) -> Tensor:
    """sqrt(sum over the dimensions of m (q k)^2), m other keys having the same product: all, once keys are cast.

    moved_keys: what their cast adds to the sum of |q k|, or None.
    """
    k_factor = rows.k_factor.abs()
    if moved_keys is None:
        return _product_sums(q_size, rows, 2, equal_elements(rows.k)).sqrt_().mul_(k_factor)
    others = math.sqrt(rows.k.shape[1] - 1)
    return _product_sums(q_size, rows, 2).sqrt_().mul_(k_factor).add_(moved_keys).mul_(others)


def equal_elements(k: Tensor) -> Tensor:
    """How many other keys have this element in this dimension: float32 like k [m, n, d].

    Counted by hashing float32 into few buckets, so never too few.
    """
    bits = 1 + max(1, k.shape[1] - 1).bit_length()
    hashed = (k.transpose(1, 2).to(torch.float32) + 0.0).contiguous().view(torch.int32) * _ODD
    bucket = (hashed >> (32 - bits)).bitwise_and_((1 << bits) - 1).long()
    counts = torch.zeros(*bucket.shape[:-1], 1 << bits, device=k.device)
    counts.scatter_add_(-1, bucket, torch.ones((), device=k.device).expand_as(bucket))
    return counts.gather(-1, bucket).sub_(1).transpose(1, 2)


def multiplicity(x: Tensor) -> Tensor:
    """How many numbers of x [..., n] along the last axis are the same, at least 1, -inf aside; int32 like x.

    Counted by hashing float32, so never too few.
    """
    bits = (x + 0.0).to(torch.float32).view(torch.int32).long()
    size = 4 + max(1, x.shape[-1] - 1).bit_length()
    bucket = bits.mul_(0x9E3779B1).bitwise_and_(0xFFFFFFFF).bitwise_right_shift_(32 - size)
    present = (x > -math.inf).to(torch.int32)
    counts = torch.zeros(*x.shape[:-1], 1 << size, device=x.device, dtype=torch.int32)
    return counts.scatter_add_(-1, bucket, present).gather(-1, bucket).clamp_(min=1)


def _product_sums(q: Tensor, rows: Rows, power: int, times: Tensor | None = None) -> Tensor:
    """Bounds on the sums over the dimensions of times (q |k|)^power, for q [m, r, d] >= 0: float64 [m, r, n].

    times: [m, n, d], by default 1.
    """
    work = rows.k_size.dtype
    unit = q.amax(-1, keepdim=True).clamp_(min=2.0**-500)
    k = rows.k_size if power == 1 else rows.k_size.square()
    k = k if times is None else k * times
    sums = ((q / unit).pow_(power).to(work) @ k.transpose(1, 2)).double()
    terms = q.shape[2]
    lost = terms * FLOOR if work is torch.float32 else 0.0
    return sums.mul_(1 + slack_of(terms, work)).add_(lost).mul_((unit * rows.k_unit) ** power)


def _cast_error(x: Tensor, fmt: Format, a: Arithmetic) -> Tensor:
    """Bound on the error of casting x to fmt: 0 where fmt holds x, inf beyond its range."""
    error = torch.clamp(x.abs() * fmt.unit_roundoff, min=a.absolute(fmt))
    error.masked_fill_(widen(round_to(x, fmt.dtype)) == x, 0.0)
    return error.masked_fill_(x.abs() > fmt.max, math.inf)


def _key_cast_error(rows: Rows, a: Arithmetic) -> Tensor | None:
    """Bound on the error [m, n, d] of casting descaled keys; None where they are exact, or not cast."""
    if a.kv_cast is None or (rows.k_stored is not None and holds(a.kv_cast, rows.k_stored)):
        return None
    return _cast_error(rows.k * rows.k_factor.transpose(1, 2), a.kv_cast, a)


def _values_as_stored(rows: Rows, a: Arithmetic) -> bool:
    """Whether values are used as they are stored: not cast, or to a format that holds them."""
    return a.kv_cast is None or (rows.v_stored is not None and holds(a.kv_cast, rows.v_stored))


def _value_cast_error(rows: Rows, a: Arithmetic, size: Tensor, weight: Tensor) -> Tensor | float:
    """Bound on what casting descaled values does to the numerator. size: sum of w |v|, weight: sum of w.

    Values that are alike round alike: nothing averages out.
    """
    fmt = a.kv_cast
    if fmt is None or _values_as_stored(rows, a):
        return 0.0
    error = size * fmt.unit_roundoff + weight * a.absolute(fmt)
    return error.masked_fill(rows.reach > fmt.max, math.inf)


def _round_logit(s: Tensor, error: Tensor, units: Tensor, a: Arithmetic) -> Tensor:
    """Errors once the logits, scaled or not, are held in their dtype."""
    u, near = a.logit.unit_roundoff, s.abs().add_(error)
    return torch.minimum(a.absolute(a.logit) * units, near).add_(error * (1 + u)).add_(s.abs(), alpha=u)


def _soft_cap(s: Tensor, error: Tensor, cap: float, tanh_error: float) -> tuple[Tensor, Tensor]:
    """Capped logits and their errors: the cap is monotone, so the ends of the error interval bound it."""
    error = error + s.abs() * (_CAP * UNIT)
    capped = (s / cap).tanh().mul_(cap)
    up = ((s + error) / cap).tanh().mul_(cap).sub_(capped)
    down = capped - ((s - error) / cap).tanh().mul_(cap)
    return capped, torch.maximum(up, down).add_(capped.abs() * (_CAP * UNIT)).add_(cap * (tanh_error + 2.0**-50))


@dataclass(frozen=True, eq=False)
class Weights:
    """Softmax weights and the errors of their logarithms, over all n keys; columns [m, r, 1] belong to rows.

    exact: bool, where the weight before normalisation is 1 exactly, whatever the exponential: the logit is 0, without
    error, and no other exceeds it. integer: bool, of rows where all are, and sums of values are sums of integers that
    the accumulator holds.
    p: of the visible keys without the sink, summing to 1. excess, deficit: p (e^eps - 1) and p (1 - e^-eps).
    depth: how far below the row's maximum a logit may be when its weight is formed, errors included.
    share: what the sink leaves, exp(lse) / (exp(lse) + exp(sink)). sink, sink_excess, sink_deficit: the
    sink's own weight and errors; 0 without one. top: the maximum, the sink included. lse: sink excluded.
    """

    exact: Tensor
    integer: Tensor
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
    def of(rows: Rows, a: Arithmetic, s: Tensor, logit_error: Tensor) -> Weights:
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
        error = exponential(size, below, top, logit_error, a)
        peak = (s + logit_error).amax(-1, keepdim=True).sub_(largest)
        exact = (size + below + logit_error + peak <= _NOTHING) & a.exact_at_zero
        error.masked_fill_(exact, 0.0)
        highest = (s + error).amax(-1, keepdim=True).sub_(largest).clamp_(min=0.0)
        # What a weight is formed against: without the sink, unless that may come first.
        first = largest if a.precision.sink_first is False else top
        depth = (first - s).masked_fill_(no_weight, 0.0).add_(error).add_(highest)
        error += (a.rescales * a.exp_error) * ~exact
        error += _merge_error(size, below, top, full_lse, a)
        error.masked_fill_(no_weight, 0.0)
        sink = sink_error = torch.zeros_like(lse)
        if rows.sinks is not None:
            sink = (rows.sinks - full_lse).exp_()
            size, below = rows.sinks.abs(), top - rows.sinks
            sink_error = exponential(size, below, top, torch.zeros_like(sink), a)
            sink_error = sink_error + a.rescales * a.exp_error + _merge_error(size, below, top, full_lse, a)
        all_exact = (exact | no_weight).all(-1, keepdim=True)
        return Weights(
            exact=exact,
            integer=all_exact & (a.count * rows.values.levels <= a.exact_integers) & _values_as_stored(rows, a),
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


def exponential(size: Tensor, below: Tensor, top: Tensor, logit_error: Tensor, a: Arithmetic) -> Tensor:
    """Error of the logarithm of exp(s - top), formed in one step or in several, whose sizes add up."""
    k = a.precision.exp_argument_roundings
    error = (logit_error * 2).add_(size).add_(below).mul_(k * UNIT).add_(logit_error)
    return error.add_(torch.maximum(size, top.abs()), alpha=2 * UNIT).add_(a.exp_error)


def _merge_error(size: Tensor, below: Tensor, top: Tensor, full_lse: Tensor, a: Arithmetic) -> Tensor | float:
    """Error of the logarithms of the weights that partial results are merged with, one after the other."""
    if not a.merges:
        return 0.0
    return merge_level(size, below, top, full_lse, a) + sum(a.merges) * (a.exp_error + 2 * UNIT)


def merge_level(size: Tensor, below: Tensor, top: Tensor, full_lse: Tensor, a: Arithmetic) -> Tensor:
    """That error, of partial results that are merged at once.

    A partial result that holds the key has a log-sum-exp between the key's logit and that of the whole row.
    """
    k = a.precision.exp_argument_roundings
    largest = torch.maximum(size, torch.maximum(top.abs(), full_lse.abs()))
    return (a.log_error(below) + largest * ((_LSE + 2 * k) * UNIT)) * len(a.merges)


def _p_rounding(weights: Weights, a: Arithmetic) -> Tensor:
    """Bound eta [m, r, n] on the relative error of casting weights for the second product.

    A weight is formed against a running maximum, between its own logit and the row's largest: at most 1, and
    at least exp(-depth). Rounded to nearest it moves no farther than to 1, if the format holds that (or its scale).
    """
    p, fmt = a.precision, a.p
    if fmt is None:
        return torch.zeros((), dtype=torch.float64, device=weights.p.device)
    if p.p_scale > fmt.max * (1 + fmt.unit_roundoff / 2):
        return torch.full_like(weights.p, math.inf)
    directed = 2.0 if p.p_rounding is Rounding.TOWARD_ZERO else 1.0
    depth = weights.depth + (weights.full_lse - weights.top) if p.p_normalised else weights.depth
    error = depth.exp().mul_(a.absolute(fmt) / p.p_scale)
    error.clamp_(min=fmt.unit_roundoff).mul_(directed)
    scale = torch.tensor(p.p_scale, dtype=torch.float64)
    if not p.p_normalised and bool(widen(round_to(scale, fmt.dtype)) == scale):
        error.masked_fill_(weights.exact, 0.0)
        if p.p_rounding is Rounding.NEAREST_EVEN:
            error = torch.minimum(error, weights.depth.expm1())
    error.clamp_(max=1.0)
    return error if p.p_scale == 1 else error.add_(2 * UNIT)


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over the keys: spread, rounded, size [m, r, e]; excess, deficit, weight, common [m, r, 1].

    spread: sum of p (e^eps - 1) |v - o|. rounded, value_cast: what casting weights and values does to the numerator.
    size: sum of p e^eps (1 + eta) |v|. excess, deficit: of the weights. weight: sum of p e^eps (1 + eta).
    common: what casting weights does to the denominator. o: with the sink.
    """

    spread: Tensor
    rounded: Tensor
    value_cast: Tensor | float
    size: Tensor
    excess: Tensor
    deficit: Tensor
    weight: Tensor
    common: Tensor
    out: Tensor

    @staticmethod
    def of(rows: Rows, weights: Weights, rounding: Tensor, a: Arithmetic) -> Sums:
        out, in_sum = rows.out, a.precision.row_sum_of_rounded_p
        if a.p is None:
            excess, plain = rows.values.sums(weights.excess, weights.p)
            size, rounded, cast = plain.size + excess.size, torch.zeros_like(out), torch.zeros_like(excess.total)
        else:
            moved = (weights.p + weights.excess).mul_(rounding)
            excess, plain, moving = rows.values.sums(weights.excess, weights.p, moved)
            size, rounded, cast = plain.size + excess.size + moving.size, moving.size, moving.total
            if in_sum is not False:
                spread = moving.spread(out)
                rounded = spread if in_sum else torch.maximum(spread, rounded)
        weight = 1 + excess.total + cast
        value_cast = _value_cast_error(rows, a, size, weight)
        return Sums(
            spread=excess.spread(out),
            rounded=rounded,
            value_cast=value_cast,
            size=size + value_cast,
            excess=excess.total,
            deficit=weights.deficit.sum(-1, keepdim=True),
            weight=weight,
            common=torch.zeros_like(cast) if in_sum is False else cast,
            out=out,
        )


def _out_bound(rows: Rows, weights: Weights, sums: Sums, a: Arithmetic) -> Tensor:
    o = sums.out.abs()
    numerator, denominator = _sum_errors(weights, a)
    partial, partial_absolute = partial_rounding(rows, a)
    linear = compound(numerator, partial)
    denominator = denominator + normalisation(weights, a)
    steps = rows.count * (a.rescales + 2) + sum(a.merges) + 8
    underflow = a.tiny * steps * (1 + rows.reach) + partial_absolute * 2
    error = (
        weights.share * (sums.spread + sums.rounded + sums.value_cast + linear * sums.size) + weights.sink_excess * o
    )
    total = weights.share * sums.weight + weights.sink + weights.sink_excess
    error = error + denominator * total * o + underflow
    least = 1 - weights.share * (sums.deficit + sums.common) - weights.sink_deficit
    least = least * (1 - denominator - a.tiny * steps)
    return torch.where(least > 0, error / least, math.inf)


def _sum_errors(weights: Weights, a: Arithmetic) -> tuple[Tensor, Tensor]:
    """Relative errors [m, r, 1] of accumulating numerators, and of the row sum."""
    p = a.precision
    levels = sum(a.merges) + MERGE * len(a.merges)
    inexact = ~weights.integer
    rescales = a.rescales * inexact
    values = contraction(p.pv, a.count, a.rescales + 1).masked_fill(weights.integer, 0.0)
    numerator = compound(values, gamma(2 * rescales + 1 + DIVISION + levels))
    row_sum = gamma(a.count).masked_fill(weights.integer, 0.0)
    if p.row_sum_of_rounded_p is not False:
        # Rounded weights may be summed by the matrix unit, as one more column of the values.
        row_sum = torch.maximum(row_sum, values)
    return torch.as_tensor(numerator), torch.as_tensor(compound(row_sum, gamma(2 * rescales + MERGE + levels)))


def partial_rounding(rows: Rows, a: Arithmetic) -> tuple[Tensor, float]:
    """Relative error [m, r, e] of storing partial results, and the absolute one below the normal range.

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


def normalisation(weights: Weights, a: Arithmetic) -> Tensor | float:
    """Error of normalising by exp(lse_i - lse) in merges: that of the log-sum-exp."""
    if not a.merges:
        return 0.0
    size = torch.maximum(weights.full_lse.abs(), weights.top.abs())
    k = a.precision.exp_argument_roundings
    level = a.log_error((weights.full_lse - weights.top).abs()) + size * ((_LSE + 2 * k) * UNIT) + a.exp_error
    return (level * len(a.merges)).expm1()


def _lse_bound(weights: Weights, sums: Sums, a: Arithmetic, includes_sink: bool) -> Tensor:
    """[m, r, 1]. The logarithm of the sum's relative error, and the error of the logarithm itself."""
    _, denominator = _sum_errors(weights, a)
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
    return torch.maximum(above, below) + final_lse_error(weights, lse, a)


def final_lse_error(weights: Weights, lse: Tensor, a: Arithmetic) -> Tensor:
    """Error of the logarithm of the sum, and of adding the maximum to it."""
    size = torch.maximum(lse.abs(), weights.top.abs())
    return a.log_error((lse - weights.top).abs()) + size * (_LSE * UNIT)
