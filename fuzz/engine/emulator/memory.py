"""Pointers into tensor arguments: loads and stores within the extent of the argument."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuzz.engine.emulator.casts import RAW, cast, from_bits, to_bits
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import FROM_TORCH, DType, PointerType, int1, int8
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.journal import Access
from fuzz.engine.emulator.options import MaskedLanes
from fuzz.engine.emulator.sanitizer import FindingKind, report
from fuzz.engine.emulator.value import Number, Value, as_value, broadcast_shapes, lift


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor argument as a kernel sees it.

    `raw` views the whole storage as integers of the element's width, untouched and never copied; `base` is
    the element of it where the tensor starts. `low` and `high` are the least and greatest element, counted
    from `base`, that the tensor's shape and strides reach (high < low: none): what lies beyond is out of
    bounds, whether the storage has it or not.
    """

    name: str
    element: DType
    raw: Tensor
    base: int
    low: int
    high: int
    storage: int

    @staticmethod
    def of(tensor: Tensor, name: str) -> Buffer:
        """Raises KernelError for a tensor that is not on the CPU or whose dtype Triton lacks."""
        element = FROM_TORCH.get(tensor.dtype)
        if element is None or tensor.device.type != "cpu":
            raise KernelError(f"argument {name}: no kernel takes {tensor.dtype} on {tensor.device} here")
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=RAW[element.itemsize])
        raw.set_(storage, 0, (storage.nbytes() // element.itemsize,))  # type: ignore[call-overload]
        high = -1
        if tensor.numel():
            high = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Buffer(name, element, raw, int(tensor.storage_offset()), 0, int(high), storage.data_ptr())

    def retyped(self, element: DType) -> Buffer:
        """The same memory seen as elements of another type."""
        before, after = self.element.itemsize, element.itemsize
        if before == after:
            return replace(self, element=element)
        whole = self.raw.numel() * before // after * after // before
        raw = self.raw[:whole].view(RAW[after])
        low, high = self.low * before // after, (self.high + 1) * before // after - 1
        return replace(self, element=element, raw=raw, base=self.base * before // after, low=low, high=high)

    def pointer(self) -> Value:
        """A scalar pointer to the tensor's first element."""
        zero = torch.zeros(1, dtype=torch.int64)
        return Value(zero, PointerType(self.element), buffer=self, bounds=(0, 0))


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Where a load or store goes: `offsets` int64; `active` lanes may touch memory (None: all of them);
    `lost` lanes were asked for and must not (None: none of them). All of one shape.
    """

    offsets: Tensor
    active: Tensor | None
    lost: Tensor | None


def load(pointer: Value, mask: Value | Number | None, other: Value | Number | None) -> Value:
    """The elements that `pointer` points to, under `mask`.

    Masked-off lanes hold `other`, or what the session's options say without it. Lanes out of bounds, and
    lanes with an undefined address, are reported and read as undefined.
    """
    buffer, element = target(pointer)
    if other is not None and mask is None:
        raise KernelError("load takes `other` only together with a mask")
    lanes = _resolve(pointer, buffer, mask, FindingKind.OUT_OF_BOUNDS_LOAD)
    offsets, context = lanes.offsets, active()
    journal = context.journal
    if journal.enabled:
        journal.loaded.add(buffer.storage)
        if journal.note_loads:
            journal.loads.append(_access(buffer, lanes, context.programs))
    shape = offsets.shape
    if buffer.high < buffer.low:
        bits = torch.zeros(shape, dtype=buffer.raw.dtype)
    else:
        index = (offsets if lanes.active is None else offsets.clamp(buffer.low, buffer.high)) + buffer.base
        bits = buffer.raw.index_select(0, index.reshape(-1)).reshape(shape)
    data = from_bits(bits, element)
    if lanes.active is None:
        return Value(data, element)
    undefined = lanes.lost
    if other is not None:
        fill = cast(as_value(other), element)
        data = torch.where(lanes.active, data, lift(fill.data, data.ndim))
        if fill.undefined is not None:
            spared = lift(fill.undefined, data.ndim) & ~lanes.active
            undefined = spared if undefined is None else undefined | spared
    else:
        off, zero = ~lanes.active, context.options.masked_lanes is MaskedLanes.ZERO
        # A lane without meaning holds NaN where it can, so that a taint that got lost shows in the output.
        data = data.masked_fill(off, torch.nan if data.is_floating_point() and not zero else 0)
        undefined = undefined if zero else off
    return Value(data, element, undefined=undefined)


def store(pointer: Value, value: Value | Number, mask: Value | Number | None) -> None:
    """Write `value`, cast to the pointer's element type, under `mask`. Programs write in grid order.

    Lanes out of bounds, and lanes with an undefined address, are reported and dropped.
    """
    buffer, element = target(pointer)
    value = cast(as_value(value), int8 if element is int1 else element)
    if len(value.shape) > len(pointer.shape):
        raise KernelError(f"a block of shape {list(value.shape)} cannot go to a pointer {list(pointer.shape)}")
    lanes = _resolve(pointer, buffer, mask, FindingKind.OUT_OF_BOUNDS_STORE, like=value.data)
    shape = lanes.offsets.shape
    if value.undefined is not None:
        stored = lift(value.undefined, len(shape)).expand(shape)
        stored = stored if lanes.active is None else stored & lanes.active
        report(FindingKind.UNDEFINED_OUTPUT, stored, lanes.offsets, buffer)
    bits = lift(to_bits(value.data, value.dtype), len(shape)).expand(shape)  # type: ignore[arg-type]
    access = _access(buffer, lanes, active().programs)
    bits = bits.reshape(-1) if lanes.active is None else bits[lanes.active]
    journal = active().journal
    if journal.enabled:
        journal.store(access, buffer.raw)
    # On one axis scatter_ runs in order: of two lanes with one address the later wins.
    buffer.raw.scatter_(0, access.index, bits)


def target(pointer: Value) -> tuple[Buffer, DType]:
    """Buffer and element type that a pointer goes to. Raises KernelError for anything else."""
    if not isinstance(pointer, Value) or not isinstance(pointer.dtype, PointerType) or pointer.buffer is None:
        raise KernelError("load and store take a pointer, or a block of pointers")
    return pointer.buffer, pointer.dtype.element_ty


def _access(buffer: Buffer, lanes: _Lanes, programs: Tensor) -> Access:
    offsets = lanes.offsets.reshape(-1) if lanes.active is None else lanes.offsets[lanes.active]
    shape = lanes.offsets.shape
    return Access(buffer.storage, buffer.element.itemsize, offsets + buffer.base, shape, lanes.active, programs)


def _resolve(
    pointer: Value,
    buffer: Buffer,
    mask: Value | Number | None,
    out_of_bounds: FindingKind,
    like: Tensor | None = None,
) -> _Lanes:
    """Check the lanes of an access and report what is wrong with them.

    `like`: data that goes to memory; if it has a program axis, so have the lanes.
    """
    offsets, wanted, ndim = pointer.data, None, pointer.data.ndim
    if mask is not None:
        mask = as_value(mask)
        if mask.dtype is not int1:
            mask = cast(mask, int1)
        if len(mask.shape) > len(pointer.shape):
            raise KernelError("a block mask cannot go with a scalar pointer")
        if not bool(mask.data.all()):
            wanted = lift(mask.data, ndim)
    shape: tuple[int, ...] = offsets.shape
    unsure = mask.undefined if isinstance(mask, Value) else None
    for partner in (wanted, unsure, like):
        if partner is not None:
            shape = broadcast_shapes(shape, lift(partner, ndim).shape)
    if shape[1:] != offsets.shape[1:]:
        raise KernelError(f"pointers of shape {list(offsets.shape[1:])} cannot serve lanes {list(shape[1:])}")
    offsets = offsets.expand(shape)
    wanted = None if wanted is None else wanted.expand(shape)
    lost: Tensor | None = None
    if unsure is not None:
        lost = lift(unsure, ndim).expand(shape)
    if pointer.undefined is not None:
        bad = lift(pointer.undefined, ndim).expand(shape)
        bad = bad if wanted is None else bad & wanted
        lost = bad if lost is None else lost | bad
    if lost is not None:
        report(FindingKind.UNDEFINED_ADDRESS, lost, offsets, buffer)
    if pointer.wrapped is not None:
        bad = lift(pointer.wrapped, ndim).expand(shape)
        report(FindingKind.INT32_WRAP_ADDRESS, bad if wanted is None else bad & wanted, offsets, buffer)
    low, high = pointer.range()
    if low < buffer.low or high > buffer.high:
        outside = (offsets < buffer.low) | (offsets > buffer.high)
        outside = outside if wanted is None else outside & wanted
        outside = outside if lost is None else outside & ~lost
        if bool(outside.any()):
            report(out_of_bounds, outside, offsets, buffer)
            lost = outside if lost is None else lost | outside
    if lost is not None and bool(lost.any()):
        wanted = ~lost if wanted is None else wanted & ~lost
    else:
        lost = None
    return _Lanes(offsets, wanted, lost)
