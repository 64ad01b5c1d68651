"""Races between the programs of one launch, seen while they run in order.

For every element that programs store to: who stored last, who last changed it, who read it first. An access
races if another program's access to the same address could have come after it as well as before, and that shows:
two stores race if they leave different bits, a load and a store if the store changes what is there.

Scalar atomics order programs: what a program did before one (`release`) comes before what another does after one
at the same address (`acquire`). Atomics never race with atomics. Blocks of atomics order nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuzz.engine.emulator.errors import Location
from fuzz.engine.emulator.journal import Access, Journal

# The code of an access: program + 1, whether atomic, which line, the program's epoch.
_PROGRAM = (1 << 32) - 1
_ATOMIC = 1 << 32
_LINE, _MOST_LINES = 33, (1 << 12) - 1
_EPOCH, _MOST_EPOCHS = 45, (1 << 18) - 1

Clock = dict[int, int]  # program -> epoch: what it did before that epoch is known to be over


class _Shadow:
    """Codes of the accesses to one storage, 0 where there is none. Elements of `unit` bytes."""

    def __init__(self, access: Access) -> None:
        self.unit = access.itemsize
        # Untouched pages of zeros cost nothing, so that a large pool may be sparsely written.
        self.writer, self.changer, self.reader = (torch.zeros(access.size + 1, dtype=torch.int64) for _ in range(3))

    def places(self, access: Access) -> Tensor:
        """Where the lanes of an access are; the shadow goes to bytes once accesses differ in width."""
        if access.itemsize != self.unit and self.unit != 1:
            for name in ("writer", "changer", "reader"):
                setattr(self, name, _bytes(getattr(self, name), self.unit))
            self.unit = 1
        if access.itemsize == self.unit:
            return access.index
        return (access.index[:, None] * access.itemsize + torch.arange(access.itemsize)).reshape(-1)

    def spread(self, x: Tensor, access: Access) -> Tensor:
        """Something of each lane, for each of its places."""
        return x if access.itemsize == self.unit else x.repeat_interleave(access.itemsize)

    def gathered(self, x: Tensor, access: Access) -> Tensor:
        """Inverse of `spread` for codes: the greatest of a lane's places."""
        return x if access.itemsize == self.unit else x.reshape(-1, access.itemsize).amax(1)


def _bytes(codes: Tensor, unit: int) -> Tensor:
    """Codes of elements as codes of their bytes, without touching what is 0."""
    spread, used = torch.zeros(len(codes) * unit, dtype=torch.int64), codes.nonzero().flatten()
    spread[(used[:, None] * unit + torch.arange(unit)).flatten()] = codes[used].repeat_interleave(unit)
    return spread


@dataclass(slots=True)
class Races:
    """What the programs of a launch did to memory so far, in program order.

    `noted`: arguments through which loads matter; None: not known yet, so all do.
    """

    noted: frozenset[str] | None = None
    shadows: dict[int, _Shadow] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    loaded: dict[int, set[str]] = field(default_factory=dict)
    program: int = 0
    epoch: int = 0
    known: Clock = field(default_factory=dict)
    published: dict[tuple[int, int], Clock] = field(default_factory=dict)
    lines: dict[Location, int] = field(default_factory=dict)

    def begin(self, program: int) -> None:
        """The next program starts."""
        self.program, self.epoch, self.known = program, 0, {}

    def wants(self, storage: int, name: str) -> bool:
        """Whether a load may matter. Notes that it happened."""
        self.loaded.setdefault(storage, set()).add(name)
        return self.noted is None or name in self.noted or storage in self.shadows

    def mixed(self) -> set[str]:
        """Arguments that were loaded from, and stored to through them or others."""
        return {name for storage in self.stored for name in self.loaded.get(storage, ())}

    def load(self, access: Access) -> Tensor | None:
        """Codes of the stores that the lanes of a load race with, 0 for none; None if no lane races."""
        shadow = self._shadow(access)
        place = shadow.places(access)
        codes = self._unordered(shadow.changer[place], access.atomic)
        if not access.atomic:
            free = (shadow.reader[place] == 0) & ((shadow.writer[place] & _PROGRAM) != self.program + 1)
            shadow.reader[place[free]] = self._code(access)
        return self._found(shadow, codes, access)

    def store(self, access: Access, changed: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Codes of the stores, and of the loads, that the lanes of a store race with, as `load` has them.

        `changed` [lanes]: whether the store leaves other bits than it finds.
        """
        shadow = self._shadow(access)
        self.stored.add(access.storage)
        place, changed = shadow.places(access), shadow.spread(changed, access)
        stores = self._unordered(shadow.writer[place], access.atomic).masked_fill(~changed, 0)
        loads = self._unordered(shadow.reader[place], False).masked_fill(~changed, 0)
        self._write(shadow, place, torch.full_like(place, self._code(access)), changed)
        return self._found(shadow, stores, access), self._found(shadow, loads, access)

    def synchronise(self, storage: int, address: int, acquire: bool, release: bool) -> None:
        """The program did a scalar atomic at a byte address."""
        place = storage, address
        before = self.published.get(place, {})
        if acquire and before:
            self.known = _latest(self.known, before)
        if release:
            mine = {**self.known, self.program: self.epoch + 1}
            # What others published here stays, unless we know of it already.
            self.published[place] = mine if acquire else _latest(before, mine)
            self.epoch += 1

    def absorb(self, journal: Journal) -> bool:
        """Take over the accesses of a chunk that ran as batches, none of whose programs met. False, with nothing
        taken over, if one of them races with an earlier chunk.
        """
        stores = [(self._shadow(s.access), s.access, s.changed) for s in journal.stores]
        for shadow, access, changed in stores:
            place = shadow.places(access)
            before = (shadow.writer[place] | shadow.reader[place]) != 0
            if bool((before & shadow.spread(changed, access)).any()):
                return False
        for access in journal.loads:
            shadow = self._shadow(access)
            if bool((shadow.changer[shadow.places(access)] != 0).any()):
                return False
        for shadow, access, changed in stores:
            self.stored.add(access.storage)
            owners = torch.where(access.owners() < 0, access.programs[-1], access.owners()) + 1
            codes = shadow.spread(owners | self._traits(access), access)
            self._write(shadow, shadow.places(access), codes, shadow.spread(changed, access))
        for access in journal.loads:
            shadow = self._shadow(access)
            place = shadow.places(access)
            owners = torch.where(access.owners() < 0, access.programs[0], access.owners()) + 1
            codes = shadow.spread(owners | self._traits(access), access)
            free = (shadow.reader[place] == 0) & ((shadow.writer[place] & _PROGRAM) != (codes & _PROGRAM))
            shadow.reader[place[free].flip(0)] = codes[free].flip(0)
        for storage, names in journal.loaded.items():
            self.loaded.setdefault(storage, set()).update(names)
        return True

    def _shadow(self, access: Access) -> _Shadow:
        shadow = self.shadows.get(access.storage)
        if shadow is None:
            shadow = self.shadows[access.storage] = _Shadow(access)
        return shadow

    @staticmethod
    def _write(shadow: _Shadow, place: Tensor, codes: Tensor, changed: Tensor) -> None:
        shadow.writer.scatter_(0, place, codes)
        # Whoever leaves the bits of a change as they are owns it as well: it reads what it stored itself.
        owned = changed | (shadow.changer[place] != 0)
        shadow.changer.scatter_(0, place[owned], codes[owned])
        # A program's own store takes over from its own load.
        reader = shadow.reader[place]
        shadow.reader[place[(reader & _PROGRAM) == (codes & _PROGRAM)]] = 0

    def opponents(self, codes: Tensor) -> Iterator[tuple[Location, int, Tensor]]:
        """The accesses in non-zero codes, by line: its location, its first program, the lanes that hold it."""
        lines = torch.where(codes != 0, codes >> _LINE & _MOST_LINES, -1)
        known = list(self.lines)
        for line in torch.unique(lines[lines >= 0]).tolist():
            lanes = lines == line
            yield known[line], int((codes[lanes] & _PROGRAM).amin()) - 1, lanes

    def _code(self, access: Access) -> int:
        return min(self.epoch, _MOST_EPOCHS) << _EPOCH | self._traits(access) | self.program + 1

    def _traits(self, access: Access) -> int:
        line = min(self.lines.setdefault(access.location, len(self.lines)), _MOST_LINES)
        return line << _LINE | (_ATOMIC if access.atomic else 0)

    def _unordered(self, codes: Tensor, atomic: bool) -> Tensor:
        """Codes of accesses by other programs that nothing orders before the running program; 0 elsewhere."""
        others = (codes != 0) & ((codes & _PROGRAM) != self.program + 1)
        if atomic:
            others &= (codes & _ATOMIC) == 0
        codes = codes.masked_fill(~others, 0)
        if self.known and bool(others.any()):
            for code in torch.unique(codes[others]).tolist():
                if self.known.get((code & _PROGRAM) - 1, 0) > code >> _EPOCH:
                    codes = codes.masked_fill(codes == code, 0)
        return codes

    @staticmethod
    def _found(shadow: _Shadow, codes: Tensor, access: Access) -> Tensor | None:
        return shadow.gathered(codes, access) if bool((codes != 0).any()) else None


def _latest(a: Clock, b: Clock) -> Clock:
    if not a:
        return b  # never changed in place
    return {**a, **{program: max(epoch, a.get(program, 0)) for program, epoch in b.items()}}
