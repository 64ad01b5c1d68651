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
from functools import cache

import torch
from torch import Tensor

from oracle.budget.arithmetic import Arithmetic
from oracle.budget.blocks import FLOOR, Rows, slack_of
from oracle.budget.formats import FP32, Format, holds
from oracle.budget.growth import UNIT, compound, contraction, scatter
from oracle.precision import MatrixUnit, Rounding
from oracle.rounding import round_to, widen

_LOG2E = math.log2(math.e)
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
    underflow: Tensor
    """of the numerator, and of partial results: [m, r, e]"""
    log: LogErrors
    out: Tensor
    lse: Tensor


def bound_rows(rows: Rows, arithmetic: Arithmetic, lse_includes_sink: bool, chance: bool = False) -> Judged:
    """Bounds on the errors of out [m, r, e] and lse [m, r, 1] before they are rounded to their dtypes.

    chance: with what the probable bound needs.
    """
    logits = logits_of(rows, arithmetic, chance)
    weights = Weights.of(rows, arithmetic, logits)
    rounding = _p_rounding(weights, arithmetic)
    sums = Sums.of(rows, weights, rounding, arithmetic)
    lost = underflow(rows, arithmetic)
    log = LogErrors.of(rows, logits, weights, weights.full_lse if lse_includes_sink else weights.lse, arithmetic)
    out = _out_bound(rows, weights, sums, arithmetic, lost)
    lse = _lse_bound(rows, weights, sums, arithmetic, lse_includes_sink, log)
    # Not a number: infinite logits or errors, about which nothing can be said.
    out, lse = (x.nan_to_num(nan=math.inf, posinf=math.inf) for x in (out, lse))
    return Judged(logits, weights, rounding, sums.value_cast, lost, log, out, lse)


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits of one block and their errors, all [m, r, n].

    value: -inf where a key has no weight, which absent says. error: bound on all of the error. width, systematic: the
    part of the error that roundings of this key alone make has mean 0 and this half-width (as `growth.scatter` has it),
    what is left is at most `systematic`. alike: a half-width more, if what keys share is summed: elements of keys that
    are equal in a dimension have the same product with the query, and it is rounded the same way; None: nothing is.
    coherent: [m, r, n | 1], a half-width more, if values follow what keys share, as they may in one dimension.
    """

    value: Tensor
    absent: Tensor
    error: Tensor
    width: Tensor
    systematic: Tensor
    alike: Tensor | None
    coherent: Tensor | None


def logits_of(rows: Rows, a: Arithmetic, chance: bool) -> Logits:
    """The logits of a block. chance: width, systematic and alike too.

    Errors of casting the query, of scales and of descales act on all keys alike.
    """
    p, terms = a.precision, rows.q.shape[2]
    q = rows.q * rows.q_factor
    s = q @ rows.k.transpose(1, 2)
    q_size = q.abs()
    unit_of_product = rows.q_factor.abs()
    if rows.k_factor is not None:
        s.mul_(rows.k_factor)
        unit_of_product = unit_of_product * rows.k_factor.abs()
    cast_query = None
    if a.q_cast is not None:
        moved = _cast_error(rows.q, a.q_cast, a) * rows.q_factor.abs()
        cast_query = _product_sums(moved, rows, 1)
        q_size = q_size + moved
    size = _product_sums(q_size, rows, 1)
    key_error, moved_keys = _key_cast_error(rows, a), None
    if key_error is not None:
        moved_keys = q_size @ key_error.transpose(1, 2)
        size = size + moved_keys
    product = 0.0 if a.product is None else a.product.unit_roundoff
    relative = float(compound(product, _of_terms(p.qk, terms)[0], p.scale_error, _DESCALE * UNIT))
    smallest = 2 * a.tiny + (0.0 if a.product is None else a.absolute(a.product))
    units = 1 + unit_of_product
    units_of_logit = units * a.absolute(a.logit)
    # No rounding of a product, be it to zero, errs by more than the product.
    fixed = torch.minimum(units * (2 * terms * smallest), 4 * size)
    for shared in (cast_query, moved_keys):
        if shared is not None:
            fixed += shared
    s_size = s.abs()
    error = _round_logit(s_size, torch.add(fixed, size, alpha=relative), units_of_logit, a)
    largest = min(a.logit.max, FP32.max, FP32.max if a.product is None else a.product.max)
    # Products are formed before scaling, or of scaled queries: either may underflow or overflow.
    error.masked_fill_(size > unit_of_product.clamp(max=1.0) * largest, math.inf)
    width = systematic = torch.zeros((), dtype=s.dtype, device=s.device)
    alike = coherent = None
    if chance:
        _, spread, bias = _of_terms(p.qk, terms)
        shift = float(compound(bias, p.scale_error, _DESCALE * UNIT))
        systematic = _round_logit(s_size, fixed.add_(size, alpha=shift), units_of_logit, a)
        moved_key = None if key_error is None else key_error.amax(1, keepdim=True)
        width, alike, coherent = _scattered(q_size, size, spread, product, moved_keys, moved_key, rows)
        width.mul_(1 + relative)
    if rows.soft_cap is not None:
        if chance:
            slope = 1 - ((s_size - error).clamp_(min=0.0) / rows.soft_cap).tanh_().square_()
            width = width * slope
            alike, coherent = (None if x is None else x * slope for x in (alike, coherent))
            capped, systematic = _soft_cap(s, systematic, rows.soft_cap, p.tanh_error)
            systematic = _round_logit(capped.abs(), systematic, units_of_logit, a)
        s, error = _soft_cap(s, error, rows.soft_cap, p.tanh_error)
        s_size = s.abs()
        error = _round_logit(s_size, error, units_of_logit, a)
    error.masked_fill_(s_size + error > a.logit.max / _LOG2E, math.inf)
    if rows.hidden is not None:
        s.masked_fill_(rows.hidden, -math.inf)
    absent = s == -math.inf
    for x in (error, *((width, systematic) if chance else ()), *(() if alike is None else (alike,))):
        x.masked_fill_(absent, 0.0)
    return Logits(s, absent, error, width, systematic, alike, coherent)


def _scattered(
    q_size: Tensor,
    size: Tensor,
    spread: float,
    product: float,
    moved_keys: Tensor | None,
    moved_key: Tensor | None,
    rows: Rows,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`Logits.width`, `Logits.alike` and `Logits.coherent`, of sums that scatter by `spread` and of products rounded by
    `product`.

    moved_keys, moved_key: how far casts of the keys move logits [m, r, n], and elements [m, 1, d]; None: no casts.
    Values that follow the keys follow all dimensions together, if those are independent, no more than one alone: of
    what keys share, that in which it is most counts.
    """
    if not product:
        return size * spread, None, None
    k_square = rows.k_size.square()
    square = _product_sums(q_size, rows, 2, k_square)
    factor = 1.0 if rows.k_factor is None else rows.k_factor.abs()
    if moved_keys is None or moved_key is None:
        tied = k_square.mul_(equal_elements(rows.k))
        alike = _product_sums(q_size, rows, 2, tied).sqrt_().mul_(product)
        most = tied.amax(1, keepdim=True).sqrt_().double() * rows.k_unit
    else:
        # Once keys are cast, all may have the same product.
        others = math.sqrt(rows.k.shape[1] - 1)
        alike = square.sqrt().add_(moved_keys).mul_(others * product)
        most = rows.k_size.amax(1, keepdim=True).double() * rows.k_unit
        if isinstance(factor, Tensor):
            most, factor = most * factor.amax(-1, keepdim=True), 1.0
        most = (most + moved_key) * others
    coherent = (q_size * most).amax(-1, keepdim=True) * (factor * product)
    width = square.mul_(product**2).addcmul_(size, size, value=spread**2).sqrt_()
    # Products of keys that were cast: at most their own size more.
    return (width if moved_keys is None else width.add_(moved_keys, alpha=product)), alike, coherent


@cache
def _of_terms(unit: MatrixUnit, terms: int) -> tuple[float, float, float]:
    """`contraction` and `scatter` of so many terms."""
    count = torch.tensor(float(terms), dtype=torch.float64)
    width, bias = scatter(unit, count)
    return float(contraction(unit, count)), float(width), float(bias)


def equal_elements(k: Tensor) -> Tensor:
    """How many other keys have this element in this dimension: float32 like k [m, n, d].

    Counted by hashing float32 into few buckets, so never too few.
    """
    bits = 1 + max(1, k.shape[1] - 1).bit_length()
    hashed = torch.empty(k.transpose(1, 2).shape, dtype=torch.float32, device=k.device)
    # Zeros of either sign are equal.
    torch.add(k.transpose(1, 2), 0.0, out=hashed)
    bucket = hashed.view(torch.int32).mul_(_ODD).bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1).long()
    counts = torch.zeros(*bucket.shape[:-1], 1 << bits, device=k.device)
    counts.scatter_add_(-1, bucket, torch.ones((), device=k.device).expand_as(bucket))
    return counts.gather(-1, bucket).sub_(1).transpose(1, 2)


def multiplicity(x: Tensor) -> Tensor:
    """How many numbers of x [..., n] along the last axis are the same, at least 1, -inf aside; int32 like x.

    Counted by hashing float32, so never too few.
    """
    bits = torch.add(x, 0.0, out=torch.empty(x.shape, dtype=torch.float32, device=x.device)).view(torch.int32).long()
    size = 4 + max(1, x.shape[-1] - 1).bit_length()
    bucket = bits.mul_(0x9E3779B1).bitwise_and_(0xFFFFFFFF).bitwise_right_shift_(32 - size)
    present = (x > -math.inf).to(torch.int32)
    counts = torch.zeros(*x.shape[:-1], 1 << size, device=x.device, dtype=torch.int32)
    return counts.scatter_add_(-1, bucket, present).gather(-1, bucket).clamp_(min=1)


def _product_sums(q: Tensor, rows: Rows, power: int, k_power: Tensor | None = None) -> Tensor:
    """Bounds on the sums over the dimensions of (q |k|)^power, times |k_factor|^power, for q [m, r, d] >= 0: float64
    [m, r, n].

    k_power: other factors than (|k| / k_unit)^power, [m, n, d] in the dtype of sums.
    """
    k = rows.k_size if k_power is None else k_power
    work, terms, factor = k.dtype, q.shape[2], rows.k_unit**power
    if work is torch.float64:
        sums = (q if power == 1 else q**power) @ k.transpose(1, 2)
        sums.mul_((1 + slack_of(terms, work)) * factor)
    else:
        unit = q.amax(-1, keepdim=True).clamp_(min=2.0**-500)
        sums = ((q / unit).pow_(power).to(work) @ k.transpose(1, 2)).double()
        sums.mul_(1 + slack_of(terms, work)).add_(terms * FLOOR).mul_(unit**power * factor)
    return sums if rows.k_factor is None else sums.mul_(rows.k_factor.abs() ** power)


def _cast_error(x: Tensor, fmt: Format, a: Arithmetic) -> Tensor:
    """Bound on the error of casting x to fmt: 0 where fmt holds x, inf beyond its range."""
    error = torch.clamp(x.abs() * fmt.unit_roundoff, min=a.absolute(fmt))
    error.masked_fill_(widen(round_to(x, fmt.dtype)) == x, 0.0)
    return error.masked_fill_(x.abs() > fmt.max, math.inf)


def _key_cast_error(rows: Rows, a: Arithmetic) -> Tensor | None:
    """Bound on the error [m, n, d] of casting descaled keys; None where they are exact, or not cast."""
    if a.kv_cast is None or (rows.k_stored is not None and holds(a.kv_cast, rows.k_stored)):
        return None
    return _cast_error(rows.k if rows.k_factor is None else rows.k * rows.k_factor.transpose(1, 2), a.kv_cast, a)


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


def _round_logit(size: Tensor, error: Tensor, least: Tensor, a: Arithmetic) -> Tensor:
    """Errors once the logits, scaled or not, are held in their dtype. size: of the logits, [m, r, n]; least: the
    absolute error of their dtype, in units of them.
    """
    u = a.logit.unit_roundoff
    rounding = torch.minimum(least, size + error)
    return rounding.add_(error, alpha=1 + u).add_(size, alpha=u)


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

    size, below: of the logits, and how far they are below `top`; 0 where a key has no weight. exponential: the error of
    the logarithm of exp(s - top) that exact logits would have.
    exact: bool, where the weight before normalisation is 1 exactly, whatever the exponential: the logit is 0, without
    error, and no other exceeds it. all_exact: bool, of rows where all are. integer: of rows where, besides, sums of
    values are sums of integers that the accumulator holds; None if there are none.
    p: of the visible keys without the sink, summing to 1. excess: p (e^eps - 1). beneath: p (e^-eps - 1), of which
    deficit is the sum, its sign changed.
    depth: how far below the row's maximum a logit may be when its weight is formed, errors included.
    share: what the sink leaves, exp(lse) / (exp(lse) + exp(sink)); None without one. sink, sink_excess, sink_deficit:
    the sink's own weight and errors; 0 without one. top: the maximum, the sink included. lse: sink excluded.
    """

    size: Tensor
    below: Tensor
    exponential: Tensor
    exact: Tensor
    all_exact: Tensor
    integer: Tensor | None
    p: Tensor
    excess: Tensor
    beneath: Tensor
    deficit: Tensor
    depth: Tensor
    share: Tensor | None
    sink: Tensor
    sink_excess: Tensor
    sink_deficit: Tensor
    top: Tensor
    lse: Tensor
    full_lse: Tensor

    def left(self, x: Tensor) -> Tensor:
        """x times what the sink leaves."""
        return x if self.share is None else x * self.share

    @staticmethod
    def of(rows: Rows, a: Arithmetic, logits: Logits) -> Weights:
        s, no_weight, logit_error = logits.value, logits.absent, logits.error
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
        span = size + below
        own = exponential(span, size, top, a)
        error = of_exponential(own, logit_error, a)
        if a.exact_at_zero:
            peak = (s + logit_error).amax(-1, keepdim=True).sub_(largest)
            exact = span.add_(logit_error).add_(peak) <= _NOTHING
            error.masked_fill_(exact, 0.0)
        else:
            exact = torch.zeros_like(no_weight)
        highest = (s + error).amax(-1, keepdim=True).sub_(largest).clamp_(min=0.0)
        # What a weight is formed against: without the sink, unless that may come first.
        late = rows.sinks is not None and a.precision.sink_first is False
        depth = ((largest - s).masked_fill_(no_weight, 0.0) if late else below) + error
        depth += highest
        error += a.rescaling
        error.masked_fill_(exact, 0.0)
        if a.merges:
            error += _merge_error(size, below, top, full_lse, a)
        error.masked_fill_(no_weight, 0.0)
        all_exact = (exact | no_weight).all(-1, keepdim=True)
        integers = math.isfinite(rows.values.levels) and _values_as_stored(rows, a)
        excess = error.expm1().mul_(p)
        beneath = error.neg_().expm1_().mul_(p)
        share, sink, above, beneath = _sink(rows, a, lse, top, full_lse)
        return Weights(
            size=size,
            below=below,
            exponential=own,
            exact=exact,
            all_exact=all_exact,
            integer=all_exact & (a.count * rows.values.levels <= a.exact_integers) if integers else None,
            p=p,
            excess=excess,
            beneath=beneath,
            deficit=-beneath.sum(-1, keepdim=True),
            depth=depth,
            share=share,
            sink=sink,
            sink_excess=above,
            sink_deficit=beneath,
            top=top,
            lse=lse,
            full_lse=full_lse,
        )


def _sink(
    rows: Rows, a: Arithmetic, lse: Tensor, top: Tensor, full_lse: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """share, sink, sink_excess, sink_deficit of `Weights`."""
    if rows.sinks is None:
        none = torch.zeros_like(lse)
        return None, none, none, none
    weight, size, below = (rows.sinks - full_lse).exp_(), rows.sinks.abs(), top - rows.sinks
    error = exponential(size + below, size, top, a) + a.rescaling + _merge_error(size, below, top, full_lse, a)
    return (lse - full_lse).exp_(), weight, error.expm1() * weight, -(-error).expm1() * weight


def exponential(span: Tensor, size: Tensor, top: Tensor, a: Arithmetic) -> Tensor:
    """Error of the logarithm of exp(s - top), formed in one step or in several, whose sizes add up, for exact logits.

    span: of the sizes of s and of s - top.
    """
    error = span * (a.precision.exp_argument_roundings * UNIT)
    return error.add_(torch.maximum(size, top.abs()), alpha=2 * UNIT).add_(a.exp_error)


def of_exponential(own: Tensor, logit_error: Tensor, a: Arithmetic) -> Tensor:
    """The same for logits with an error. own: without."""
    return torch.add(own, logit_error, alpha=1 + 2 * a.precision.exp_argument_roundings * UNIT)


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
    depth = weights.depth + (weights.full_lse - weights.top) if p.p_normalised else weights.depth
    error = depth.exp().mul_(a.absolute(fmt) / p.p_scale)
    error.clamp_(min=fmt.unit_roundoff)
    if p.p_rounding is Rounding.TOWARD_ZERO:
        error.mul_(2.0)
    if not p.p_normalised and _is_held(p.p_scale, fmt.dtype):
        error.masked_fill_(weights.exact, 0.0)
        if p.p_rounding is Rounding.NEAREST_EVEN:
            error = torch.minimum(error, weights.depth.expm1())
    error.clamp_(max=1.0)
    return error if p.p_scale == 1 else error.add_(2 * UNIT)


@cache
def _is_held(number: float, dtype: torch.dtype) -> bool:
    """Whether a dtype holds a number."""
    exact = torch.tensor(number, dtype=torch.float64)
    return bool(widen(round_to(exact, dtype)) == exact)


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over the keys: spread, rounded, size [m, r, e]; excess, deficit, weight, common [m, r, 1].

    spread: sum of p (e^eps - 1) |v - o|. rounded, value_cast: what casting weights and values does to the numerator.
    size: sum of p e^eps (1 + eta) |v|. excess, deficit: of the weights. weight: sum of p e^eps (1 + eta).
    common, lost: what casting weights adds to the denominator at most, and takes from it. o: with the sink.
    """

    spread: Tensor
    rounded: Tensor
    value_cast: Tensor | float
    size: Tensor
    excess: Tensor
    deficit: Tensor
    weight: Tensor
    common: Tensor
    lost: Tensor
    out: Tensor

    @staticmethod
    def of(rows: Rows, weights: Weights, rounding: Tensor, a: Arithmetic) -> Sums:
        out, in_sum = rows.out, a.precision.row_sum_of_rounded_p
        none = torch.zeros((), dtype=out.dtype, device=out.device)
        moved = [] if a.p is None else [(weights.p + weights.excess).mul_(rounding)]
        sums = rows.values.sums(weights.excess, weights.p, *moved)
        spread, total = sums.spread(out), sums.total
        size = sums.size.sum(1)
        rounded, cast = (sums.size[:, 2], total[:, 2]) if moved else (none, none)
        if moved and in_sum is not False:
            rounded = spread[:, 2] if in_sum else torch.maximum(spread[:, 2], rounded)
        lost = none
        if moved and in_sum is not False:
            # A weight that errs downward is cast with an error of what is left of it. A cast that errs by more than
            # the weight, by float32's roundings of the scale, takes a little more.
            kept = (weights.p + weights.beneath).mul_(rounding)
            lost = torch.minimum(kept.sum(-1, keepdim=True).add_(cast, alpha=2.0**-22), cast)
        weight = 1 + total[:, 0] + cast
        value_cast = _value_cast_error(rows, a, size, weight)
        return Sums(
            spread=spread[:, 0],
            rounded=rounded,
            value_cast=value_cast,
            size=size + value_cast if isinstance(value_cast, Tensor) else size,
            excess=total[:, 0],
            deficit=weights.deficit,
            weight=weight,
            common=none if in_sum is False else cast,
            lost=lost,
            out=out,
        )


def _out_bound(rows: Rows, weights: Weights, sums: Sums, a: Arithmetic, lost: Tensor) -> Tensor:
    o = sums.out.abs()
    numerator, denominator = a.sum_errors(weights.integer)
    linear = torch.as_tensor(compound(numerator, partial_rounding(rows, a)[0]))
    if a.merges:
        denominator = denominator + normalisation(weights, a)
    total, deficit = weights.left(sums.weight), weights.left(sums.deficit + sums.lost)
    error = torch.addcmul(sums.spread, sums.size, linear) + sums.rounded
    if isinstance(sums.value_cast, Tensor):
        error += sums.value_cast
    error = weights.left(error)
    if rows.sinks is not None:
        total, deficit = total + weights.sink + weights.sink_excess, deficit + weights.sink_deficit
        error = torch.addcmul(error, weights.sink_excess, o)
    error = torch.addcmul(error, denominator * total, o).add_(lost)
    least = (1 - deficit) * (1 - denominator - a.underflow)
    return error.div_(least).masked_fill_(~(least > 0), math.inf)


def underflow(rows: Rows, a: Arithmetic) -> Tensor:
    """What underflow costs the numerator and partial results: [m, r, e]."""
    lost = a.underflow * (1 + rows.reach)
    return lost.add_(2 * partial_rounding(rows, a)[1]) if a.merges else lost


def partial_rounding(rows: Rows, a: Arithmetic) -> tuple[Tensor | float, float]:
    """Relative error [m, r, e] of storing partial results, and the absolute one below the normal range.

    Magnitudes of partial results, weighted, add up to at most the sum of p |v|. A rank casts its result, and
    its share of the whole; the shares are added in any order.
    """
    if not a.merges:
        return 0.0, 0.0
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


@dataclass(frozen=True, eq=False)
class LogErrors:
    """Of the log-sum-exp judged, [m, r, 1]: what underflow costs the row sum, relative to it; and the error of the
    logarithm of the sum, and of adding the maximum to it.
    """

    underflow: Tensor
    logarithm: Tensor

    @staticmethod
    def of(rows: Rows, logits: Logits, weights: Weights, lse: Tensor, a: Arithmetic) -> LogErrors:
        above = weights.top - lse
        lost = above.exp()
        if rows.sinks is not None:
            # Logits that err downward leave a sink, which does not err, so much farther above their sum.
            lost = torch.maximum(lost, (rows.sinks - lse + logits.error.amax(-1, keepdim=True)).exp_())
        size = torch.maximum(lse.abs(), weights.top.abs())
        lost.mul_(a.row_sum_underflow)
        return LogErrors(lost, a.log_error(above.abs_()).add_(size, alpha=_LSE * UNIT))


def _lse_bound(rows: Rows, weights: Weights, sums: Sums, a: Arithmetic, includes_sink: bool, log: LogErrors) -> Tensor:
    """[m, r, 1]. The logarithm of the sum's relative error, and the error of the logarithm itself."""
    _, denominator = a.sum_errors(weights.integer)
    denominator = denominator + log.underflow
    up, down = sums.excess + sums.common, sums.deficit + sums.lost
    if includes_sink and rows.sinks is not None:
        up = weights.left(up) + weights.sink_excess
        down = weights.left(down) + weights.sink_deficit
    above = up.log1p() + denominator.log1p()
    # log1p gives NaN beyond -1, which the caller reads as no bound.
    below = -(-down).log1p() - (-denominator).log1p()
    return torch.maximum(above, below).add_(log.logarithm)
