"""The operators of values: arithmetic, comparison, bits, selection. One promotion, taints carried along."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.casts import cast, normalise, real, refuse_large, reinterpret, unreal
from fuzz.engine.emulator.dtypes import DType, Kind, PointerType, float32, int1, int32, int64, uint64
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.masks import both, either, one_of, some
from fuzz.engine.emulator.sanitizer import FindingKind, report
from fuzz.engine.emulator.value import (
    Bounds,
    Number,
    Value,
    as_value,
    broadcast_shapes,
    common_type,
    constant,
    join_taints,
    lift,
)

Operand = Value | Number
_SIGN = torch.iinfo(torch.int64).min
_CHEAP = 4  # times that an operand must be smaller than a result for its range to be looked up


def operands(a: Operand, b: Operand, *, division: bool = False) -> tuple[Value, Value, DType]:
    """Both operands in the type in which they meet."""
    if isinstance(a, Value) and isinstance(b, Value) and a.dtype is b.dtype and not division:
        if isinstance(a.dtype, PointerType):
            raise KernelError("this operator takes no pointer")
        return a, b, a.dtype
    dtype = common_type(a, b, division=division)
    left = cast(a, dtype) if isinstance(a, Value) else constant(a, dtype)
    right = cast(b, dtype) if isinstance(b, Value) else constant(b, dtype)
    return left, right, dtype


def level(a: Value, b: Value) -> tuple[Tensor, Tensor, int]:
    """Data of both, of one rank, and that rank. Raises KernelError where the shapes do not broadcast."""
    x, y = a.data, b.data
    m, n = x.ndim, y.ndim
    if m == 1:
        return (x if n == 1 else lift(x, n)), y, n
    if n == 1:
        return x, lift(y, m), m
    ndim = m if m >= n else n
    x, y = lift(x, ndim), lift(y, ndim)
    broadcast_shapes(x.shape, y.shape)
    return x, y, ndim


_FLOATING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "mod": torch.fmod,
}
_BITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}
_OF_BOOLEANS = {"and": both, "or": either, "xor": one_of}
_MODULO_TWO = {"add": one_of, "sub": one_of, "mul": both}  # arithmetic of one-bit integers


def arithmetic(name: str, a: Operand, b: Operand) -> Value:
    """`add`, `sub` or `mul`; `add` and `sub` also move a pointer."""
    if isinstance(a, Value) and isinstance(a.dtype, PointerType) and name != "mul":
        return _move(a, b, name)
    if isinstance(b, Value) and isinstance(b.dtype, PointerType) and name == "add":
        return _move(b, a, name)
    left, right, dtype = operands(a, b)
    x, y, ndim = level(left, right)
    undefined = None
    if left.undefined is not None or right.undefined is not None:
        undefined = join_taints(ndim, left.undefined, right.undefined)
    if dtype.is_floating():
        data = _FLOATING[name](real(x, dtype), real(y, dtype))
        return Value(unreal(data, dtype), dtype, undefined=undefined)
    if dtype is int1:
        return Value(_MODULO_TWO[name](x, y), dtype, undefined=undefined)
    bounds, wrapped = None, None
    if dtype is int32:
        bounds = _interval(name, left.range(), right.range())
        if bounds[0] < dtype.minimum or bounds[1] > dtype.maximum:
            bounds = None
            wide = _FLOATING[name](x.long(), y.long())
            data = wide.int()
            overflow = wide != data
            wrapped = overflow if some(overflow) else None
        else:
            data = _FLOATING[name](x, y)
    else:
        data = normalise(_FLOATING[name](x, y), dtype)
        bounds = _foreseen(name, left, right, data) if dtype is int64 else None
    if wrapped is not None or left.wrapped is not None or right.wrapped is not None:
        wrapped = join_taints(ndim, wrapped, left.wrapped, right.wrapped)
    return Value(data, dtype, undefined=undefined, wrapped=wrapped, bounds=bounds)


def _interval(name: str, a: Bounds, b: Bounds) -> Bounds:
    if name == "add":
        return a[0] + b[0], a[1] + b[1]
    if name == "sub":
        return a[0] - b[1], a[1] - b[0]
    corners = a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1]
    return min(corners), max(corners)


def _foreseen(name: str, a: Value, b: Value, result: Tensor) -> Bounds | None:
    """Bounds of a 64-bit result where those of the operands are known, or cheap to find next to the result's."""
    ranges = []
    for operand in (a, b):
        if operand.bounds is None and operand.data.numel() * _CHEAP > result.numel():
            return None
        ranges.append(operand.range())
    low, high = _interval(name, *ranges)
    return (low, high) if low >= int64.minimum and high <= int64.maximum else None


def _move(pointer: Value, offset: Operand, name: str) -> Value:
    step = offset if isinstance(offset, Value) else constant(offset, int64)
    if not step.dtype.is_int():
        raise KernelError(f"cannot move a pointer by {step.dtype}")
    x, y, ndim = level(pointer, step)
    if pointer.bounds == (0, 0) and not pointer.shape and name == "add":
        data = y.long()  # from the start of a buffer
    else:
        data = x + y if name == "add" else x - y
    bounds = _foreseen(name, pointer, step, data)
    return Value(
        data,
        pointer.dtype,
        buffer=pointer.buffer,
        undefined=join_taints(ndim, pointer.undefined, step.undefined),
        wrapped=join_taints(ndim, pointer.wrapped, step.wrapped),
        bounds=bounds,
    )


def true_divide(a: Operand, b: Operand) -> Value:
    """`/`: integers divide as float32, 16-bit floats too."""
    left, right, dtype = operands(a, b, division=True)
    if dtype.is_int():
        left, right, dtype = cast(left, float32), cast(right, float32), float32
    x, y, ndim = level(left, right)
    data = torch.div(real(x, dtype), real(y, dtype))
    return Value(unreal(data, dtype), dtype, undefined=join_taints(ndim, left.undefined, right.undefined))


def divide(name: str, a: Operand, b: Operand) -> Value:
    """`//` ("div": integers only) and `%` ("mod"), both truncating as in C.

    An integer divided by zero is reported, and the lane becomes undefined.
    """
    left, right, dtype = operands(a, b, division=True)
    x, y, ndim = level(left, right)
    undefined = join_taints(ndim, left.undefined, right.undefined)
    if dtype.is_floating():
        if name == "div":
            raise KernelError(f"// takes integers, not {dtype}")
        return Value(unreal(torch.fmod(real(x, dtype), real(y, dtype)), dtype), dtype, undefined=undefined)
    for operand in (left, right):
        refuse_large(operand)
    if dtype is int1:
        raise KernelError("// and % do not take booleans")
    low, high = right.range()
    negate = None
    if low <= 0 <= high:
        zero = y == 0
        if some(zero):
            y = y.masked_fill(zero, 1)
            zero = zero.expand(broadcast_shapes(x.shape, y.shape))
            blamed = zero if undefined is None else zero & ~undefined
            zero = report(FindingKind.INTEGER_DIVISION_BY_ZERO, blamed, None, None)
            undefined = zero if undefined is None else undefined | zero
    if low <= -1 <= high:  # the least integer divided by -1 traps on the CPU
        negate = y == -1
        y = y.masked_fill(negate, 1)
    if low == high > 0 and not low & (low - 1) and dtype is not uint64 and left.range()[0] >= 0:
        data = x >> (low.bit_length() - 1) if name == "div" else x & (low - 1)  # many times quicker
    else:
        data = torch.div(x, y, rounding_mode="trunc") if name == "div" else torch.fmod(x, y)
    if negate is not None and name == "div":
        data = torch.where(negate, -data, data)
    wrapped = join_taints(ndim, left.wrapped, right.wrapped)
    bounds = _divided(name, left.range(), low) if low == high > 0 else None
    return Value(data, dtype, undefined=undefined, wrapped=wrapped, bounds=bounds)


def _divided(name: str, dividend: Bounds, divisor: int) -> Bounds:
    """Bounds of // and % by one positive divisor."""
    low, high = dividend
    if name == "div":
        return _truncated(low, divisor), _truncated(high, divisor)
    return (0 if low >= 0 else 1 - divisor), (0 if high <= 0 else divisor - 1)


def _truncated(dividend: int, divisor: int) -> int:
    quotient = abs(dividend) // divisor
    return quotient if dividend >= 0 else -quotient


def bitwise(name: str, a: Operand, b: Operand) -> Value:
    """`and`, `or`, `xor`, `shl`, `shr` of integers; a signed right shift keeps the sign."""
    left, right, dtype = operands(a, b)
    if not dtype.is_int():
        raise KernelError(f"bit operators take integers, not {dtype}")
    x, y, ndim = level(left, right)
    undefined = join_taints(ndim, left.undefined, right.undefined)
    wrapped = join_taints(ndim, left.wrapped, right.wrapped)
    if dtype is int1:
        if name in ("shl", "shr"):
            raise KernelError("shifts do not take booleans")
        if undefined is not None and name != "xor":
            undefined = undefined & ~_settled(name, left, ndim) & ~_settled(name, right, ndim)
        return Value(_OF_BOOLEANS[name](x, y), dtype, undefined=undefined)
    if name == "shr":
        refuse_large(left)
    if name == "shl" and dtype is int32:
        wide = _BITS[name](x.long(), y.long())
        data = wide.int()
        overflow = wide != data
        if some(overflow):
            wrapped = join_taints(ndim, wrapped, overflow)
    else:
        data = normalise(_BITS[name](x, y), dtype)
    return Value(data, dtype, undefined=undefined, wrapped=wrapped)


def _settled(name: str, a: Value, ndim: int) -> Tensor:
    """Lanes of a boolean that decide `and` or `or` by themselves: defined, and false or true."""
    data = lift(a.data, ndim)
    decides = data if name == "or" else ~data
    return decides if a.undefined is None else decides & ~lift(a.undefined, ndim)


def compare(function: Callable[[Tensor, Tensor], Tensor], a: Operand, b: Operand) -> Value:
    """A comparison: int1."""
    left, right, dtype = operands(a, b)
    x, y, ndim = level(left, right)
    if dtype.is_floating():
        x, y = real(x, dtype), real(y, dtype)
    elif dtype is uint64:
        x, y = x ^ _SIGN, y ^ _SIGN
    undefined = None
    if left.undefined is not None or right.undefined is not None:
        undefined = join_taints(ndim, left.undefined, right.undefined)
    return Value(function(x, y), int1, undefined=undefined)


def invert(a: Value) -> Value:
    """`~` of an integer."""
    if not a.dtype.is_int():
        raise KernelError(f"~ takes integers, not {a.dtype}")
    data = normalise(torch.bitwise_not(a.data), a.dtype)  # type: ignore[arg-type]
    return Value(data, a.dtype, undefined=a.undefined, wrapped=a.wrapped)


def negate(a: Value) -> Value:
    """Unary minus, which Triton defines as 0 - a: of +0.0 it is +0.0."""
    return arithmetic("sub", constant(0, a.dtype), a)  # type: ignore[arg-type]


def where(condition: Operand, a: Operand, b: Operand) -> Value:
    """Lanes of `a` where `condition` holds, of `b` elsewhere. Taints come from the chosen lane alone."""
    chooser = cast(as_value(condition), int1)
    left, right, dtype, buffer = _alternatives(a, b)
    ndim = max(chooser.data.ndim, left.data.ndim, right.data.ndim)
    chosen, x, y = (lift(v.data, ndim) for v in (chooser, left, right))
    data = torch.where(chosen, x, y)
    undefined = _choose(chosen, left.undefined, right.undefined, ndim)
    if chooser.undefined is not None:
        undefined = join_taints(ndim, undefined, chooser.undefined)
    wrapped = _choose(chosen, left.wrapped, right.wrapped, ndim)
    return Value(data, dtype, buffer=buffer, undefined=undefined, wrapped=wrapped)


def _alternatives(a: Operand, b: Operand) -> tuple[Value, Value, Any, Any]:
    if isinstance(a, Value) and isinstance(b, Value) and a.dtype.kind is Kind.POINTER:
        if a.buffer is not b.buffer or a.dtype != b.dtype:
            raise KernelError("a choice between pointers into two buffers is not covered")
        return a, b, a.dtype, a.buffer
    left, right, dtype = operands(a, b)
    return left, right, dtype, None


def _choose(chosen: Tensor, a: Tensor | None, b: Tensor | None, ndim: int) -> Tensor | None:
    if a is None and b is None:
        return None
    off = torch.zeros((1,) * ndim, dtype=torch.bool)
    taint = torch.where(chosen, off if a is None else lift(a, ndim), off if b is None else lift(b, ndim))
    return taint if some(taint) else None


def to(a: Value, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False, **_: Any) -> Value:
    """Conversion to another type; only rounding to nearest even is covered."""
    if fp_downcast_rounding not in (None, "rtne"):
        raise KernelError(f"rounding mode {fp_downcast_rounding} is not covered")
    return reinterpret(a, dtype) if bitcast else cast(a, dtype)


def _method(function: Callable[..., Value], name: str, *, swapped: bool = False) -> Callable[..., Value]:
    if swapped:
        return lambda a, b: function(name, b, a)
    return lambda a, b: function(name, a, b)


def _comparison(name: str) -> Callable[..., Value]:
    function = getattr(torch, name)
    return lambda a, b: compare(function, a, b)


_BINARY: dict[str, tuple[Callable[..., Value], str]] = {
    "add": (arithmetic, "add"),
    "sub": (arithmetic, "sub"),
    "mul": (arithmetic, "mul"),
    "floordiv": (divide, "div"),
    "mod": (divide, "mod"),
    "and": (bitwise, "and"),
    "or": (bitwise, "or"),
    "xor": (bitwise, "xor"),
    "lshift": (bitwise, "shl"),
    "rshift": (bitwise, "shr"),
}
METHODS: dict[str, Callable[..., Value]] = {
    **{f"__{python}__": _method(*entry) for python, entry in _BINARY.items()},
    **{f"__r{python}__": _method(*entry, swapped=True) for python, entry in _BINARY.items()},
    **{f"__{name}__": _comparison(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "__truediv__": true_divide,
    "__rtruediv__": lambda a, b: true_divide(b, a),
    "__neg__": negate,
    "__invert__": invert,
    "to": to,
}
for _name, _function in METHODS.items():
    setattr(Value, _name, _function)
