"""Worst-case errors of merging partial attention states. There is no probable bound: states are few, and of up to a
dozen independent roundings a probable sum is no less than the worst one.

With L the merged log-sum-exp, the weight of state i is w_i = exp(lse_i - L). A kernel computes its exponent and
its exponential with relative error 1 + e_i, and normalises by a sum, or through a rounded L, with error 1 + z:

    |out' - out| <= sum_i w_i |o_i| ((1 + e_i) / (1 - z) - 1)  +  roundings of the weighted states and of their sum
    |lse' - lse| <= -ln(1 - sum_i w_i e_i)  +  errors of the logarithm and of adding the maximum
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.budget.bounds import Bounds
from oracle.budget.formats import format_named
from oracle.budget.growth import UNIT
from oracle.kinds import LseBase
from oracle.precision import Precision

_PRODUCT = 4
"""Roundings of the product of a state with its weight, and of dividing by the sum of weights."""
_FINAL = 4
"""Roundings of adding the maximum to the logarithm, and of a change of base."""
_TINY = 2.0**-126
"""Smallest normal float32: what flushing a result to zero can cost."""


def merge_bounds(
    outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, precision: Precision, base: LseBase = LseBase.NATURAL
) -> Bounds:
    """Bound the rounding errors of a kernel that merges states and keeps to ``precision``.

    outs float64 [N, T, H, D] and lses float64 [N, T, H] are the states, out [T, H, D] and lse [T, H] their merge in
    float64; both log-sum-exps, and the bound on the merged one, are in ``base``. Fields read: exp_error,
    exp_argument_roundings, log_error, rank_dtype, reduce_dtype, flush_subnormals. Empty states contribute nothing,
    whatever they hold; a row of empty states has the bound 0.
    """
    count = outs.shape[0]
    unit = math.log(2.0) if base is LseBase.TWO else 1.0
    full = lses > -math.inf
    outs = outs.masked_fill(~full.unsqueeze(-1), 0.0)
    top = lses.amax(0).masked_fill(~full.any(0), 0.0)
    whole = lse.masked_fill(~full.any(0), 0.0)
    sizes = lses.masked_fill(~full, 0.0)
    weights = ((sizes - whole) * unit).exp().masked_fill(~full, 0.0)
    roundings = precision.exp_argument_roundings * UNIT * unit
    spread = (sizes - top).abs() + top.abs()
    power = torch.expm1(roundings * spread + precision.exp_error + (count + 1) * UNIT) * full
    total = (weights * power).sum(0)
    log_size = ((whole - top) * unit).abs().clamp(min=1.0)
    log_part = precision.log_error * log_size + _FINAL * UNIT * unit * (whole.abs() + top.abs())
    lse_bound = (-torch.log1p(-total) + log_part) / unit
    # Weights come from dividing by the sum, or from the difference to a rounded log-sum-exp.
    argument = roundings * ((sizes - whole).abs() + whole.abs()) + log_part
    direct = torch.expm1(argument + precision.exp_error + (count + _PRODUCT) * UNIT) * full
    error = (1 + power) * (1 + direct) / (1 - total) - 1
    magnitude = weights.unsqueeze(-1) * outs.abs()
    bound = (magnitude * error.unsqueeze(-1)).sum(0)
    bound = bound + _narrow(magnitude, precision.rank_dtype, 1) + _narrow(magnitude, precision.reduce_dtype, count - 1)
    reach = (outs.abs() * full.unsqueeze(-1)).amax(0)
    if precision.flush_subnormals:
        bound = bound + count * _TINY * (1 + reach)
    empty = ~full.any(0)
    return Bounds(
        out=bound.masked_fill(empty.unsqueeze(-1), 0.0),
        lse=lse_bound.masked_fill(empty, 0.0),
        reach=reach,
        keys=torch.ones(outs.shape[1], dtype=torch.int64, device=outs.device),
    )


def _narrow(magnitude: Tensor, dtype: str, roundings: int) -> Tensor:
    """What rounding every weighted state ``roundings`` times to ``dtype`` can cost, summed over the states."""
    narrow = format_named(dtype, "fp32")
    grown = math.expm1(roundings * math.log1p(narrow.unit_roundoff))
    return magnitude.sum(0) * grown + roundings * len(magnitude) * narrow.half_subnormal
