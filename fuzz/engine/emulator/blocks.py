"""Functions of the language that make, shape and rearrange blocks, and that ask about the grid."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import ScalarType, int32
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.operators import Operand, operands
from fuzz.engine.emulator.value import Value, as_value, broadcast_shapes, constant, lift

_MOST_ELEMENTS = 1 << 20  # Triton's limit for a block


def check_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    """A block's shape as integers. Raises KernelError unless each is a power of two and the block fits."""
    sizes = tuple(int(size) for size in shape)
    for size in sizes:
        if size <= 0 or size & (size - 1):
            raise KernelError(f"shape {list(sizes)}: {size} is not a power of 2")
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise KernelError(f"shape {list(sizes)} has more than {_MOST_ELEMENTS} elements")
    return sizes


def _listed(items: tuple[Any, ...]) -> Sequence[Any]:
    """Dimensions given one by one, or as one list."""
    return items[0] if len(items) == 1 and isinstance(items[0], (list, tuple)) else items


def arange(start: Any, end: Any, **_: Any) -> Value:
    """Integers start .. end - 1; their number must be a power of two."""
    low, high = int(start), int(end)
    if high <= low:
        raise KernelError(f"arange({low}, {high}) is empty")
    check_shape([high - low])
    data = torch.arange(low, high, dtype=torch.int32).reshape(1, -1)
    return Value(data, int32, bounds=(low, high - 1))


def full(shape: Sequence[Any], value: Operand, dtype: ScalarType, **_: Any) -> Value:
    """A block of one value, cast to `dtype`."""
    sizes = check_shape(shape)
    scalar = cast(as_value(value), dtype)
    if scalar.numel != 1:
        raise KernelError("full takes a scalar")
    flat = scalar.like(lambda data: data.reshape(data.shape[0]))
    return flat.like(lambda data: lift(data, 1 + len(sizes)).expand(-1, *sizes).contiguous())


def zeros(shape: Sequence[Any], dtype: ScalarType, **_: Any) -> Value:
    """A block of zeros."""
    return full(shape, 0, dtype)


def zeros_like(x: Value, **_: Any) -> Value:
    """Zeros of the shape and type of `x`."""
    return full(x.shape, 0, x.dtype)


def program_id(axis: Any, **_: Any) -> Value:
    """Position of the program along a grid axis."""
    context, axis = active(), _axis(axis)
    size, stride = context.grid[axis], math.prod(context.grid[:axis])
    if size == 1:
        return constant(0, int32)
    ids = torch.div(context.programs, stride, rounding_mode="floor") if stride > 1 else context.programs
    return Value((ids % size).int(), int32, bounds=(0, size - 1))


def num_programs(axis: Any, **_: Any) -> Value:
    """Size of a grid axis."""
    return constant(active().grid[_axis(axis)], int32)


def _axis(axis: Any) -> int:
    if int(axis) not in (0, 1, 2):
        raise KernelError(f"a grid has axes 0, 1 and 2, not {int(axis)}")
    return int(axis)


def dimension_of(x: Value, axis: Any, extra: int = 0) -> int:
    """An axis of the block as an axis of its data, behind the program axis."""
    rank = len(x.shape) + extra
    position = int(axis)
    if not -rank <= position < rank:
        raise KernelError(f"axis {position} of a block of rank {rank}")
    return 1 + position % rank


def reshape(x: Value, *shape: Any, can_reorder: bool = False, **_: Any) -> Value:
    """The block's elements, row-major, in another shape."""
    sizes = check_shape(_listed(shape))
    if math.prod(sizes) != x.numel:
        raise KernelError(f"cannot reshape {list(x.shape)} to {list(sizes)}")
    return x.like(lambda data: data.reshape(data.shape[0], *sizes))


def ravel(x: Value, **_: Any) -> Value:
    """The block as a vector."""
    return reshape(x, [x.numel])


def expand_dims(x: Value, axis: Any, **_: Any) -> Value:
    """A new axis of size 1, or several."""
    if isinstance(axis, (list, tuple)):
        for position in sorted(int(a) % (len(x.shape) + len(axis)) for a in axis):
            x = expand_dims(x, position)
        return x
    dimension = dimension_of(x, axis, extra=1)
    return x.like(lambda data: data.unsqueeze(dimension))


def squeeze(x: Value, dim: Any, **_: Any) -> Value:
    """The block without an axis of size 1."""
    dimension = dimension_of(x, dim)
    if x.data.shape[dimension] != 1:
        raise KernelError(f"axis {int(dim)} of a block of shape {list(x.shape)} is not of size 1")
    return x.like(lambda data: data.squeeze(dimension))


def broadcast_to(x: Value, *shape: Any, **_: Any) -> Value:
    """The block repeated along its axes of size 1; a scalar becomes a block."""
    sizes = check_shape(_listed(shape))
    old = (1,) * (len(sizes) - len(x.shape)) + x.shape
    if len(old) != len(sizes) or any(m not in (1, n) for m, n in zip(old, sizes, strict=True)):
        raise KernelError(f"cannot broadcast {list(x.shape)} to {list(sizes)}")
    return x.like(lambda data: lift(data, 1 + len(sizes)).expand(-1, *sizes))


def broadcast(a: Operand, b: Operand, **_: Any) -> tuple[Value, Value]:
    """Both blocks in their common shape."""
    x, y = as_value(a), as_value(b)
    ndim = max(x.data.ndim, y.data.ndim)
    shape = broadcast_shapes(lift(x.data, ndim).shape, lift(y.data, ndim).shape)[1:]
    return broadcast_to(x, shape), broadcast_to(y, shape)


def trans(x: Value, *dims: Any, **_: Any) -> Value:
    """The block with its axes permuted; without `dims` the last two are swapped."""
    order = [int(d) for d in _listed(dims)] or [*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2]
    if sorted(order) != list(range(len(x.shape))):
        raise KernelError(f"axes {order} do not permute a block of shape {list(x.shape)}")
    return x.like(lambda data: data.permute(0, *(1 + d for d in order)))


def flip(x: Value, dim: Any = None, **_: Any) -> Value:
    """The block reversed along an axis (the last one)."""
    dimension = dimension_of(x, len(x.shape) - 1 if dim is None else dim)
    return x.like(lambda data: data.flip(dimension))


def join(a: Operand, b: Operand, **_: Any) -> Value:
    """Both blocks stacked along a new last axis."""
    x, y, dtype = operands(a, b)
    x, y = broadcast(x, y)
    return _stack([x, y], dtype)


def _stack(parts: list[Value], dtype: ScalarType) -> Value:
    return concatenate([part.like(lambda data: data.unsqueeze(-1)) for part in parts], parts[0].data.ndim, dtype)


def concatenate(parts: list[Value], dimension: int, dtype: ScalarType | None = None) -> Value:
    """Values end to end along an axis of their data; the other axes agree."""
    programs = max(len(part.data) for part in parts)
    off = torch.zeros((), dtype=torch.bool)

    def joined(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.expand(programs, *t.shape[1:]) for t in tensors], dimension)

    def taint(masks: list[Tensor | None]) -> Tensor | None:
        if all(mask is None for mask in masks):
            return None
        shapes = [part.data.shape for part in parts]
        return joined([(off if m is None else m).expand(s) for m, s in zip(masks, shapes, strict=True)])

    return Value(
        joined([part.data for part in parts]),
        dtype or parts[0].dtype,
        undefined=taint([part.undefined for part in parts]),
        wrapped=taint([part.wrapped for part in parts]),
    )


def cat(a: Value, b: Value, can_reorder: bool = False, dim: Any = 0, **_: Any) -> Value:
    """Both blocks end to end. Triton allows any order (`can_reorder`); here it is that of the arguments."""
    if a.dtype != b.dtype or len(a.shape) != len(b.shape):
        raise KernelError(f"cat of {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}")
    return concatenate([a, b], dimension_of(a, dim))


def interleave(a: Operand, b: Operand, **_: Any) -> Value:
    """Lanes of both in turn along the last axis."""
    joined = join(a, b)
    return reshape(joined, [*joined.shape[:-2], 2 * joined.shape[-2]] if len(joined.shape) > 1 else [2])


def split(x: Value, **_: Any) -> tuple[Value, Value]:
    """Inverse of `join`."""
    if x.shape[-1:] != (2,):
        raise KernelError(f"split takes a last axis of size 2, not {list(x.shape)}")
    return x.like(lambda data: data[..., 0]), x.like(lambda data: data[..., 1])


def subscript(x: Value, index: Any) -> Value:
    """`x[:, None]`: new axes only, as the language allows.

    Of a scalar Triton 3.6 keeps the new axes and ignores `:`; 3.9 refuses it.
    """
    items = index if isinstance(index, tuple) else (index,)
    if any(not (item is None or item == slice(None)) for item in items):
        raise KernelError("a block's subscripts are `:` and None")
    if not x.shape:
        items = tuple(item for item in items if item is None)
    if sum(item is not None for item in items) != len(x.shape):
        raise KernelError(f"{len(items)} subscripts do not fit a block of shape {list(x.shape)}")
    return x.like(lambda data: data[(slice(None), *items)])


def as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the table as a method of tensors."""
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)
