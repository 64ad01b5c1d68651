"""The floating-point formats that a `Precision` names, as the numbers that error bounds are made of."""

from dataclasses import dataclass

import torch

from oracle.fp8 import FORMATS as FP8_FORMATS

INPUT = "input"
"""In a `Precision`: the format of the query."""


@dataclass(frozen=True)
class Format:
    """Rounding x to nearest errs by at most max(unit_roundoff * |x|, half_subnormal), if |x| <= max."""

    name: str
    dtype: torch.dtype
    unit_roundoff: float
    half_subnormal: float
    max: float
    smallest_normal: float

    def absolute_error(self, flush_subnormals: bool) -> float:
        """Largest error below the normal range. Units that flush float32 subnormals flush bfloat16's."""
        flushes = flush_subnormals and self.smallest_normal == FP32.smallest_normal
        return self.smallest_normal if flushes else self.half_subnormal


def _ieee(name: str, dtype: torch.dtype) -> Format:
    info = torch.finfo(dtype)
    return Format(name, dtype, info.eps / 2, info.tiny * info.eps / 2, info.max, info.tiny)


FP32 = _ieee("fp32", torch.float32)
BF16 = _ieee("bf16", torch.bfloat16)
FP16 = _ieee("fp16", torch.float16)

FORMATS = {
    fmt.name: fmt
    for fmt in (
        FP32,
        BF16,
        FP16,
        *(
            Format(
                fp8.name,
                fp8.dtype,
                2.0 ** -(fp8.mantissa_bits + 1),
                fp8.smallest_subnormal / 2,
                fp8.max,
                fp8.smallest_normal,
            )
            for fp8 in FP8_FORMATS
        ),
    )
}
"""By name: fp32, bf16, fp16, e4m3fn, e4m3fnuz, e5m2, e5m2fnuz."""

FORMAT_OF_DTYPE = {fmt.dtype: fmt for fmt in FORMATS.values()}


def format_named(name: str, input_dtype: str | None = None) -> Format:
    """The format called `name`; "input" is that of `input_dtype`. Raises ValueError for an unknown name."""
    wanted = input_dtype if name == INPUT else name
    if wanted not in FORMATS:
        raise ValueError(f"dtype: {wanted!r}; known are {', '.join(FORMATS)}")
    return FORMATS[wanted]


def holds(fmt: Format, stored: torch.dtype) -> bool:
    """Whether fmt holds every number of a dtype."""
    if stored is fmt.dtype or fmt is FP32:
        return stored in FORMAT_OF_DTYPE
    return fmt in (BF16, FP16) and FORMAT_OF_DTYPE.get(stored) in _EIGHT_BITS


_EIGHT_BITS = tuple(fmt for fmt in FORMATS.values() if fmt.dtype.itemsize == 1)
