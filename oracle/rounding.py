"""Correct rounding from float64 to an output dtype, and acceptance intervals in that dtype.

Rounding to nearest is monotone: a result within `bound` of the exact value o, rounded to the output dtype,
lies between round(o - bound) and round(o + bound). So a bound on the error before the last rounding needs no
half-ulp of slack, and where it is far below the spacing of the dtype the comparison is with one value, exact.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from oracle.bits import bit_equal, bits
from oracle.fp8 import FORMAT_OF_DTYPE, Overflow, decode, encode

__all__ = ["bit_equal", "bits", "inside", "interval", "round_to", "widen"]

_FLOAT64_MANTISSA_BITS = 52
_FLOAT64_BIAS = 1023


@dataclass(frozen=True)
class _Binary:
    """An IEEE-like format: stored mantissa bits, exponents of the smallest and largest normal binade."""

    mantissa_bits: int
    min_exponent: int
    max_exponent: int


# torch narrows float64 to these through float32: two roundings, which differ from one near midpoints.
_NARROWED_HERE = {torch.float16: _Binary(10, -14, 15), torch.bfloat16: _Binary(7, -126, 127)}


def round_to(x: Tensor, dtype: torch.dtype, overflow: Overflow = Overflow.SATURATE) -> Tensor:
    """Float64 `x` as `dtype` (fp64, fp32, fp16, bf16 or fp8), rounded once, to nearest, ties to even.

    A new tensor of the same shape and device. Wide formats overflow to infinity; `overflow` is the rule for
    fp8. Raises TypeError for another source or target, ValueError for an infinity that the fp8 format lacks.
    """
    if x.dtype != torch.float64:
        raise TypeError(f"round_to takes float64, not {x.dtype}")
    if dtype in FORMAT_OF_DTYPE:
        return encode(x, FORMAT_OF_DTYPE[dtype], overflow).view(dtype)
    if dtype in _NARROWED_HERE:
        return _to_grid(x, _NARROWED_HERE[dtype]).to(dtype)
    if dtype in (torch.float32, torch.float64):
        return x.to(dtype, copy=True)
    raise TypeError(f"round_to does not know {dtype}")


def _to_grid(x: Tensor, fmt: _Binary) -> Tensor:
    """Round float64 to the values of `fmt`, its exponent unbounded above; the result converts exactly.

    Adding 2^52 ulps of the target, and taking them away, leaves a multiple of that ulp: the sum has room for
    nothing finer, and float64 addition rounds to nearest even.
    """
    magnitude = x.abs()
    exponent = magnitude.view(torch.int64) >> _FLOAT64_MANTISSA_BITS
    # Above the largest binade any spacing will do: the value overflows whatever becomes of its low bits.
    exponent.clamp_(fmt.min_exponent + _FLOAT64_BIAS, fmt.max_exponent + 1 + _FLOAT64_BIAS)
    exponent += _FLOAT64_MANTISSA_BITS - fmt.mantissa_bits
    shift = (exponent << _FLOAT64_MANTISSA_BITS).view(torch.float64)
    return magnitude.add_(shift).sub_(shift).copysign_(x)


def widen(values: Tensor) -> Tensor:
    """Exact float64 of `values` of any dtype that `round_to` produces; fp8 goes through `oracle.fp8`."""
    fmt = FORMAT_OF_DTYPE.get(values.dtype)
    return values.to(torch.float64) if fmt is None else decode(values, fmt)


def interval(
    expected: Tensor, bound: Tensor | float, dtype: torch.dtype, overflow: Overflow = Overflow.SATURATE
) -> tuple[Tensor, Tensor]:
    """Least and greatest value of `dtype` that a result within `bound` of float64 `expected` can round to.

    `bound` is absolute, broadcasts to the shape of `expected`, and may be inf, which accepts every number.
    An infinite expectation accepts itself alone, unless the bound is infinite. A NaN expectation gives
    (NaN, NaN), which `inside` reads as "must be NaN". Raises ValueError for a negative or NaN bound beside an
    expectation that is a number, and for Overflow.NAN, under which rounding is not monotone.
    """
    if overflow is Overflow.NAN:
        raise ValueError("no interval under Overflow.NAN: a value that overflows compares with nothing")
    radius = torch.as_tensor(bound, dtype=torch.float64, device=expected.device).expand(expected.shape)
    if bool((~(radius >= 0) & ~expected.isnan()).any()):
        raise ValueError("bound: negative or NaN, allowed are numbers >= 0 and inf")
    low, high = _difference_down(expected, radius), _difference_down(-expected, radius).neg_()
    if not bool((expected.isfinite() & radius.isfinite()).all()):
        infinite, vacuous, unordered = expected.isinf(), radius.isinf(), expected.isnan()
        for end, limit in ((low, -torch.inf), (high, torch.inf)):
            end[infinite] = expected[infinite]
            end.masked_fill_(vacuous, limit).masked_fill_(unordered, torch.nan)
    return round_to(low, dtype, overflow), round_to(high, dtype, overflow)


def _difference_down(a: Tensor, b: Tensor) -> Tensor:
    """The greatest float64 not above the exact a - b (exactness from the error term of Knuth's TwoSum).

    Float64 rounds the ends of an interval too; inward, it could push an end across a midpoint of the dtype.
    """
    difference = a - b
    b_part = a - difference
    error = (difference + b_part).sub_(a).neg_().sub_(b_part.neg_().add_(b))
    return torch.where(error < 0, difference.nextafter(_minus_infinity(a.device)), difference)


@cache
def _minus_infinity(device: torch.device) -> Tensor:
    return torch.tensor(-torch.inf, dtype=torch.float64, device=device)


def inside(out: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Elementwise: `out` lies in the closed interval [low, high] of its own dtype. Returns bool.

    The comparison is numeric: -0 equals +0, and an infinity is inside only where it is an end. A NaN is
    inside where both ends are NaN, and nothing else is there. Raises TypeError when the dtypes differ.
    """
    if not out.dtype == low.dtype == high.dtype:
        raise TypeError(f"cannot compare {out.dtype} with an interval of {low.dtype} and {high.dtype}")
    if out.dtype in FORMAT_OF_DTYPE:
        out, low, high = widen(out), widen(low), widen(high)
    return ((low <= out) & (out <= high)) | (out.isnan() & low.isnan() & high.isnan())
