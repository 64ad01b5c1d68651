"""Matrix instructions: products of blocks, plain and with a scale for each group of 32 elements."""

from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.casts import cast, real
from fuzz.engine.emulator.dtypes import DType, float8e4nv, float8e5, float32, float64, int8, uint8
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.mathematics import dot
from fuzz.engine.emulator.operators import arithmetic
from fuzz.engine.emulator.value import Value, join_taints

_GROUP = 32  # elements of K that share a scale (OCP Microscaling Formats, 5.1)
_FP8 = {"e4m3": float8e4nv, "e5m2": float8e5}
# The sixteen values of e2m1: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, 5.3.3).
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def mfma(a: Value, b: Value, acc: Value, **_: Any) -> Value:
    """a @ b + acc, with sums in the accumulator's type."""
    if acc is None:
        raise KernelError("mfma needs an accumulator")
    expected = (*a.shape[:-1], b.shape[-1])
    if acc.shape != expected:
        raise KernelError(f"mfma: an accumulator {list(acc.shape)} does not fit a product {list(expected)}")
    return dot(a, b, acc, out_dtype=acc.dtype)


def dot_fma(a: Value, b: Value, acc: Value, **_: Any) -> Value:
    """a @ b + acc by multiply-add instructions."""
    return mfma(a, b, acc)


def mfma_scaled(
    a: Value,
    a_scale: Value | int | None,
    a_format: str,
    b: Value,
    b_scale: Value | int | None,
    b_format: str,
    acc: Value | None,
    **_: Any,
) -> Value:
    """(a * scales) @ (b * scales) + acc. Scales are e8m0 (uint8: 2 ** (s - 127), 255 is NaN): a's [M, K / 32], b's
    [N, K / 32]. Formats: e4m3, e5m2, and e2m1, of which a byte holds two along K, the even one in the low half.
    """
    left = _scaled(_decoded(a, a_format, -1), a_scale, "lhs")
    right = _transposed(_scaled(_transposed(_decoded(b, b_format, -2)), b_scale, "rhs"))
    product = dot(left, right)
    return product if acc is None else arithmetic("add", acc, product)


def dot_scaled(
    lhs: Value,
    lhs_scale: Value | None,
    lhs_format: str,
    rhs: Value,
    rhs_scale: Value | None,
    rhs_format: str,
    acc: Value | None = None,
    lhs_k_pack: bool = True,
    rhs_k_pack: bool = True,
    out_dtype: DType = float32,
    **_: Any,
) -> Value:
    """The same as the compiler's own function has it."""
    if not lhs_k_pack or not rhs_k_pack:
        raise KernelError("dot_scaled: only operands packed along K are covered")
    return cast(mfma_scaled(lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, acc), out_dtype)


def _decoded(x: Value, form: str, axis: int) -> Value:
    """An operand as fp32. Its numbers are exact there."""
    if form == "e2m1":
        if x.dtype not in (uint8, int8):
            raise KernelError(f"e2m1 operands are bytes, not {x.dtype}")
        return Value(_unpacked(x.data.to(torch.uint8), axis), float32, undefined=_twice(x.undefined, x.data, axis))
    dtype = _FP8.get(form)
    if dtype is None:
        raise KernelError(f"format {form} is none of e2m1, e4m3, e5m2")
    if x.dtype not in (dtype, uint8, int8):
        raise KernelError(f"an operand of format {form} cannot be {x.dtype}")
    return Value(real(x.data.view(torch.uint8), dtype), float32, undefined=x.undefined)


def _unpacked(data: Tensor, axis: int) -> Tensor:
    halves = torch.stack([data & 15, data >> 4], axis)
    values = _E2M1[halves.int()]
    return values.flatten(axis - 1, axis)


def _twice(taint: Tensor | None, data: Tensor, axis: int) -> Tensor | None:
    return None if taint is None else taint.expand(data.shape).repeat_interleave(2, axis)


def _transposed(x: Value) -> Value:
    return x.like(lambda data: data.transpose(-1, -2))


def _scaled(x: Value, scale: Value | int | None, side: str) -> Value:
    """Rows [M, K] times their scales [M, K / 32]."""
    if scale is None:
        return x
    if not isinstance(scale, Value):
        scale = Value(torch.full((1, x.shape[0], x.shape[1] // _GROUP), int(scale), dtype=torch.uint8), uint8)
    if scale.dtype not in (uint8, int8) or scale.shape != (x.shape[0], x.shape[1] // _GROUP):
        raise KernelError(f"{side} of {list(x.shape)} takes uint8 scales of [{x.shape[0]}, {x.shape[1] // _GROUP}]")
    code = scale.data.view(torch.uint8).double()
    factor = torch.exp2(code - 127).masked_fill(code == 255, torch.nan).repeat_interleave(_GROUP, -1)
    undefined = x.undefined
    if scale.undefined is not None:
        lanes = scale.undefined.expand(scale.data.shape).repeat_interleave(_GROUP, -1)
        undefined = join_taints(x.data.ndim, undefined, lanes)
    return cast(Value(x.data.double() * factor, float64, undefined=undefined), float32)
