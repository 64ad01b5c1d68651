"""Block pointers and tensor descriptors: rectangular blocks of a strided tensor, cut off at its edges."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.blocks import arange, check_shape, expand_dims
from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.dtypes import PointerType, ScalarType, int32, int64
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.memory import load, store
from fuzz.engine.emulator.operators import arithmetic, bitwise, compare
from fuzz.engine.emulator.value import Number, Value, as_value

_PADDINGS: dict[str, float | None] = {"": None, "zero": 0, "nan": float("nan")}


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Where a block of a tensor lies: extents and strides int64, offsets int32, one of each an axis."""

    base: Value
    extents: tuple[Value, ...]
    strides: tuple[Value, ...]
    offsets: tuple[Value, ...]
    block: tuple[int, ...]

    def addresses(self) -> Value:
        """Pointers to the block's elements, those beyond the edges included."""
        pointer = self.base
        for axis, stride in enumerate(self.strides):
            pointer = arithmetic("add", pointer, arithmetic("mul", self._indices(axis), stride))
        return pointer

    def inside(self, axes: Sequence[int]) -> Value | None:
        """Lanes within the tensor along the given axes; None if there are none to check."""
        mask: Value | None = None
        for axis in axes:
            index = self._indices(axis)
            within = bitwise("and", compare(torch.ge, index, 0), compare(torch.lt, index, self.extents[axis]))
            mask = within if mask is None else bitwise("and", mask, within)
        return mask

    def _indices(self, axis: int) -> Value:
        index = arithmetic("add", cast(self.offsets[axis], int64), arange(0, self.block[axis]))
        others = [other for other in range(len(self.block)) if other != axis]
        return expand_dims(index, others) if others else index


def _integers(items: Sequence[Any], dtype: Any) -> tuple[Value, ...]:
    return tuple(cast(as_value(item), dtype) for item in items)


def _checked(base: Any, *lists: Sequence[Any]) -> None:
    if not isinstance(base, Value) or not isinstance(base.dtype, PointerType) or base.shape:
        raise KernelError("a block pointer or descriptor starts at a scalar pointer")
    if len({len(items) for items in lists}) != 1:
        raise KernelError("shape, strides, offsets and block shape of a block differ in rank")


@dataclass(frozen=True, eq=False)
class BlockPointer:
    """What `make_block_ptr` gives: `load` and `store` take it, `advance` moves it."""

    blocks: _Blocks

    @property
    def dtype(self) -> ScalarType:
        return self.blocks.base.dtype

    def load(self, boundary_check: Sequence[int], padding: str) -> Value:
        """Lanes beyond the checked edges hold the padding, or nothing defined."""
        mask = self.blocks.inside([int(axis) for axis in boundary_check])
        return load(self.blocks.addresses(), mask, None if mask is None else _PADDINGS[padding])

    def store(self, value: Value | Number, boundary_check: Sequence[int]) -> None:
        store(self.blocks.addresses(), value, self.blocks.inside([int(axis) for axis in boundary_check]))


def make_block_ptr(
    base: Value,
    shape: Sequence[Any],
    strides: Sequence[Any],
    offsets: Sequence[Any],
    block_shape: Sequence[Any],
    order: Any = None,
    **_: Any,
) -> BlockPointer:
    """A pointer to a block of a tensor; `order` is a hint about memory and changes nothing."""
    _checked(base, shape, strides, offsets, block_shape)
    extents, steps, starts = _integers(shape, int64), _integers(strides, int64), _integers(offsets, int32)
    return BlockPointer(_Blocks(base, extents, steps, starts, check_shape(block_shape)))


def advance(base: BlockPointer, offsets: Sequence[Any], **_: Any) -> BlockPointer:
    """The block pointer moved by `offsets` elements."""
    if not isinstance(base, BlockPointer):
        raise KernelError("advance takes a block pointer")
    old = base.blocks
    moved = tuple(arithmetic("add", a, b) for a, b in zip(old.offsets, _integers(offsets, int32), strict=True))
    return BlockPointer(replace(old, offsets=moved))


@dataclass(frozen=True, eq=False)
class Descriptor:
    """A tensor descriptor: loads pad at the edges, stores drop what lies beyond."""

    base: Value
    extents: tuple[Value, ...]
    steps: tuple[Value, ...]
    block: tuple[int, ...]
    padding: str = "zero"

    @property
    def dtype(self) -> ScalarType:
        return self.base.dtype.element_ty

    @property
    def shape(self) -> tuple[Value, ...]:
        return self.extents

    @property
    def strides(self) -> tuple[Value, ...]:
        return self.steps

    @property
    def block_shape(self) -> tuple[int, ...]:
        return self.block

    def _at(self, offsets: Sequence[Any]) -> _Blocks:
        if len(offsets) != len(self.block):
            raise KernelError(f"{len(offsets)} offsets into a descriptor of rank {len(self.block)}")
        return _Blocks(self.base, self.extents, self.steps, _integers(offsets, int32), self.block)

    def load(self, offsets: Sequence[Any], **_: Any) -> Value:
        """The block at `offsets`."""
        blocks = self._at(offsets)
        return load(blocks.addresses(), blocks.inside(range(len(self.block))), _PADDINGS[self.padding])

    def store(self, offsets: Sequence[Any], value: Value, **_: Any) -> None:
        """Write the block at `offsets`."""
        blocks = self._at(offsets)
        store(blocks.addresses(), value, blocks.inside(range(len(self.block))))


def make_tensor_descriptor(
    base: Value,
    shape: Sequence[Any],
    strides: Sequence[Any],
    block_shape: Sequence[Any],
    padding_option: str = "zero",
    **_: Any,
) -> Descriptor:
    """A descriptor of a strided tensor. Raises KernelError unless its last stride is 1 and its rows are 16 bytes."""
    _checked(base, shape, strides, block_shape)
    block, steps = check_shape(block_shape), _integers(strides, int64)
    if steps[-1].range() != (1, 1):
        raise KernelError("the last stride of a tensor descriptor must be 1")
    if block[-1] * base.dtype.element_ty.itemsize < 16:
        raise KernelError("a descriptor's block needs 16 bytes or more along its last axis")
    return Descriptor(base, _integers(shape, int64), steps, block, padding_option)


def load_tensor_descriptor(desc: Descriptor, offsets: Sequence[Any], **_: Any) -> Value:
    """`desc.load(offsets)`."""
    return desc.load(offsets)


def store_tensor_descriptor(desc: Descriptor, offsets: Sequence[Any], value: Value, **_: Any) -> None:
    """`desc.store(offsets, value)`."""
    desc.store(offsets, value)


@dataclass
class TensorDescriptor:
    """Host side: `triton.tools.tensor_descriptor.TensorDescriptor`, an argument that becomes a descriptor."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    padding: str = "zero"

    @staticmethod
    def from_tensor(tensor: Tensor, block_shape: Sequence[int], padding: str = "zero") -> "TensorDescriptor":
        return TensorDescriptor(tensor, tensor.shape, tensor.stride(), block_shape, padding)
