"""Pointers into tensor arguments: loads and stores within the extent of the argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuzz.engine.emulator.casts import RAW, cast, from_bits, to_bits
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import FROM_TORCH, DType, PointerType, int1, int8
from fuzz.engine.emulator.errors import KernelError, user_location
from fuzz.engine.emulator.journal import Access, Store
from fuzz.engine.emulator.masks import both, either, every, some
from fuzz.engine.emulator.options import MaskedLanes
from fuzz.engine.emulator.provenance import Origin, from_origin
from fuzz.engine.emulator.races import Races
from fuzz.engine.emulator.sanitizer import FindingKind, report
from fuzz.engine.emulator.session import fresh_memory
from fuzz.engine.emulator.value import Number, Value, as_value, broadcast_shapes, join_taints, lift


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor argument as a kernel sees it.

    `raw` views the whole storage as integers of the element's width, untouched and never copied; `base` is
    the element of it where the tensor starts. `low` and `high` are the least and greatest element, counted
    from `base`, that the tensor's shape and strides reach (high < low: none): what lies beyond is out of
    bounds, whether the storage has it or not. `marks`, as wide as `raw`: not 0 where nobody has written; None
    for memory that counts as written.
    """

    name: str
    element: DType
    raw: Tensor
    base: int
    low: int
    high: int
    storage: int
    marks: Tensor | None = None

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
        fresh = fresh_memory(storage.data_ptr())
        marks = None if fresh is None else fresh.marks()
        if marks is not None:
            marks = _as_wide(marks, element.itemsize)
        return Buffer(name, element, raw, int(tensor.storage_offset()), 0, int(high), storage.data_ptr(), marks)

    def retyped(self, element: DType) -> Buffer:
        """The same memory seen as elements of another type."""
        before, after = self.element.itemsize, element.itemsize
        if before == after:
            return replace(self, element=element)
        whole = self.raw.numel() * before // after * after // before
        raw = self.raw[:whole].view(RAW[after])
        low, high = self.low * before // after, (self.high + 1) * before // after - 1
        marks = None if self.marks is None else _as_wide(self.marks.view(torch.uint8), after)
        base = self.base * before // after
        return replace(self, element=element, raw=raw, base=base, low=low, high=high, marks=marks)

    def places(self, offsets: Tensor) -> Tensor:
        """Elements of `raw` at offsets from the tensor's start."""
        return offsets + self.base if self.base else offsets

    def pointer(self) -> Value:
        """A scalar pointer to the tensor's first element."""
        zero = torch.zeros(1, dtype=torch.int64)
        return Value(zero, PointerType(self.element), buffer=self, bounds=(0, 0))


def _as_wide(marks: Tensor, itemsize: int) -> Tensor:
    """Marks of bytes as marks of elements: not 0 where any byte of an element has one."""
    return marks[: marks.numel() // itemsize * itemsize].view(RAW[itemsize])


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Where a load or store goes: `offsets` int64; `active` lanes may touch memory (None: all of them);
    `lost` lanes were asked for and must not (None: none of them). All of one shape.
    """

    offsets: Tensor
    active: Tensor | None
    lost: Tensor | None


def load(pointer: Value, mask: Value | Number | None, other: Value | Number | None, *, atomic: bool = False) -> Value:
    """The elements that `pointer` points to, under `mask`.

    Masked-off lanes hold `other`, or what the session's options say without it. Lanes out of bounds, and
    lanes with an undefined address, are reported and read as undefined; so do elements that nobody has
    written, which are reported when they reach an output. `atomic`: part of an atomic function.
    """
    buffer, element = target(pointer)
    if other is not None and mask is None:
        raise KernelError("load takes `other` only together with a mask")
    lanes = _resolve(pointer, buffer, mask, FindingKind.OUT_OF_BOUNDS_LOAD)
    offsets, context = lanes.offsets, active()
    _note_load(buffer, lanes, atomic)
    if context.coverage is not None:
        context.coverage.access("load", _mask_of(mask), pointer.numel)
    shape = offsets.shape
    unwritten = None
    if buffer.high < buffer.low:
        bits = torch.zeros(shape, dtype=buffer.raw.dtype)
    else:
        low, high = pointer.range()
        within = lanes.active is None or (buffer.low <= low and high <= buffer.high)
        index = buffer.places(offsets if within else offsets.clamp(buffer.low, buffer.high)).reshape(-1)
        bits = buffer.raw.index_select(0, index).reshape(shape)
        if buffer.marks is not None:
            unwritten = _unwritten(buffer.marks.index_select(0, index).reshape(shape) != 0, buffer, lanes)
    data = from_bits(bits, element)
    if lanes.active is None:
        return Value(data, element, undefined=unwritten)
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
        if not zero:
            undefined = off if undefined is None else either(undefined, off)
    return Value(data, element, undefined=join_taints(data.ndim, undefined, unwritten))


def _unwritten(marked: Tensor, buffer: Buffer, lanes: _Lanes) -> Tensor | None:
    if lanes.active is not None:
        marked = both(marked, lanes.active)
    if not some(marked):
        return None
    location = user_location()
    origin = Origin(location.file, location.line, buffer.name, (buffer.low, buffer.high))
    return from_origin(marked, origin, lanes.offsets)


def store(
    pointer: Value, value: Value | Number, mask: Value | Number | None, *, atomic: bool = False, exact: bool = False
) -> None:
    """Write `value`, cast to the pointer's element type, under `mask`. Programs write in grid order.

    Lanes out of bounds, and lanes with an undefined address, are reported and dropped. `atomic`: part of an
    atomic function. `exact`: the instruction does not cast, so that a value of another type is reported.
    """
    buffer, element = target(pointer)
    given = as_value(value)
    value = cast(given, int8 if element is int1 else element)
    if len(value.shape) > len(pointer.shape):
        raise KernelError(f"a block of shape {list(value.shape)} cannot go to a pointer {list(pointer.shape)}")
    if exact:
        check_store_dtype(pointer, given)
    lanes = _resolve(pointer, buffer, mask, FindingKind.OUT_OF_BOUNDS_STORE, like=value.data)
    coverage, shape = active().coverage, lanes.offsets.shape
    if coverage is not None:
        coverage.access("store", _mask_of(mask), pointer.numel)
    if value.undefined is not None:
        stored = lift(value.undefined, len(shape)).expand(shape)
        stored = stored if lanes.active is None else both(stored, lanes.active)
        report(FindingKind.UNDEFINED_OUTPUT, stored, lanes.offsets, buffer)
    bits = lift(to_bits(value.data, value.dtype), len(shape)).expand(shape)  # type: ignore[arg-type]
    bits = bits.reshape(-1) if lanes.active is None else bits[lanes.active]
    _write(buffer, lanes, _access(buffer, lanes, atomic), bits)


def _write(buffer: Buffer, lanes: _Lanes, access: Access, bits: Tensor) -> None:
    """Scatter, and note what is needed to take it back or to see a race."""
    raw, index, marks = buffer.raw, access.index, buffer.marks
    journal, races = active().journal, active().races
    watched = journal.enabled or races is not None
    before = raw.index_select(0, index) if watched else bits
    marks_before = marks.index_select(0, index) if marks is not None and journal.enabled else None
    # On one axis scatter_ runs in order: of two lanes with one address the later wins.
    raw.scatter_(0, index, bits)
    if marks is not None:
        marks.scatter_(0, index, torch.zeros(1, dtype=marks.dtype).expand(index.shape))
    if not watched:
        return
    changed = before != bits
    if journal.enabled:
        contested = not torch.equal(raw.index_select(0, index), bits)
        journal.stores.append(Store(access, buffer, bits, before, changed, contested, marks_before))
    elif races is not None:
        stores, loads = races.store(access, changed)
        _report_races(FindingKind.RACING_STORES, races, stores, lanes, buffer, "that program stores it")
        _report_races(FindingKind.RACING_LOAD, races, loads, lanes, buffer, "that program loads it")


def store_in_turn(stores: Sequence[Store], programs: Tensor, races: Races) -> None:
    """Do stores that were taken back once more, as if the programs had run one after the other."""
    context, lanes_of = active(), [store.by_program() for store in stores]
    context.races = races
    for program in programs.tolist():
        context.programs = torch.tensor([program])
        races.begin(program)
        for done, lanes in zip(stores, lanes_of, strict=True):
            if program in lanes:
                index, bits = done.access.index[lanes[program]], done.bits[lanes[program]]
                access = replace(
                    done.access, index=index, shape=(1, len(index)), active=None, programs=context.programs
                )
                context.location = done.access.location
                _write(done.buffer, _Lanes((index - done.buffer.base)[None], None, None), access, bits)
    context.races = context.location = None


def _note_load(buffer: Buffer, lanes: _Lanes, atomic: bool) -> None:
    context = active()
    journal, races = context.journal, context.races
    if journal.enabled:
        if buffer.name in journal.noted:
            journal.loads.append(_access(buffer, lanes, atomic))
        else:
            journal.loaded.setdefault(buffer.storage, set()).add(buffer.name)
    elif races is not None and races.wants(buffer.storage, buffer.name):
        codes = races.load(_access(buffer, lanes, atomic))
        _report_races(FindingKind.RACING_LOAD, races, codes, lanes, buffer, "that program stores it")


def _mask_of(mask: Value | Number | None) -> Tensor | None:
    return None if mask is None else as_value(mask).data != 0


def _report_races(
    kind: FindingKind, races: Races, codes: Tensor | None, lanes: _Lanes, buffer: Buffer, detail: str
) -> None:
    """Report the lanes of an access that race, given what they race with (see `Races.load`)."""
    if codes is None:
        return
    for location, program, racing in races.opponents(codes):
        if lanes.active is None:
            racing = racing.reshape(lanes.offsets.shape)
        else:
            racing = torch.zeros(lanes.offsets.shape, dtype=torch.bool).masked_scatter(lanes.active, racing)
        report(kind, racing, lanes.offsets, buffer, detail=f"{detail} at {location}", other=program)


def check_store_dtype(pointer: Value, value: Value) -> None:
    """Report a value whose type is not that of the elements it goes to, for instructions that do not cast."""
    buffer, element = target(pointer)
    if value.dtype != element:
        lanes = torch.ones_like(pointer.data, dtype=torch.bool)
        detail = f"a value of {value.dtype} to elements of {element}"
        report(FindingKind.STORE_DTYPE, lanes, pointer.data, buffer, detail=detail)


def synchronise(pointer: Value, mask: Value | Number | None, sem: str | None) -> None:
    """A scalar atomic was done: it may order programs, unless `sem` is "relaxed". Blocks order nothing."""
    if pointer.numel != 1 or sem == "relaxed":
        return
    context = active()
    context.journal.synchronised = True
    if context.races is None or (mask is not None and not some(as_value(mask).data)):
        return
    buffer, element = target(pointer)
    address = (int(pointer.data.reshape(-1)[0]) + buffer.base) * element.itemsize
    context.races.synchronise(buffer.storage, address, acquire=sem != "release", release=sem != "acquire")


def target(pointer: Value) -> tuple[Buffer, DType]:
    """Buffer and element type that a pointer goes to. Raises KernelError for anything else."""
    if not isinstance(pointer, Value) or not isinstance(pointer.dtype, PointerType) or pointer.buffer is None:
        raise KernelError("load and store take a pointer, or a block of pointers")
    return pointer.buffer, pointer.dtype.element_ty


def _access(buffer: Buffer, lanes: _Lanes, atomic: bool) -> Access:
    offsets = lanes.offsets.reshape(-1) if lanes.active is None else lanes.offsets[lanes.active]
    raw, shape, programs = buffer.raw, lanes.offsets.shape, active().programs
    index, size, width = buffer.places(offsets), raw.numel(), raw.element_size()
    return Access(buffer.storage, width, size, index, shape, lanes.active, programs, user_location(), atomic)


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
        if not every(mask.data):
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
        bad = bad if wanted is None else both(bad, wanted)
        lost = bad if lost is None else either(lost, bad)
    if lost is not None:
        lost = report(FindingKind.UNDEFINED_ADDRESS, lost, offsets, buffer)
    wrapped: Tensor | None = None
    if pointer.wrapped is not None:
        bad = lift(pointer.wrapped, ndim).expand(shape)
        bad = bad if wanted is None else both(bad, wanted)
        wrapped = report(FindingKind.INT32_WRAP_ADDRESS, bad, offsets, buffer)
    low, high = pointer.range()
    if low < buffer.low or high > buffer.high:
        outside = either(offsets < buffer.low, offsets > buffer.high)
        outside = outside if wanted is None else both(outside, wanted)
        outside = outside if lost is None else outside & ~lost
        if some(outside):
            if wrapped is not None:
                outside = outside | (wrapped & outside)  # the same lanes, some of them with a cause
            outside = report(out_of_bounds, outside, offsets, buffer)
            lost = outside if lost is None else either(lost, outside)
    if lost is not None and some(lost):
        wanted = ~lost if wanted is None else wanted & ~lost
    else:
        lost = None
    return _Lanes(offsets, wanted, lost)
