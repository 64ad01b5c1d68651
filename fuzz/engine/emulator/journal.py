"""What the programs of one chunk did to memory: enough to take it back, and to see whether order mattered.

A chunk of programs runs batched on the assumption that no program depends on another. Every store notes what
it overwrote, so a batch that must be split is taken back and its parts run anew. When the chunk is through,
`verdict` says whether the assumption held; if not, the chunk is taken back and runs one program at a time, or, if no
program can have noticed, its stores are done again in program order. So batched execution leaves the bits that serial
execution in program order leaves, races included.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuzz.engine.emulator.errors import Location
from fuzz.engine.emulator.masks import some

if TYPE_CHECKING:
    from fuzz.engine.emulator.memory import Buffer

_FREE, _SHARED = -1, -2  # owners of an address that no program, that several programs wrote


class Verdict(Enum):
    """What the journal of a finished chunk proves."""

    INDEPENDENT = auto()  # serial execution gives the same bits
    LOADS_UNKNOWN = auto()  # a storage was loaded and stored to, and loads were not noted: run again with them
    STORES_MEET = auto()  # programs met at an address, but only to store: nobody has read it
    DEPENDENT = auto()  # two programs met at an address, other than to store the same bits


@dataclass(frozen=True, slots=True)
class Access:
    """Lanes that touched a storage at one instruction.

    `index`: elements of the flat storage, which has `size` of them, int64 [n]. `shape`, `active`, `programs`:
    enough to tell which program each of them belongs to; shape[0] == 1 with several programs means that each
    touched all of them. `location`: the line of user code. `atomic`: part of an atomic function.
    """

    storage: int
    itemsize: int
    size: int
    index: Tensor
    shape: tuple[int, ...]
    active: Tensor | None
    programs: Tensor
    location: Location
    atomic: bool = False

    def owners(self) -> Tensor:
        """Program of each lane, int64 [n]; _SHARED for lanes that belong to all."""
        if self.shape[0] == 1 and len(self.programs) > 1:
            return torch.full_like(self.index, _SHARED)
        column = self.programs.reshape(-1, *([1] * (len(self.shape) - 1))).expand(self.shape)
        return (column if self.active is None else column[self.active]).reshape(-1)


@dataclass(frozen=True, slots=True)
class Store:
    """A store of `bits` [n] that happened. `before`, `marks_before`: what memory and the marks of fresh memory held;
    `changed` [n]: lanes that found other bits; `contested`: lanes of this very store overwrote each other.
    """

    access: Access
    buffer: "Buffer"
    bits: Tensor
    before: Tensor
    changed: Tensor
    contested: bool
    marks_before: Tensor | None

    def by_program(self) -> dict[int, Tensor]:
        """Each program's lanes, in their order."""
        owners = self.access.owners()
        if len(owners) and int(owners[0]) == _SHARED:
            return dict.fromkeys(self.access.programs.tolist(), torch.arange(len(owners)))
        order = owners.argsort(stable=True)
        programs, counts = torch.unique_consecutive(owners[order], return_counts=True)
        return dict(zip(programs.tolist(), torch.split(order, counts.tolist()), strict=True))


@dataclass(slots=True)
class Journal:
    """Accesses of one chunk. Disabled for programs that run one by one, which nothing takes back or reorders.

    `noted`: arguments whose `loads` are kept; `loaded`: by storage, the others that were loaded from.
    `synchronised`: a scalar atomic may have ordered programs.
    """

    enabled: bool = False
    noted: frozenset[str] = frozenset()
    stores: list[Store] = field(default_factory=list)
    loads: list[Access] = field(default_factory=list)
    loaded: dict[int, set[str]] = field(default_factory=dict)
    synchronised: bool = False

    def mark(self) -> tuple[int, int]:
        """A point to which `take_back` can return."""
        return len(self.stores), len(self.loads)

    def take_back(self, mark: tuple[int, int]) -> None:
        """Undo the stores after `mark` and forget them and the loads."""
        stores, loads = mark
        for store in reversed(self.stores[stores:]):
            store.buffer.raw.scatter_(0, store.access.index, store.before)
            if store.buffer.marks is not None and store.marks_before is not None:
                store.buffer.marks.scatter_(0, store.access.index, store.marks_before)
        del self.stores[stores:], self.loads[loads:]

    def unknown(self) -> set[str]:
        """Arguments whose loads should have been noted: their storage was stored to."""
        return {name for store in self.stores for name in self.loaded.get(store.access.storage, ())}

    def verdict(self) -> Verdict:
        """Whether running the chunk's programs in order, one by one, would have left the same memory."""
        if self.unknown():
            return Verdict.LOADS_UNKNOWN
        stores: dict[int, list[Store]] = defaultdict(list)
        for store in self.stores:
            stores[store.access.storage].append(store)
        found = Verdict.INDEPENDENT
        for storage, own in stores.items():
            loads = [load for load in self.loads if load.storage == storage]
            # One instruction scatters in program order: where all agree on the bits, no order shows.
            several = len(own) > 1 or bool(loads)
            if (several or own[0].contested) and _meet(own, loads):
                if loads or self.synchronised:
                    return Verdict.DEPENDENT
                found = Verdict.STORES_MEET
        return found


def _meet(stores: list[Store], loads: list[Access]) -> bool:
    """Whether two programs touch one address, one of them storing, in a way that order could show."""
    accesses = [*(store.access for store in stores), *loads]
    if len({access.itemsize for access in accesses}) > 1:
        return True
    indices = [access.index for access in accesses]
    places, size = _places(indices)
    owner = torch.full((size,), _FREE, dtype=torch.int64)
    for store, place in zip(stores, places[: len(stores)], strict=True):
        programs, before = store.access.owners(), owner[place]
        if some((before != _FREE) & ((before != programs) | (before == _SHARED))):
            return True
        owner.scatter_(0, place, programs)
        shared = owner[place] != programs
        if store.contested and bool(shared.any()):
            return True
        owner[place[shared]] = _SHARED
    for access, place in zip(loads, places[len(stores) :], strict=True):
        programs, writer = access.owners(), owner[place]
        if some((writer != _FREE) & ((writer != programs) | (writer == _SHARED))):
            return True
    return False


def _places(indices: list[Tensor]) -> tuple[list[Tensor], int]:
    """The indices renumbered from 0 without loss of identity, and how many numbers that takes."""
    every = torch.cat(indices)
    if every.numel() == 0:
        return indices, 0
    low, high = (int(x) for x in torch.aminmax(every))
    span = high - low + 1
    if span > 4 * every.numel() + (1 << 16):
        kept, every = torch.unique(every, return_inverse=True)
        span = kept.numel()
    else:
        every = every - low
    return list(torch.split(every, [index.numel() for index in indices])), span
