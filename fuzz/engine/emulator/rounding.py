"""Rounding to narrow floating-point formats, each value once, to nearest, ties to even.

The only place of the emulator that knows fp8 arithmetic. `torch.Tensor.to(fp8)` is not one rule over versions
and devices, so nothing here uses it.
"""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from fuzz.engine.emulator.dtypes import (
    DType,
    bfloat16,
    float8e4b8,
    float8e4nv,
    float8e5,
    float8e5b16,
    float16,
)
from fuzz.engine.emulator.options import Fp8Overflow

# Format -> (mantissa bits, exponent bias, code of the largest finite value, code of NaN).
_FORMATS = {
    float8e4nv: (3, 7, 0x7E, 0x7F),
    float8e4b8: (3, 8, 0x7F, 0x80),
    float8e5: (2, 15, 0x7B, 0x7F),
    float8e5b16: (2, 16, 0x7F, 0x80),
}


def _magnitude(code: int, mantissa_bits: int, bias: int) -> float:
    exponent, mantissa = divmod(code, 1 << mantissa_bits)
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (mantissa + (1 << mantissa_bits)) * 2.0 ** (exponent - bias - mantissa_bits)


@cache
def fp8_values(dtype: DType) -> Tensor:
    """Values of the 256 codes of an fp8 type, as float32 [256]."""
    mantissa_bits, bias, greatest, nan = _FORMATS[dtype]
    half = [_magnitude(code, mantissa_bits, bias) for code in range(128)]
    if nan == 0x7F:  # e4m3fn has one NaN a sign, e5m2 infinity at 0x7C and NaN above
        half[greatest + 1 :] = [torch.nan] * (127 - greatest)
        if dtype is float8e5:
            half[0x7C] = torch.inf
    values = torch.tensor(half + [-v for v in half])
    if nan == 0x80:
        values[0x80] = torch.nan
    return values


@cache
def _midpoints(dtype: DType) -> Tensor:
    mantissa_bits, bias, greatest, _ = _FORMATS[dtype]
    grid = [_magnitude(code, mantissa_bits, bias) for code in range(greatest + 2)]
    return torch.tensor([(low + high) / 2 for low, high in pairwise(grid)])


def decode_fp8(codes: Tensor, dtype: DType) -> Tensor:
    """float32 values of codes (uint8, any shape)."""
    return fp8_values(dtype).index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


def encode_fp8(values: Tensor, dtype: DType, overflow: Fp8Overflow) -> Tensor:
    """Codes (uint8) of float32 or float64 values. NaN loses its sign and payload."""
    _, _, greatest, nan = _FORMATS[dtype]
    magnitude = values.abs()
    midpoints = _midpoints(dtype).to(values.dtype)
    codes = torch.bucketize(magnitude, midpoints)  # a midpoint itself goes to the code below it
    tie = midpoints[codes.clamp(max=greatest)] == magnitude
    codes += tie & (codes & 1).bool()
    too_large = codes > greatest
    codes.clamp_(max=greatest)
    codes += values.signbit() * 0x80
    if nan == 0x80:
        codes.masked_fill_(codes == 0x80, 0)  # these formats have no negative zero
    undefined = values.isnan() | too_large if overflow is Fp8Overflow.NAN else values.isnan()
    return codes.masked_fill_(undefined, nan).to(torch.uint8)


def narrow(values: Tensor, dtype: DType) -> Tensor:
    """Floating values in `dtype`'s torch dtype (fp16, bf16, fp32 or fp64), rounded once.

    torch narrows float64 to 16 bits through float32. Rounding that first step to odd keeps the second one
    right: an inexact float32 with an odd last bit never sits on a midpoint of the narrow format.
    """
    if values.dtype == torch.float64 and dtype in (float16, bfloat16):
        nearest = values.float()
        back = nearest.double()
        away = (back.abs() > values.abs()) & back.isfinite()
        bits = nearest.view(torch.int32) - away.int()  # truncated towards zero
        bits = bits | ((back != values) & ~values.isnan() & back.isfinite()).int()
        return bits.view(torch.float32).to(dtype.memory)
    return values.to(dtype.memory)
