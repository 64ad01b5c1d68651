"""Scans and sorts along an axis, histograms and gathers: a lane's result is the same in any batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.blocks import check_shape, concatenate, dimension_of, flip
from fuzz.engine.emulator.casts import cast, real
from fuzz.engine.emulator.dtypes import DType, int1, int32, uint32, uint64
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.mathematics import exp, fdiv, widened
from fuzz.engine.emulator.operators import Operand, arithmetic
from fuzz.engine.emulator.reductions import max as maximum_along
from fuzz.engine.emulator.reductions import sum as sum_along
from fuzz.engine.emulator.value import Value, as_value, lift

_SIGN = torch.iinfo(torch.int64).min


def associative_scan(x: Any, axis: Any, combine_fn: Callable[..., Any], reverse: bool = False, **_: Any) -> Any:
    """Running combination along `axis` of a block, or of several in step; lane i holds that of lanes 0 .. i.

    Combined in doubling steps, earlier lanes on the left, whatever order hardware chooses.
    """
    parts = list(x) if isinstance(x, (tuple, list)) else [x]
    if reverse:
        parts = [flip(part, axis) for part in parts]
    dimension = dimension_of(parts[0], axis)
    size, types, step = parts[0].data.shape[dimension], [part.dtype for part in parts], 1
    while step < size:
        heads = [_narrowed(part, dimension, 0, step) for part in parts]
        before = [_narrowed(part, dimension, 0, size - step) for part in parts]
        after = [_narrowed(part, dimension, step, size - step) for part in parts]
        result = combine_fn(*before, *after)
        rest = result if isinstance(result, tuple) else (result,)
        rest = tuple(cast(part, dtype) for part, dtype in zip(rest, types, strict=True))
        parts = [concatenate([head, part], dimension) for head, part in zip(heads, rest, strict=True)]
        step *= 2
    if reverse:
        parts = [flip(part, axis) for part in parts]
    return tuple(parts) if isinstance(x, (tuple, list)) else parts[0]


def _narrowed(x: Value, dimension: int, start: int, length: int) -> Value:
    return x.like(lambda data: data.narrow(dimension, start, length))


def _cumulative(name: str) -> Callable[..., Value]:
    def apply(x: Value, axis: Any = 0, reverse: bool = False, dtype: DType | None = None, **_: Any) -> Value:
        x = widened(x)
        if dtype is None and x.dtype.is_int() and x.dtype.bits < 32:
            dtype = int32 if x.dtype.is_int_signed() else uint32
        start = x if dtype is None else cast(x, dtype)
        result: Value = associative_scan(start, axis, lambda a, b: arithmetic(name, a, b), reverse)
        return result

    return apply


cumsum = _cumulative("add")
cumprod = _cumulative("mul")


def _ordered(x: Value) -> Tensor:
    """Data whose order is that of the values."""
    if isinstance(x.dtype, DType) and x.dtype.is_fp8():
        return real(x.data, x.dtype)
    return x.data ^ _SIGN if x.dtype is uint64 else x.data


def sort(x: Value, dim: Any = None, descending: Any = False, **_: Any) -> Value:
    """The lanes along the last axis in order. A lane without meaning takes it from all lanes of its row."""
    dimension = dimension_of(x, len(x.shape) - 1 if dim is None else dim)
    if dimension != len(x.shape):
        raise KernelError("sort takes the last axis only")
    order = _ordered(x).sort(dim=dimension, descending=bool(descending), stable=True).indices
    data = x.data.gather(dimension, order)
    return Value(data, x.dtype, undefined=_rows(x.undefined, x), wrapped=_rows(x.wrapped, x))


def _rows(taint: Tensor | None, x: Value) -> Tensor | None:
    if taint is None:
        return None
    return taint.expand(x.data.shape).any(-1, keepdim=True).expand(x.data.shape)


def topk(x: Value, k: Any, dim: Any = None, **_: Any) -> Value:
    """The greatest `k` lanes along the last axis, in descending order."""
    (count,) = check_shape([k])
    if count > x.shape[-1]:
        raise KernelError(f"the greatest {count} of {x.shape[-1]} lanes")
    return _narrowed(sort(x, dim, descending=True), len(x.shape), 0, count)


def histogram(x: Value, num_bins: Any, mask: Operand | None = None, **_: Any) -> Value:
    """How many lanes of a vector of integers hold each of 0 .. num_bins - 1, as int32; others do not count."""
    (bins,) = check_shape([num_bins])
    if len(x.shape) != 1 or not x.dtype.is_int():
        raise KernelError("histogram takes a vector of integers")
    counted = (x.data >= 0) & (x.data < bins)
    if mask is not None:
        counted = counted & cast(as_value(mask), int1).data
    one_hot = (x.data.unsqueeze(-1) == torch.arange(bins)) & counted.unsqueeze(-1)
    undefined = None if x.undefined is None else (lift(x.undefined, 2) & counted).any(-1, keepdim=True)
    return Value(one_hot.sum(1).int(), int32, undefined=undefined)


def gather(src: Value, index: Value, axis: Any, **_: Any) -> Value:
    """The lanes of `src` that `index` names along `axis`; the other axes go along."""
    dimension = dimension_of(src, axis)
    low, high = index.range()
    if low < 0 or high >= src.data.shape[dimension]:
        raise KernelError(f"gather of lanes {low} .. {high} of {src.data.shape[dimension]}")
    programs = max(len(src.data), len(index.data))
    where_to = index.data.long().expand(programs, *index.shape)

    def chosen(data: Tensor) -> Tensor:
        return data.expand(programs, *data.shape[1:]).gather(dimension, where_to)

    result = src.like(chosen)
    if index.undefined is None:
        return result
    lost = lift(index.undefined, result.data.ndim)
    undefined = lost if result.undefined is None else lost | result.undefined
    return Value(result.data, result.dtype, undefined=undefined, wrapped=result.wrapped)


def softmax(x: Value, dim: Any = None, keep_dims: bool = False, **_: Any) -> Value:
    """exp(x) over its sum along an axis (the first one), shifted by the greatest lane."""
    axis = 0 if dim is None else dim
    shifted = arithmetic("sub", x, maximum_along(x, axis, keep_dims=True))
    powers = exp(shifted)
    return fdiv(powers, sum_along(powers, axis, keep_dims=True))
