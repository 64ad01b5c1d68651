"""Elementwise functions of the language, and `dot`. Results do not depend on how programs are batched."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuzz.engine.emulator.accumulation import accumulated
from fuzz.engine.emulator.casts import cast, real, unreal
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import DType, ScalarType, bfloat16, float16, float32, float64, int8, int32
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.operators import Operand, arithmetic, divide, level, operands, true_divide
from fuzz.engine.emulator.options import Accumulation
from fuzz.engine.emulator.value import Value, as_value, join_taints

_PIECE = 1 << 14  # elements computed at once: below the size from which torch splits work over threads
_STEP = 64  # multiple of twice any CPU's vector width in float64


def steady(function: Callable[[Tensor], Tensor], data: Tensor, results: int | None = None) -> Tensor:
    """`function` of float32 or float64 data, computed in float64 and rounded once, each lane by itself.

    torch treats lanes that do not fill a vector by other code, which may differ in the last bit; so the lanes
    go through in whole vectors, and a lane's result is the same in any batch. `results`: how many the data
    give, flat, if it is not one each.
    """
    flat = data.reshape(-1)
    done = torch.empty(flat.numel() if results is None else results, dtype=data.dtype)
    at = 0
    for piece in torch.split(flat, _PIECE):  # a piece is at hand in the cache while it is widened and rounded
        wide = piece.double()
        padding = -wide.numel() % _STEP
        found = function(torch.cat([wide, wide.new_zeros(padding)]) if padding else wide)
        end = min(at + found.numel(), done.numel())
        done[at:end] = found[: end - at]
        at = end
    return done.reshape(data.shape) if results is None else done


def elementwise(name: str, function: Callable[[Tensor], Tensor]) -> Callable[..., Value]:
    """A function of the language that torch computes exactly, of fp32 or fp64 lanes."""

    def apply(x: Operand, **_: Any) -> Value:
        value = as_value(x)
        if value.dtype not in (float32, float64):
            raise KernelError(f"{name} takes fp32 or fp64, not {value.dtype}")
        return Value(function(value.data), value.dtype, undefined=value.undefined)

    apply.__doc__ = f"{name} of each lane."
    return apply


def rounded_once(name: str, function: Callable[[Tensor], Tensor]) -> Callable[..., Value]:
    """A function of the language that is computed in float64, see `steady`."""
    return elementwise(name, lambda data: steady(function, data))


def _square_root(data: Tensor) -> Tensor:
    """Rounded to nearest, as IEEE 754 has it: torch 2.13 may be off by a bit where its vectors are of AVX-512."""
    return torch.from_numpy(np.sqrt(data.numpy()))


exp = rounded_once("exp", torch.exp)
exp2 = rounded_once("exp2", torch.exp2)
log = rounded_once("log", torch.log)
log2 = rounded_once("log2", torch.log2)
sin = rounded_once("sin", torch.sin)
cos = rounded_once("cos", torch.cos)
tanh = rounded_once("tanh", torch.tanh)
erf = rounded_once("erf", torch.erf)
rsqrt = rounded_once("rsqrt", lambda x: 1 / _square_root(x))
sqrt = elementwise("sqrt", _square_root)
floor = elementwise("floor", torch.floor)
ceil = elementwise("ceil", torch.ceil)


def absolute(x: Operand, **_: Any) -> Value:
    """Magnitude; of the least integer, itself."""
    value = as_value(x)
    if value.dtype.is_fp8():
        return Value(value.data & 0x7F, value.dtype, undefined=value.undefined)
    if isinstance(value.dtype, DType) and value.dtype.is_int_unsigned():
        return value
    return Value(value.data.abs(), value.dtype, undefined=value.undefined, wrapped=value.wrapped)


def sigmoid(x: Operand, **_: Any) -> Value:
    """1 / (1 + exp(-x))."""
    return true_divide(1.0, arithmetic("add", 1.0, exp(arithmetic("sub", 0.0, x))))


def widened(x: Operand) -> Value:
    """A typed value, bf16 as fp32: what `maximum`, `minimum` and the reductions start from."""
    value = as_value(x)
    return cast(value, float32) if value.dtype is bfloat16 else value


Pair = Callable[[Tensor, Tensor], Tensor]
_SMALL = 1 << 12  # elements up to which the slower function is done sooner than the others are checked


def _ignoring_nan(ignoring: Pair, keeping: Pair) -> Pair:
    """`ignoring` itself, sooner where the result has neither NaN nor zero.

    Of zeros of either sign `keeping` returns the first or the second, by the code that torch takes.
    """

    def apply(a: Tensor, b: Tensor) -> Tensor:
        if max(a.numel(), b.numel()) <= _SMALL:
            return ignoring(a, b)
        data = keeping(a, b)
        return data if float(data.abs().amin()) > 0 else ignoring(a, b)

    return apply


def _extreme(name: str, ignoring: Pair, keeping: Pair) -> Callable[..., Value]:
    def apply(x: Operand, y: Operand, propagate_nan: Any = None, **_: Any) -> Value:
        left, right, dtype = operands(widened(x), widened(y))
        a, b, ndim = level(left, right)
        function = ignoring if dtype.is_floating() and str(propagate_nan) != "all" else keeping
        undefined = join_taints(ndim, left.undefined, right.undefined)
        wrapped = join_taints(ndim, left.wrapped, right.wrapped)
        data = function(real(a, dtype), real(b, dtype))
        data = unreal(data, dtype) if dtype.is_fp8() else data
        return Value(data, dtype, undefined=undefined, wrapped=wrapped)

    apply.__doc__ = f"The {name} of two; a NaN yields to a number unless `propagate_nan` is ALL."
    return apply


maximum = _extreme("greater", _ignoring_nan(torch.fmax, torch.maximum), torch.maximum)
minimum = _extreme("less", _ignoring_nan(torch.fmin, torch.minimum), torch.minimum)


def clamp(x: Operand, min: Operand, max: Operand, **_: Any) -> Value:
    """`x` held between two floating bounds."""
    return minimum(maximum(x, min), max)


def cdiv(x: Operand, div: Operand, **_: Any) -> Any:
    """Quotient rounded up (for positive operands), on tensors or compile-time integers."""
    if not isinstance(x, Value) and not isinstance(div, Value):
        return -(-int(x) // int(div))
    return divide("div", arithmetic("add", x, arithmetic("sub", div, 1) if isinstance(div, Value) else div - 1), div)


def fdiv(x: Operand, y: Operand, ieee_rounding: bool = False, **_: Any) -> Value:
    """Floating division."""
    return true_divide(as_value(x), as_value(y))


def umulhi(x: Operand, y: Operand, **_: Any) -> Value:
    """The upper half of the product of 32-bit integers, taken as unsigned."""
    left, right, dtype = operands(as_value(x), as_value(y))
    if not dtype.is_int() or dtype.bits != 32:
        raise KernelError(f"umulhi takes 32-bit integers, not {dtype}")
    a, b, ndim = level(left, right)
    a, b = a.long() & 0xFFFFFFFF, b.long() & 0xFFFFFFFF
    low = a * (b & 0xFFFF)
    data = ((low >> 16) + a * (b >> 16)) >> 16
    return Value(data.to(dtype.compute), dtype, undefined=join_taints(ndim, left.undefined, right.undefined))


def fma(x: Operand, y: Operand, z: Operand, **_: Any) -> Value:
    """x * y + z; of fp32 the product is exact, and the sum is rounded to float64, then to fp32."""
    a, b, dtype = operands(as_value(x), as_value(y))
    c = cast(as_value(z), dtype)
    if dtype is not float32:
        return arithmetic("add", arithmetic("mul", a, b), c)
    product = arithmetic("mul", cast(a, float64), cast(b, float64))
    return cast(arithmetic("add", product, cast(c, float64)), float32)


_DOT_INPUTS = (int8, float16, bfloat16, float32, float64)


def dot(
    a: Value,
    b: Value,
    acc: Value | None = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: ScalarType = float32,
    **_: Any,
) -> Value:
    """Matrix product of [.., M, K] and [.., K, N] plus `acc`: inputs widened to fp32, sums in fp32.

    fp32 inputs keep all their bits, whatever `input_precision`. The order of the sums is a matter of the options
    (`Accumulation`); by default every program's product is a matrix product
    of the same shape, so its bits do not depend on the batch.
    """
    x, y = a.data, b.data
    if len(a.shape) != len(b.shape) or len(a.shape) not in (2, 3) or a.shape[-1] != b.shape[-2]:
        raise KernelError(f"dot of shapes {list(a.shape)} and {list(b.shape)}")
    if a.dtype is not b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        raise KernelError(f"dot of {a.dtype} and {b.dtype}")
    if not a.dtype.is_fp8() and a.dtype not in _DOT_INPUTS:
        raise KernelError(f"dot does not take {a.dtype}")
    result: ScalarType = float64 if a.dtype is float64 else out_dtype
    if a.dtype is int8:
        result, x, y = int32, x.double(), y.double()  # exact: sums stay far below 2^53
    elif a.dtype is not float64:
        x, y = real(x, a.dtype).float(), real(y, b.dtype).float()  # type: ignore[arg-type]
    start: Value | None = None
    options = active().options
    if x.dtype == torch.float32 and options.accumulation is not Accumulation.LIBRARY:
        start = cast(acc, float32) if acc is not None and result is float32 else None
        data = accumulated(x, y, None if start is None else start.data, options, _product)
    else:
        data = _product(x, y)
    undefined = None
    if a.undefined is not None or b.undefined is not None:
        rows = _any(a.undefined, a.data.shape, -1)
        columns = _any(b.undefined, b.data.shape, -2)
        undefined = join_taints(data.ndim, rows, columns)
    if start is not None:  # the sums began with it
        return Value(data, result, undefined=join_taints(data.ndim, undefined, start.undefined))
    product = cast(Value(data, _wide(data)), result)
    product = Value(product.data, result, undefined=undefined)
    return product if acc is None else arithmetic("add", cast(acc, result), product)


def _wide(data: Tensor) -> DType:
    return float64 if data.dtype == torch.float64 else float32


def _any(taint: Tensor | None, shape: torch.Size, axis: int) -> Tensor | None:
    return None if taint is None else taint.expand(shape).any(axis, keepdim=True)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Batched matrix product; every matrix of the batch is multiplied by the same routine.

    Torch takes another one for a lone matrix and a vector, so those do not stay alone.
    """
    programs = max(len(x), len(y))
    lead = (programs, *x.shape[1:-2])
    left = x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:]).contiguous()
    right = y.expand(*lead, *y.shape[-2:]).reshape(-1, *y.shape[-2:]).contiguous()
    count = len(left)
    if count == 1 and 1 in (left.shape[1], right.shape[2]):
        left, right = left.expand(2, -1, -1), right.expand(2, -1, -1)
    return torch.bmm(left, right)[:count].reshape(*lead, x.shape[-2], y.shape[-1])
