"""The four 8-bit floating-point formats, decoded and encoded by tables built from their definitions.

A code is one byte: sign, exponent, mantissa. e4m3fn and e5m2 are the OCP 8-bit floating-point specification
(revision 1.0); the fnuz pair ("finite, NaN, unsigned zero") has an exponent bias one higher, no infinity, no
negative zero, and one NaN, 0x80. torch converts by rules that differ between versions, devices and formats;
nothing here calls it.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from math import inf, nan, nextafter

import torch
from torch import Tensor

_SIGN = 0x80


class Overflow(StrEnum):
    """What `encode` makes of values that round beyond the largest finite one, infinities included."""

    SATURATE = "saturate"
    NAN = "nan"
    INF = "inf"


@dataclass(frozen=True)
class Fp8Format:
    """One format.

    `max_code` is the code of the largest finite value, `nan_code` the NaN that `encode` writes. Positive
    codes ascend with their values, so that neighbours in value are neighbours in code.
    """

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int
    has_inf: bool
    has_negative_zero: bool

    @property
    def max(self) -> float:
        """Largest finite value."""
        return self._magnitude(self.max_code)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with a full mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value: the spacing of the subnormals."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def inf_code(self) -> int:
        """Code of +inf. Raises ValueError for a format without infinities."""
        if not self.has_inf:
            raise ValueError(f"{self.name} has no infinity")
        return self.max_code + 1

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Value of each of the 256 codes."""
        return tuple(self._value(code) for code in range(256))

    def _value(self, code: int) -> float:
        magnitude_code, negative = code & ~_SIGN, bool(code & _SIGN)
        if negative and magnitude_code == 0 and not self.has_negative_zero:
            return nan
        if magnitude_code <= self.max_code:
            magnitude = self._magnitude(magnitude_code)
        elif self.has_inf and magnitude_code == self.inf_code:
            magnitude = inf
        else:
            return nan
        return -magnitude if negative else magnitude

    def _magnitude(self, code: int) -> float:
        """Value of a positive code as exponent and mantissa alone give it, up to one past `max_code`."""
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        if exponent == 0:
            return mantissa * self.smallest_subnormal
        return (mantissa + (1 << self.mantissa_bits)) * 2.0 ** (exponent - self.bias - self.mantissa_bits)

    @cached_property
    def _thresholds(self) -> tuple[float, ...]:
        """The i-th is the least float64 that rounds above code i, for i = 0 .. max_code.

        A midpoint goes to the neighbour with the even code. All midpoints are exact in float64, also the one
        between the largest finite value and its would-be successor.
        """
        midpoints = [(self._magnitude(i) + self._magnitude(i + 1)) / 2 for i in range(self.max_code + 1)]
        return tuple(mid if i % 2 else nextafter(mid, inf) for i, mid in enumerate(midpoints))


E4M3FN = Fp8Format(
    "e4m3fn",
    torch.float8_e4m3fn,
    mantissa_bits=3,
    bias=7,
    max_code=0x7E,
    nan_code=0x7F,
    has_inf=False,
    has_negative_zero=True,
)
E4M3FNUZ = Fp8Format(
    "e4m3fnuz",
    torch.float8_e4m3fnuz,
    mantissa_bits=3,
    bias=8,
    max_code=0x7F,
    nan_code=0x80,
    has_inf=False,
    has_negative_zero=False,
)
E5M2 = Fp8Format(
    "e5m2",
    torch.float8_e5m2,
    mantissa_bits=2,
    bias=15,
    max_code=0x7B,
    nan_code=0x7F,
    has_inf=True,
    has_negative_zero=True,
)
E5M2FNUZ = Fp8Format(
    "e5m2fnuz",
    torch.float8_e5m2fnuz,
    mantissa_bits=2,
    bias=16,
    max_code=0x7F,
    nan_code=0x80,
    has_inf=False,
    has_negative_zero=False,
)

FORMATS = (E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ)
FORMAT_OF_DTYPE = {fmt.dtype: fmt for fmt in FORMATS}
FORMAT_OF_NAME = {fmt.name: fmt for fmt in FORMATS}


def decode(codes: Tensor, fmt: Fp8Format) -> Tensor:
    """Exact values of `codes` (any shape; uint8, or the format's own dtype) as float64, on their device.

    Every NaN code becomes the same NaN. Raises TypeError for another dtype.
    """
    if codes.dtype not in (torch.uint8, fmt.dtype):
        raise TypeError(f"codes of {fmt.name} come as torch.uint8 or {fmt.dtype}, not as {codes.dtype}")
    index = codes.view(torch.uint8).reshape(-1).int()
    return _decode_table(fmt, codes.device).index_select(0, index).reshape(codes.shape)


def encode(x: Tensor, fmt: Fp8Format, overflow: Overflow) -> Tensor:
    """Codes (uint8, same shape and device) of float64 `x`, rounded once, to nearest, ties to the even code.

    What rounds beyond the largest finite value, infinities included, follows `overflow`; it keeps its sign
    unless it becomes NaN. NaN becomes `fmt.nan_code`, whatever its sign and payload. Zeros and underflow keep
    their sign where the format has a negative zero. Raises TypeError unless `x` is float64 (what was rounded
    before would be rounded twice), ValueError for INF on a format without infinity.
    """
    if x.dtype != torch.float64:
        raise TypeError(f"encode takes float64, not {x.dtype}")
    thresholds = _encode_table(fmt, x.device)
    codes = torch.searchsorted(thresholds, x.abs().contiguous(), right=True, out_int32=True).to(torch.uint8)
    too_large = codes > fmt.max_code
    not_a_number = x.isnan()
    negative = x.signbit()
    match overflow:
        case Overflow.SATURATE:
            codes.clamp_(max=fmt.max_code)
        case Overflow.INF:
            codes.masked_fill_(too_large, fmt.inf_code)
        case Overflow.NAN:
            not_a_number |= too_large
    if not fmt.has_negative_zero:
        negative &= codes != 0
    codes |= negative.to(torch.uint8) * _SIGN
    return codes.masked_fill_(not_a_number, fmt.nan_code)


@cache
def _decode_table(fmt: Fp8Format, device: torch.device) -> Tensor:
    return torch.tensor(fmt.values, dtype=torch.float64, device=device)


@cache
def _encode_table(fmt: Fp8Format, device: torch.device) -> Tensor:
    return torch.tensor(fmt._thresholds, dtype=torch.float64, device=device)
