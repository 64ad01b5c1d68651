"""Where programs of a batch part ways and meet again: a branch or a loop of the kernel that not all of them take.

Within such a region the batch shrinks to the programs that take it: the kernel's variables are cut down to their
rows. Programs that are through wait, with what their variables hold, and at the end of the region all go on as the
batch that they were. What cannot be cut or put together raises Divergence: then the batch is split for good, and
its parts run anew. Code that `rewrite` puts into kernels drives the regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import DType, int32, promote_integers
from fuzz.engine.emulator.errors import Divergence, KernelError
from fuzz.engine.emulator.gluon.execution import execution
from fuzz.engine.emulator.gluon.shared import Allocation, Copies, SharedMemory
from fuzz.engine.emulator.rows import UNBOUND, Apart, Part, aggregates, taken, united
from fuzz.engine.emulator.sanitizer import FindingKind, report
from fuzz.engine.emulator.value import Number, Value, as_value

Names = tuple[str, ...]


class Site(NamedTuple):
    """A region in a kernel's source, and the variables of its function that matter there.

    `same`: read in it, never set. `merged`: set in it, needed after it. `carried`: set in it, needed in it later.
    `passing`: set in it before they are read, and of no use after it.
    """

    place: str
    same: Names
    merged: Names
    carried: Names
    passing: Names


_refused: set[str] = set()  # places of regions that were in vain: what they do decides, so they are not tried again


class Region:
    """`changed`: variables must be cut anew, by `enter`; `split`: they must be put together at the end, by `leave`.

    `rows` of the batch that there was, `programs`, are under way. `outer`: what variables held before; `given`:
    what `enter` made them hold; `touched`: those that the rows under way have set since. `waiting`: by name, what
    they hold for rows that are through and have set them.
    """

    changed = split = False

    def __init__(self, site: Site, outcome: Tensor) -> None:
        self.site, self.outcome = site, outcome
        self.programs, self.copies = active().programs, execution().copies
        self.rows = self.next = torch.arange(len(self.programs))
        self.outer: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        self.touched: set[str] = set()
        self.waiting: dict[str, list[Part]] = {name: [] for name in site.merged}
        self.shared: dict[Allocation, Allocation] = {}
        self.fields: list[tuple[Any, dict[str, Any]]] = []

    def enter(self, variables: Mapping[str, Any]) -> list[Any]:
        """Go on with the rows in `next`. Values for the names of the site, in its order."""
        site = self.site
        try:
            if not self.split:
                self.outer = {name: variables.get(name, UNBOUND) for name in (*site.same, *site.merged, *site.carried)}
                self.given, self.split = self.outer, True
                execution().copies = Copies(untouchable=self._give_up if self.copies.pending else None)
            stay = self._settle(variables)
            active().programs = self.programs[self.next]
            self.given = {name: self._cut(name, variables, stay) for name in self.outer}
        except Apart:
            self._give_up()
        self.fields = [(x, dict(vars(x))) for x in aggregates(self.given.values())]
        self.rows, self.changed = self.next, False
        return [*self.given.values(), *(UNBOUND for _ in site.passing)]

    def leave(self, variables: Mapping[str, Any]) -> list[Any]:
        """All programs go on together. Values for the names of the site, in its order."""
        site, self.next = self.site, self.rows[:0]
        try:
            self._settle(variables)
            active().programs, execution().copies = self.programs, self.copies
            merged = [self._whole(name) for name in site.merged]
        except Apart:
            self._give_up()
        same = [self.outer[name] for name in site.same]
        return [*same, *merged, *(UNBOUND for _ in (*site.carried, *site.passing))]

    def _settle(self, variables: Mapping[str, Any]) -> Tensor | None:
        """Let rows that are not among the next wait. Returns where those that are stand among the present ones;
        None if there are none.
        """
        unchanged = all(vars(x)[name] is was[name] for x, was in self.fields for name in was)
        if execution().copies.pending or not unchanged:
            raise Apart
        for allocation, part in self.shared.items():
            allocation.put_back(self.rows, part)
        self.shared = {}
        names = *self.site.merged, *self.site.carried
        self.touched |= {name for name in names if variables.get(name, UNBOUND) is not self.given[name]}
        going_on = torch.isin(self.rows, self.next)
        stay, through = (mask.nonzero().flatten() for mask in (going_on, ~going_on))
        if len(through):
            for name in self.touched.intersection(self.waiting):
                value = variables.get(name, UNBOUND)
                self.waiting[name].append((self.rows[through], taken(value, through, _refuse)))
        if not len(stay):
            self.touched.clear()
            return None
        return stay

    def _cut(self, name: str, variables: Mapping[str, Any], stay: Tensor | None) -> Any:
        if stay is None or name not in self.touched:
            return taken(self.outer[name], self.next, self._cut_shared)
        return taken(variables.get(name, UNBOUND), stay, _refuse)

    def _cut_shared(self, x: Any) -> Any:
        if not isinstance(x, SharedMemory):
            raise Apart
        part = self.shared.get(x.allocation)
        if part is None:
            part = self.shared[x.allocation] = x.allocation.taken(self.next)
        return x.over(part)

    def _whole(self, name: str) -> Any:
        parts, count, before = self.waiting[name], len(self.programs), self.outer[name]
        if not parts:
            return before
        rest = torch.ones(count, dtype=torch.bool)
        for rows, _ in parts:
            rest[rows] = False
        if bool(rest.any()):
            rows = rest.nonzero().flatten()
            parts = [*parts, (rows, taken(before, rows, _refuse))]
        return united(parts, count, _refuse)

    def _give_up(self) -> None:
        _refused.add(self.site.place)
        active().programs = self.programs
        raise Divergence(self.outcome)


def _refuse(_: Any) -> Any:
    raise Apart


def _possible(place: str) -> bool:
    """Coverage counts what each batch does: it wants batches of programs that do the same."""
    context = active()
    return place not in _refused and context.coverage is None


# ---------------------------------------------------------------- branches

YES, NO = (1,), (0,)
"""Arms of a branch that all programs take alike."""


class Branch(Region):
    """The arms are 3 and 2: the one of the condition, and the other, each for its own programs."""

    def __init__(self, site: Site, truth: Tensor, both: bool) -> None:
        super().__init__(site, truth)
        self.both = both

    def __iter__(self) -> Iterator[int]:
        self.next = self.outcome.nonzero().flatten()
        yield 3
        if self.both:
            self.next = (~self.outcome).nonzero().flatten()
            yield 2


def arms(condition: Any, site: tuple[Any, ...], both: bool) -> Iterable[int]:
    """The arms of an `if` that run, in turn; 1 or 3 is that of the condition. `both`: it has an `else`.

    Raises Divergence where programs part ways that cannot meet again.
    """
    if not isinstance(condition, Value):
        return YES if condition else NO
    truth = condition.truth()
    if isinstance(truth, bool):
        return YES if truth else NO
    if not _possible(site[0]):
        raise Divergence(truth)
    return Branch(Site(*site), truth, both)


# ---------------------------------------------------------------- loops


class Trips:
    """`range` of a kernel: its index is a scalar. `counts` [P or 1]: iterations of each program."""

    changed = split = False

    def __init__(self, *arguments: Value | Number) -> None:
        if not 1 <= len(arguments) <= 3:
            raise KernelError("range takes one to three arguments")
        values = [as_value(argument) for argument in arguments]
        start = values[0] if len(values) > 1 else as_value(0)
        stop, step = values[len(values) > 1], values[2] if len(values) > 2 else as_value(1)
        dtype = int32
        for value in (start, stop, step):
            if not isinstance(value.dtype, DType) or not value.dtype.is_int() or value.shape:
                raise KernelError("range takes integer scalars")
            dtype = promote_integers(dtype, value.dtype)
            if value.undefined is not None:
                report(FindingKind.UNDEFINED_BRANCH, value.undefined, None, None)
        self.counts = _trips(start.data.long(), stop.data.long(), step.data.long())
        least, most = torch.aminmax(self.counts)
        self.least, self.most, self.dtype = int(least), int(most), dtype
        self.first, self.stride = cast(start, dtype), cast(step, dtype)
        self.ranges = start.range(), step.range()

    def __iter__(self) -> Iterator[Value]:
        """The index in each iteration. Raises Divergence where the counts differ."""
        if self.least != self.most:
            raise Divergence(self.counts)
        return (self.index(trip, None) for trip in range(self.most))

    def index(self, trip: int, rows: Tensor | None) -> Value:
        """The index in an iteration, for some of the programs."""
        first, stride = (
            x.data if rows is None or len(x.data) == 1 else x.data[rows] for x in (self.first, self.stride)
        )
        (low, high), (near, far) = self.ranges
        bounds = low + min(trip * near, trip * far), high + max(trip * near, trip * far)
        return Value(first + trip * stride, self.dtype, bounds=bounds)


def _trips(start: Tensor, stop: Tensor, step: Tensor) -> Tensor:
    if bool((step == 0).any()):
        raise KernelError("range with a step of zero")
    ahead = torch.where(step > 0, stop - start, start - stop)
    size = step.abs()
    return torch.div(ahead + size - 1, size, rounding_mode="floor").clamp(min=0)


class _Plain:
    """Anything else that a `for` goes through: the same for all programs."""

    changed = split = False

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class For(Region):
    """A loop that programs leave as their own count of iterations is over."""

    def __init__(self, site: Site, trips: Trips) -> None:
        super().__init__(site, trips.counts)
        self.trips = trips

    def __iter__(self) -> Iterator[Value]:
        under_way = len(self.programs)
        for trip in range(self.trips.most):
            rows = (self.trips.counts > trip).nonzero().flatten()
            if len(rows) != under_way:
                self.next, self.changed, under_way = rows, True, len(rows)
            yield self.trips.index(trip, rows)


def loop(items: Iterable[Any], site: tuple[Any, ...]) -> Trips | For | _Plain:
    """What a `for` goes through, as a region."""
    if not isinstance(items, Trips):
        return _Plain(items)
    return For(Site(*site), items) if items.least != items.most and _possible(site[0]) else items


class While(Region):
    """A loop that programs leave as their condition fails."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, torch.zeros(len(active().programs), dtype=torch.int64))

    def more(self, condition: Any) -> bool:
        """Whether there is an iteration for any program under way."""
        if not isinstance(condition, Value):
            return bool(condition)
        truth = condition.truth()
        if isinstance(truth, bool):
            return truth
        if not _possible(self.site.place):
            raise Divergence(truth)
        self.next, self.changed = self.rows[truth], True
        self.outcome[self.next] += 1
        return True


def loop_while(site: tuple[Any, ...]) -> While:
    """A `while`."""
    return While(Site(*site))
