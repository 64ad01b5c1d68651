"""Reductions over an axis of a block, as a fixed binary tree: the same additions in any batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.blocks import arange, broadcast_to, dimension_of, expand_dims, ravel
from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.dtypes import DType, float32, int32, uint32
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.mathematics import maximum, minimum, widened
from fuzz.engine.emulator.operators import arithmetic, bitwise, compare, where
from fuzz.engine.emulator.value import Value

Combine = Callable[..., Any]


def reduce(x: Any, axis: Any, combine_fn: Combine, keep_dims: bool = False, **_: Any) -> Any:
    """Combine the lanes along `axis` (None: all) of a block, or of several in step, pairing first half with
    second half until one lane is left. `combine_fn` takes the lanes of both sides.
    """
    parts = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    rank = len(parts[0].shape)
    if axis is None:
        parts = tuple(ravel(part) for part in parts)
    dimension = dimension_of(parts[0], 0 if axis is None else axis)
    size = parts[0].data.shape[dimension]
    types = [part.dtype for part in parts]
    while size > 1:
        size //= 2
        first = [part.like(_narrower(dimension, 0, size)) for part in parts]
        second = [part.like(_narrower(dimension, size, size)) for part in parts]
        result = combine_fn(*first, *second)
        parts = result if isinstance(result, tuple) else (result,)
        parts = tuple(cast(part, dtype) for part, dtype in zip(parts, types, strict=True))
    parts = tuple(part.like(lambda data: data.squeeze(dimension)) for part in parts)
    if keep_dims:
        axes = list(range(rank)) if axis is None else [axis]
        parts = tuple(expand_dims(part, axes) for part in parts)
    return parts if isinstance(x, (tuple, list)) else parts[0]


def _narrower(dimension: int, start: int, length: int) -> Callable[[Tensor], Tensor]:
    return lambda data: data.narrow(dimension, start, length)


def _add(a: Value, b: Value) -> Value:
    return arithmetic("add", a, b)


def sum(x: Value, axis: Any = None, keep_dims: bool = False, dtype: DType | None = None, **_: Any) -> Value:
    """Sum along an axis, in `dtype`: by default floats in their own, integers in at least 32 bits."""
    if dtype is None and x.dtype.is_int() and x.dtype.bits < 32:
        dtype = int32 if x.dtype.is_int_signed() else uint32
    result: Value = reduce(x if dtype is None else cast(x, dtype), axis, _add, keep_dims)
    return result


def xor_sum(x: Value, axis: Any = None, keep_dims: bool = False, **_: Any) -> Value:
    """Exclusive or along an axis."""
    result: Value = reduce(x, axis, lambda a, b: bitwise("xor", a, b), keep_dims)
    return result


def _extreme(select: Combine, precedes: str) -> Callable[..., Any]:
    def best(value1: Value, index1: Value, value2: Value, index2: Value) -> tuple[Value, Value]:
        better = compare(getattr(torch, precedes), value1, value2)
        tie = bitwise("and", compare(torch.eq, value1, value2), compare(torch.lt, index1, index2))
        first = bitwise("or", better, tie)
        return where(first, value1, value2), where(first, index1, index2)

    def apply(
        x: Value,
        axis: Any = None,
        return_indices: bool = False,
        return_indices_tie_break_left: bool = True,
        keep_dims: bool = False,
        **_: Any,
    ) -> Any:
        x = widened(x)
        if return_indices:
            return _with_indices(x, axis, best, keep_dims)
        if x.dtype.bits < 32:
            x = cast(x, float32 if x.dtype.is_floating() else int32)
        return reduce(x, axis, select, keep_dims)

    return apply


def _with_indices(x: Value, axis: Any, best: Combine, keep_dims: bool) -> tuple[Value, Value]:
    if axis is None:
        raise KernelError("a reduction with indices needs an axis")
    position = dimension_of(x, axis) - 1
    index = arange(0, x.shape[position])
    others = [other for other in range(len(x.shape)) if other != position]
    index = broadcast_to(expand_dims(index, others) if others else index, x.shape)
    values, indices = reduce((x, index), axis, best, keep_dims)
    return values, indices


max = _extreme(maximum, "gt")
min = _extreme(minimum, "lt")


def argmax(x: Value, axis: Any, tie_break_left: bool = True, keep_dims: bool = False, **_: Any) -> Value:
    """Index of the greatest lane along an axis; the first of equals."""
    index: Value = max(x, axis, return_indices=True, keep_dims=keep_dims)[1]
    return index


def argmin(x: Value, axis: Any, tie_break_left: bool = True, keep_dims: bool = False, **_: Any) -> Value:
    """Index of the least lane along an axis; the first of equals."""
    index: Value = min(x, axis, return_indices=True, keep_dims=keep_dims)[1]
    return index
