"""Shared memory of a program: allocations, views of them, and copies that land later.

Every allocation is bytes, with one byte of state for each, so that a view may reinterpret them. A byte that was never
stored, or whose copy has not been waited for, is a finding when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.casts import RAW, cast, from_bits, to_bits
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import DType
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.gluon.layouts import check_distributed, check_shared
from fuzz.engine.emulator.masks import every
from fuzz.engine.emulator.provenance import Source, Sources, plain, sources, traced
from fuzz.engine.emulator.sanitizer import FindingKind, report
from fuzz.engine.emulator.value import Value

_UNWRITTEN, _DEFINED, _UNDEFINED = 0, 1, 2  # state of a byte
_View = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Allocation:
    """Bytes of an allocation and the state of each, uint8 [P, n], and which of them are undefined by each origin."""

    data: Tensor
    state: Tensor
    sources: Sources = field(default_factory=dict)

    def taken(self, rows: Tensor) -> Allocation:
        """A copy of what the programs in `rows` have."""
        found = {origin: Source(*(x[rows] if len(x) > 1 else x for x in s)) for origin, s in self.sources.items()}
        return Allocation(self.data[rows], self.state[rows], found)

    def put_back(self, rows: Tensor, part: Allocation) -> None:
        """Take over what the programs in `rows` did to their copy."""
        self.data[rows], self.state[rows] = part.data, part.state
        for origin, source in part.sources.items():
            count, limits = len(self.data), torch.iinfo(torch.int64)
            known = self.sources.get(origin)
            if known is None:
                known = Source(torch.zeros_like(self.state, dtype=torch.bool), *(
                    torch.full((count,), limit) for limit in (limits.max, limits.min)
                ))  # fmt: skip
            whole = Source(*(x.expand(count, *x.shape[1:]).clone() for x in known))
            for united, own in zip(whole, source, strict=True):
                united[rows] = own
            self.sources[origin] = whole


class SharedMemory:
    """A descriptor: a view of an allocation as a block of `dtype`, for every program of the batch.

    `bits` [P, *shape] is a view of the allocation's bytes, made by `cut`; `view` makes the same view,
    [P, *shape, itemsize], of what is known of each byte. `state` is that view of their state.
    """

    def __init__(self, dtype: DType, layout: Any, allocation: Allocation, cut: _View, view: _View) -> None:
        self.dtype, self.layout, self.cut, self.view = dtype, layout, cut, view
        self.allocation, self.bits, self.state = allocation, cut(allocation.data), view(allocation.state)

    def over(self, allocation: Allocation) -> SharedMemory:
        """The same view of another allocation of equal size."""
        return SharedMemory(self.dtype, self.layout, allocation, self.cut, self.view)

    @staticmethod
    def allocate(dtype: DType, shape: Sequence[Any], layout: Any, value: Value | None = None) -> SharedMemory:
        """New memory, holding `value` or nothing. Raises KernelError for a layout that cannot hold it."""
        if not isinstance(dtype, DType):
            raise KernelError(f"shared memory holds a scalar type, not {dtype!r}")
        sizes = tuple(int(size) for size in shape)
        check_shared(layout, sizes)
        context = active()
        count = math.prod(sizes) * dtype.itemsize
        data = torch.zeros(len(context.programs), count, dtype=torch.uint8)
        if data.numel() > context.largest:
            context.grew(data.numel())
        allocation = Allocation(data, torch.zeros_like(data))
        memory = _typed(dtype, sizes, layout, allocation, lambda data: data, lambda known: known)
        if value is not None:
            memory.store(value)
        return memory

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bits.shape[1:])

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self) -> SharedMemory:
        return self

    @property
    def element_ty(self) -> DType:
        return self.dtype

    def load(self, layout: Any = None, **_: Any) -> Value:
        """The block. Elements that nothing was stored to are reported and undefined."""
        check_distributed(layout, self.shape)
        undefined = None
        if not every(self.state == _DEFINED):
            missing = report(FindingKind.SHARED_READ_BEFORE_STORE, (self.state == _UNWRITTEN).any(-1), None, None)
            undefined = missing | self._undefined()
        return Value(from_bits(self.bits.contiguous(), self.dtype), self.dtype, undefined=undefined)

    def store(self, value: Value, **_: Any) -> None:
        """Replace the block by one of equal shape and type."""
        if not isinstance(value, Value) or value.shape != self.shape:
            shape = list(value.shape) if isinstance(value, Value) else value
            raise KernelError(f"shared memory of shape {list(self.shape)} cannot take {shape}")
        if value.dtype is not self.dtype:
            raise KernelError(f"shared memory of {self.dtype} cannot take {value.dtype}")
        self._put(value, None)

    def _undefined(self) -> Tensor:
        """Lanes that undefined ones were stored to, with their origins."""
        undefined = (self.state == _UNDEFINED).any(-1)
        known = self.allocation.sources.items()
        return traced(undefined, {key: Source(self.view(s.lanes).any(-1) & undefined, *s[1:]) for key, s in known})

    def _remember(self, undefined: Tensor | None) -> None:
        """Note the origins of lanes that are about to be stored to all of the view (older ones may stay noted)."""
        for origin, source in [] if undefined is None else sources(undefined):
            known = self.allocation.sources.get(origin)
            if known is None:
                known = Source(torch.zeros_like(self.allocation.state, dtype=torch.bool), source.low, source.high)
            self.view(known.lanes).logical_or_(source.lanes.expand(self.bits.shape).unsqueeze(-1))
            low, high = torch.minimum(known.low, source.low), torch.maximum(known.high, source.high)
            self.allocation.sources[origin] = Source(known.lanes, low, high)

    def _put(self, value: Value, lanes: Tensor | None) -> None:
        """Write all lanes, or those that `lanes` [P or 1, *shape] selects."""
        bits = to_bits(value.data, self.dtype)
        state: Tensor | int = _DEFINED
        if value.undefined is not None:
            self._remember(value.undefined)
            state = (plain(value.undefined).to(torch.uint8) + _DEFINED).unsqueeze(-1)
        if lanes is None:
            self.bits.copy_(bits.expand(self.bits.shape))
            self._mark(state)
            return
        self.bits.copy_(torch.where(lanes, bits, self.bits))
        self._mark(torch.where(lanes.unsqueeze(-1), torch.as_tensor(state, dtype=torch.uint8), self.state))

    def _mark(self, state: Tensor | int) -> None:
        if isinstance(state, int):
            self.state.fill_(state)
        else:
            self.state.copy_(state.expand(self.state.shape))

    def _view(self, change: Callable[[Tensor, int], Tensor], layout: Any = None) -> SharedMemory:
        """A view: `change` applied to bits and state, told how many axes follow the block's."""
        cut, view = self.cut, self.view
        return SharedMemory(
            self.dtype,
            layout or self.layout,
            self.allocation,
            lambda data: change(cut(data), 0),
            lambda known: change(view(known), 1),
        )

    def index(self, index: Any, **_: Any) -> SharedMemory:
        """One buffer of several: a view of the first axis at `index`, a number or a scalar."""
        position = int(index)
        if not 0 <= position < self.shape[0]:
            raise KernelError(f"shared memory of {self.shape[0]} buffers has none of index {position}")
        return self._view(lambda data, _: data[:, position])

    def slice(self, start: Any, length: Any, dim: Any = 0, **_: Any) -> SharedMemory:
        """A view of `length` elements from `start` along an axis."""
        first, count, axis = int(start), int(length), int(dim)
        if not 0 <= axis < self.rank or first < 0 or count <= 0 or first + count > self.shape[axis]:
            raise KernelError(f"slice {first} + {count} along axis {axis} leaves shared memory {list(self.shape)}")
        return self._view(lambda data, _: data.narrow(1 + axis, first, count))

    def permute(self, order: Sequence[Any], **_: Any) -> SharedMemory:
        """A view with the axes in another order."""
        axes = [int(axis) for axis in order]
        if sorted(axes) != list(range(self.rank)):
            raise KernelError(f"axes {axes} do not permute shared memory {list(self.shape)}")

        def change(data: Tensor, extra: int) -> Tensor:
            return data.permute(0, *(1 + axis for axis in axes), *range(1 + len(axes), 1 + len(axes) + extra))

        return self._view(change)

    def reshape(self, shape: Sequence[Any], **_: Any) -> SharedMemory:
        """A view of the same elements, row-major, in another shape. Raises KernelError for a view with gaps."""
        sizes = [int(size) for size in shape]
        if math.prod(sizes) != self.numel:
            raise KernelError(f"cannot reshape shared memory {list(self.shape)} to {sizes}")
        self._require_whole("reshape")
        return self._view(lambda data, extra: data.view(data.shape[0], *sizes, *data.shape[data.ndim - extra :]))

    def _reinterpret(self, dtype: DType, shape: Sequence[Any], layout: Any, **_: Any) -> SharedMemory:
        """The first bytes of the view as another type and shape."""
        sizes = tuple(int(size) for size in shape)
        check_shared(layout, sizes)
        self._require_whole("reinterpret")
        count = math.prod(sizes) * dtype.itemsize
        size = self.numel * self.dtype.itemsize
        if count > size:
            raise KernelError(f"shared memory of {size} bytes cannot be seen as {list(sizes)} of {dtype}")
        cut, view = self.cut, self.view
        return _typed(
            dtype,
            sizes,
            layout,
            self.allocation,
            lambda data: cut(data).view(len(data), -1).view(torch.uint8)[:, :count],
            lambda known: view(known).view(len(known), -1)[:, :count],
        )

    def _require_whole(self, what: str) -> None:
        if not self.bits[0].is_contiguous():
            raise KernelError(f"only shared memory without gaps, in its own order, can be given to {what}")

    def _keep_alive(self, **_: Any) -> None:
        """No effect."""


def _typed(
    dtype: DType, shape: tuple[int, ...], layout: Any, allocation: Allocation, cut: _View, view: _View
) -> SharedMemory:
    """Bytes [P, n], as `cut` and `view` find them in the allocation and in what is known of it, as a descriptor."""
    return SharedMemory(
        dtype,
        layout,
        allocation,
        lambda data: cut(data).view(RAW[dtype.itemsize]).view(len(data), *shape),
        lambda known: view(known).view(len(known), *shape, dtype.itemsize),
    )


@dataclass(frozen=True)
class _Copy:
    target: SharedMemory
    value: Value
    lanes: Tensor | None


@dataclass
class Copies:
    """Asynchronous copies of a batch: committed groups in order, and those of no group yet.

    `untouchable`: called before each use, and raises. Given where copies of more programs than now run are pending.
    """

    groups: list[list[_Copy]] = field(default_factory=list)
    open: list[_Copy] = field(default_factory=list)
    untouchable: Callable[[], None] | None = None

    @property
    def pending(self) -> bool:
        """Whether a copy, or a group of none, is not waited for yet."""
        return bool(self.groups or self.open)

    def _use(self) -> None:
        if self.untouchable is not None:
            self.untouchable()

    def issue(self, target: SharedMemory, value: Value, lanes: Tensor | None) -> None:
        """Start a copy into `lanes` of the target (None: all), which hold nothing readable until it lands."""
        self._use()
        if value.shape != target.shape:
            raise KernelError(f"a copy of {list(value.shape)} does not fit shared memory {list(target.shape)}")
        if value.dtype is not target.dtype:
            raise KernelError(f"a copy of {value.dtype} does not fit shared memory of {target.dtype}")
        if lanes is None:
            target._mark(_UNWRITTEN)
        else:
            target._mark(target.state.masked_fill(lanes.unsqueeze(-1), _UNWRITTEN))
        self.open.append(_Copy(target, value, lanes))

    def commit(self) -> None:
        """Close the group of the copies issued since the last call."""
        self._use()
        self.groups.append(self.open)
        self.open = []

    def wait(self, outstanding: int) -> None:
        """Land all but the newest `outstanding` groups. Copies of no group are waited for as well."""
        self._use()
        landed = max(0, len(self.groups) - outstanding)
        for group in self.groups[:landed]:
            self._land(group)
        del self.groups[:landed]
        if not outstanding:
            self._land(self.open)
            self.open = []

    @staticmethod
    def _land(group: list[_Copy]) -> None:
        for copy in group:
            copy.target._put(cast(copy.value, copy.target.dtype), copy.lanes)
