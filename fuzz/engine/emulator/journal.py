"""What the programs of one chunk did to memory: enough to take it back, and to see whether order mattered.

A chunk of programs runs batched on the assumption that no program depends on another. Every store notes what
it overwrote, so a batch that must be split is taken back and its parts run anew. When the chunk is through,
`verdict` says whether the assumption held; if not, the chunk is taken back and runs one program at a time. So
batched execution leaves the bits that serial execution in program order leaves, races included.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

_FREE, _SHARED = -1, -2  # owners of an address that no program, that several programs wrote


class Verdict(Enum):
    """What the journal of a finished chunk proves."""

    INDEPENDENT = auto()  # serial execution gives the same bits
    LOADS_UNKNOWN = auto()  # a storage was loaded and stored to, and loads were not noted: run again with them
    DEPENDENT = auto()  # two programs met at an address


@dataclass(frozen=True, slots=True)
class Access:
    """Lanes that touched a storage at one instruction.

    `index`: elements of the flat storage, int64 [n]. `shape`, `active`, `programs`: enough to tell which
    program each of them belongs to; shape[0] == 1 with several programs means that each touched all of them.
    """

    storage: int
    itemsize: int
    index: Tensor
    shape: tuple[int, ...]
    active: Tensor | None
    programs: Tensor

    def owners(self) -> Tensor:
        """Program of each lane, int64 [n]; _SHARED for lanes that belong to all."""
        if self.shape[0] == 1 and len(self.programs) > 1:
            return torch.full_like(self.index, _SHARED)
        column = self.programs.reshape(-1, *([1] * (len(self.shape) - 1))).expand(self.shape)
        return (column if self.active is None else column[self.active]).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Store:
    access: Access
    raw: Tensor
    before: Tensor


@dataclass(slots=True)
class Journal:
    """Accesses of one chunk. Disabled for a chunk of one program, which nothing can take back or reorder.

    `loaded`: storages that were loaded from. `loads`: the loads themselves, if `note_loads` asks for them.
    """

    enabled: bool = False
    note_loads: bool = False
    stores: list[_Store] = field(default_factory=list)
    loads: list[Access] = field(default_factory=list)
    loaded: set[int] = field(default_factory=set)

    def store(self, access: Access, raw: Tensor) -> None:
        """Note a store that is about to happen."""
        self.stores.append(_Store(access, raw, raw.index_select(0, access.index)))

    def mark(self) -> tuple[int, int]:
        """A point to which `take_back` can return."""
        return len(self.stores), len(self.loads)

    def take_back(self, mark: tuple[int, int]) -> None:
        """Undo the stores after `mark` and forget them and the loads."""
        stores, loads = mark
        for store in reversed(self.stores[stores:]):
            store.raw.scatter_(0, store.access.index, store.before)
        del self.stores[stores:], self.loads[loads:]

    def verdict(self) -> Verdict:
        """Whether running the chunk's programs in order, one by one, would have left the same memory."""
        stores: dict[int, list[Access]] = defaultdict(list)
        for store in self.stores:
            stores[store.access.storage].append(store.access)
        for storage, accesses in stores.items():
            if storage in self.loaded and not self.note_loads:
                return Verdict.LOADS_UNKNOWN
            loads = [load for load in self.loads if load.storage == storage]
            # One instruction scatters in program order: alone it cannot differ from serial execution.
            if (len(accesses) > 1 or loads) and _meet(accesses, loads):
                return Verdict.DEPENDENT
        return Verdict.INDEPENDENT


def _meet(stores: list[Access], loads: list[Access]) -> bool:
    """Whether two programs touch one address, one of them storing, in a way that order could show."""
    if len({access.itemsize for access in (*stores, *loads)}) > 1:
        return True
    indices = [access.index for access in (*stores, *loads)]
    places, size = _places(indices)
    owner = torch.full((size,), _FREE, dtype=torch.int64)
    for access, place in zip(stores, places[: len(stores)], strict=True):
        programs, before = access.owners(), owner[place]
        if bool(((before != _FREE) & ((before != programs) | (before == _SHARED))).any()):
            return True
        owner.scatter_(0, place, programs)
        owner[place[owner[place] != programs]] = _SHARED
    for access, place in zip(loads, places[len(stores) :], strict=True):
        programs, writer = access.owners(), owner[place]
        if bool(((writer != _FREE) & ((writer != programs) | (writer == _SHARED))).any()):
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
