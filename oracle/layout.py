"""Layouts of a KV cache: shapes, packing, and the address of a single slot.

With x = 16 bytes // itemsize of the storage dtype and g = page_size:

    linear              [num_blocks * g, H, D]            cache[s, h, d]
    nhd                 [num_blocks, g, H, D]             cache[b, o, h, d]
    hnd                 [num_blocks, H, g, D]             cache[b, h, o, d]
    shuffle_5d, K       [num_blocks, H, D // x, g, x]     cache[b, h, d // x, o, d % x]
    shuffle_5d, V 5d    [num_blocks, H, g // x, D, x]     cache[b, h, o // x, d, o % x]
    shuffle_5d, V 4d    [num_blocks, H, D, g]             cache[b, h, d, o]

all holding element [s, h, d] of the linear tensor, where slot s has page b = s // g and offset o = s % g.
Nothing here interprets values: every function moves bit patterns, NaN payloads included.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from oracle.bits import bits
from oracle.kinds import KVLayout, Role, VLayout

VECTOR_BYTES = 16

Index = TypeVar("Index", int, Tensor)


class LayoutError(ValueError):
    """A shape, dtype or slot that the layout cannot hold: one line with the field and what is allowed."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LayoutError(message)


def vector_width(dtype: torch.dtype) -> int:
    """Elements in one 16-byte vector: the x of SHUFFLE 5D, for the *storage* dtype of the cache."""
    _require(dtype.itemsize <= 8, f"dtype: {dtype} has {dtype.itemsize} bytes, allowed are 1, 2, 4 and 8")
    return VECTOR_BYTES // dtype.itemsize


@dataclass(frozen=True)
class CacheGeometry:
    """Everything that fixes where an element of one K or V cache lies.

    `dim` is D_qk for K and D_v for V; `dtype` is the dtype in which the cache is stored (uint8 for a cache
    that keeps fp8 as bytes). `v_layout` matters for V under SHUFFLE 5D only. Raises LayoutError.
    """

    layout: KVLayout
    role: Role
    num_blocks: int
    heads: int
    page_size: int
    dim: int
    dtype: torch.dtype
    v_layout: VLayout = VLayout.V5D

    def __post_init__(self) -> None:
        _require(self.num_blocks >= 0, f"num_blocks: {self.num_blocks}, allowed are integers >= 0")
        for name in ("heads", "page_size", "dim"):
            _require(getattr(self, name) >= 1, f"{name}: {getattr(self, name)}, allowed are integers >= 1")
        x = vector_width(self.dtype)
        if self.layout == KVLayout.SHUFFLE_5D:
            if self.role == Role.K:
                self._require_multiple("dim", self.dim, x)
            elif self.v_layout == VLayout.V5D:
                self._require_multiple("page_size", self.page_size, x)

    def _require_multiple(self, name: str, value: int, x: int) -> None:
        _require(
            value % x == 0,
            f"{name}: {value}, allowed are multiples of x = {x} for {self.role} in {self.layout} of {self.dtype}",
        )

    @property
    def num_slots(self) -> int:
        """Tokens that the cache can hold."""
        return self.num_blocks * self.page_size

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the cache tensor."""
        sizes = (*self._axes.slot, self.heads, *self._axes.dim)
        return tuple(sizes[axis] for axis in self._axes.order)

    @cached_property
    def _axes(self) -> "_Axes":
        blocks, page, dim, x = self.num_blocks, self.page_size, self.dim, vector_width(self.dtype)
        match self.layout, self.role, self.v_layout:
            case KVLayout.LINEAR, _, _:
                return _Axes((self.num_slots,), (dim,), (0, 1, 2))
            case KVLayout.NHD, _, _:
                return _Axes((blocks, page), (dim,), (0, 1, 2, 3))
            case KVLayout.HND, _, _:
                return _Axes((blocks, page), (dim,), (0, 2, 1, 3))
            case KVLayout.SHUFFLE_5D, Role.K, _:
                return _Axes((blocks, page), (dim // x, x), (0, 2, 3, 1, 4))
            case KVLayout.SHUFFLE_5D, Role.V, VLayout.V5D:
                return _Axes((blocks, page // x, x), (dim,), (0, 3, 1, 4, 2))
            case KVLayout.SHUFFLE_5D, Role.V, VLayout.V4D:
                return _Axes((blocks, page), (dim,), (0, 2, 3, 1))
        raise LayoutError(
            f"layout: {self.layout!r}, {self.role!r}, {self.v_layout!r}, allowed are members of "
            "KVLayout, Role and VLayout"
        )


@dataclass(frozen=True)
class _Axes:
    """A layout as a split and a transposition.

    The linear tensor's slot and dim axes are split into `slot` and `dim` (outermost first), which gives the
    axes (*slot, heads, *dim); axis i of the cache is the `order[i]`-th of these.
    """

    slot: tuple[int, ...]
    dim: tuple[int, ...]
    order: tuple[int, ...]


def cache_shape(
    layout: KVLayout,
    role: Role,
    num_blocks: int,
    heads: int,
    page_size: int,
    dim: int,
    dtype: torch.dtype,
    v_layout: VLayout = VLayout.V5D,
) -> tuple[int, ...]:
    """Shape of the cache that `CacheGeometry` of the same arguments describes. Raises LayoutError."""
    return CacheGeometry(layout, role, num_blocks, heads, page_size, dim, dtype, v_layout).shape


def cache_axes(layout: KVLayout, role: Role, v_layout: VLayout = VLayout.V5D) -> str:
    """The axes of a cache, by name, outermost first."""
    match layout, role, v_layout:
        case KVLayout.LINEAR, _, _:
            return "slots heads dim"
        case KVLayout.NHD, _, _:
            return "blocks page heads dim"
        case KVLayout.HND, _, _:
            return "blocks heads page dim"
        case _, Role.K, _:
            return "blocks heads dim/x page x"
        case _, _, VLayout.V5D:
            return "blocks heads page/x dim x"
    return "blocks heads dim page"


def geometry_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: KVLayout,
    role: Role,
    v_layout: VLayout = VLayout.V5D,
    page_size: int = 1,
) -> CacheGeometry:
    """The geometry of a cache of this shape: inverse of `CacheGeometry.shape`.

    `page_size` is that of a linear cache, whose shape does not tell it. Raises LayoutError.
    """
    axes = cache_axes(layout, role, v_layout)
    _require(len(shape) == len(axes.split()), f"{list(shape)}; allowed: [{axes}] for {layout}")
    size = dict(zip(axes.split(), shape, strict=True))
    page = size["page/x"] * size["x"] if "page/x" in size else size.get("page", page_size)
    dim = size["dim/x"] * size["x"] if "dim/x" in size else size["dim"]
    blocks = size["slots"] // page if "slots" in size else size["blocks"]
    made = CacheGeometry(layout, role, blocks, size["heads"], page, dim, dtype, v_layout)
    _require(made.shape == shape, f"{list(shape)}; allowed: {list(made.shape)} for {layout} of {dtype}")
    return made


def slot_of(page: Index, offset: Index, page_size: int) -> Index:
    """Slot of row `offset` in page `page`; integers or integer tensors."""
    return page * page_size + offset


def page_of(slot: Index, page_size: int) -> Index:
    """Page that holds `slot`."""
    return slot // page_size


def offset_of(slot: Index, page_size: int) -> Index:
    """Row of `slot` within its page."""
    return slot % page_size


def pack(linear: Tensor, geometry: CacheGeometry) -> Tensor:
    """A new contiguous cache of `geometry.shape` holding `linear` [num_slots, H, D]. Raises LayoutError."""
    _require_tensor("linear", linear, (geometry.num_slots, geometry.heads, geometry.dim), geometry.dtype)
    axes = geometry._axes
    split = bits(linear).reshape(*axes.slot, geometry.heads, *axes.dim)
    return split.permute(axes.order).clone(memory_format=torch.contiguous_format).view(geometry.dtype)


def unpack(cache: Tensor, geometry: CacheGeometry) -> Tensor:
    """Inverse of `pack`: a new contiguous [num_slots, H, D] from a cache of any strides.

    Raises LayoutError.
    """
    _require_tensor("cache", cache, geometry.shape, geometry.dtype)
    split = bits(cache).permute(_inverse(geometry._axes.order)).clone(memory_format=torch.contiguous_format)
    return split.view(geometry.num_slots, geometry.heads, geometry.dim).view(geometry.dtype)


def element_index(slots: Tensor, geometry: CacheGeometry, strides: tuple[int, ...] | None = None) -> Tensor:
    """Offsets within the cache, in elements, of the rows `slots` [T]: int64 [T, H, D] on the slots' device.

    `strides` are the cache's own; without them the cache is taken to be contiguous. Raises LayoutError for a
    slot outside the cache (a negative slot has no address: what it means is for its caller to say).
    """
    slots = _checked_slots(slots, geometry)
    axes = geometry._axes
    if strides is None:
        strides = _contiguous_strides(geometry.shape)
    split_strides = [strides[axes.order.index(axis)] for axis in range(len(axes.order))]
    slot_strides, (head_stride, *dim_strides) = (
        split_strides[: len(axes.slot)],
        split_strides[len(axes.slot) :],
    )
    heads = torch.arange(geometry.heads, device=slots.device)
    dims = torch.arange(geometry.dim, device=slots.device)
    return (
        _split_offset(slots, axes.slot, slot_strides)[:, None, None]
        + (heads * head_stride)[:, None]
        + _split_offset(dims, axes.dim, dim_strides)
    )


def read_slots(cache: Tensor, slots: Tensor, geometry: CacheGeometry) -> Tensor:
    """The rows `slots` [T] of a cache of any strides, as [T, H, D]; touches no other row.

    Raises LayoutError.
    """
    _require_tensor("cache", cache, geometry.shape, geometry.dtype)
    index = element_index(slots.to(cache.device), geometry, cache.stride())
    return _flat(cache)[index].view(geometry.dtype)


def write_slots(cache: Tensor, slots: Tensor, values: Tensor, geometry: CacheGeometry) -> None:
    """Store `values` [T, H, D] in the rows `slots` [T] of `cache`, in place; touches no other row.

    Raises LayoutError, also for a slot given twice: which row would win is defined nowhere.
    """
    _require_tensor("cache", cache, geometry.shape, geometry.dtype)
    place = _checked_slots(slots, geometry).to(cache.device)
    _require_tensor("values", values, (len(slots), geometry.heads, geometry.dim), geometry.dtype)
    distinct = len(torch.unique(slots))
    _require(distinct == len(slots), f"slots: {len(slots)} given, {distinct} distinct, allowed is each one once")
    axes, split = geometry._axes, []
    for size in reversed(axes.slot[1:]):
        split.append(place % size)
        place = place // size
    rows = bits(cache).permute(_inverse(axes.order))
    rows[(place, *reversed(split))] = bits(values).reshape(len(slots), geometry.heads, *axes.dim).to(cache.device)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _flat(cache: Tensor) -> Tensor:
    """The memory under `cache`, gaps between its strides included, as a 1-D integer view."""
    if cache.numel() == 0:
        return bits(cache).reshape(0)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    return bits(cache).as_strided((extent,), (1,))


def _split_offset(index: Tensor, sizes: tuple[int, ...], strides: list[int]) -> Tensor:
    """Offset of flat `index` into axes of `sizes` (outermost first) that lie `strides` elements apart."""
    offset = torch.zeros_like(index)
    for size, stride in zip(reversed(sizes[1:]), reversed(strides[1:]), strict=True):
        offset += index % size * stride
        index = index // size
    return offset + index * strides[0]


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _checked_slots(slots: Tensor, geometry: CacheGeometry) -> Tensor:
    _require(
        slots.dim() == 1 and slots.dtype in (torch.int32, torch.int64),
        f"slots: {slots.dtype} of shape {tuple(slots.shape)}, allowed is int32 or int64 of shape [T]",
    )
    slots = slots.long()
    outside = slots[(slots < 0) | (slots >= geometry.num_slots)]
    if len(outside):
        raise LayoutError(f"slots: {int(outside[0])}, allowed are 0 .. {geometry.num_slots - 1}")
    return slots


def _require_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _require(
        tuple(tensor.shape) == shape and tensor.dtype == dtype,
        f"{name}: {tensor.dtype} of shape {list(tensor.shape)}, allowed is {dtype} of shape {list(shape)}",
    )
