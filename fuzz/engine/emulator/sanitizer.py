"""Findings: what no correct kernel does, each named by kernel, line, program and argument."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.errors import user_location
from fuzz.engine.emulator.masks import some
from fuzz.engine.emulator.provenance import Key, Origin, Source, Sources, from_origin, plain, sources, traced


class FindingKind(StrEnum):
    """Classes of findings."""

    OUT_OF_BOUNDS_LOAD = "out-of-bounds load"
    OUT_OF_BOUNDS_STORE = "out-of-bounds store"
    UNDEFINED_OUTPUT = "undefined lane stored"
    UNDEFINED_ADDRESS = "undefined lane in an address or mask"
    UNDEFINED_BRANCH = "undefined scalar in a condition"
    INT32_WRAP_ADDRESS = "wrapped int32 in an address"
    INTEGER_DIVISION_BY_ZERO = "integer division by zero"
    STORE_DTYPE = "store of another dtype"
    SHARED_READ_BEFORE_STORE = "shared memory read before store"
    UNINITIALISED_OUTPUT = "uninitialised memory stored"
    UNINITIALISED_ADDRESS = "uninitialised memory in an address or mask"
    UNINITIALISED_BRANCH = "uninitialised memory in a condition"
    RACING_STORES = "two programs store different values"
    RACING_LOAD = "load of what another program stores"


_UNINITIALISED = {
    FindingKind.UNDEFINED_OUTPUT: FindingKind.UNINITIALISED_OUTPUT,
    FindingKind.UNDEFINED_ADDRESS: FindingKind.UNINITIALISED_ADDRESS,
    FindingKind.UNDEFINED_BRANCH: FindingKind.UNINITIALISED_BRANCH,
}


class Memory(Protocol):
    """What a finding says of memory: its name, and the least and greatest element that it has."""

    @property
    def name(self) -> str: ...
    @property
    def low(self) -> int: ...
    @property
    def high(self) -> int: ...


class _Shared(NamedTuple):
    name: str
    low: int
    high: int


@dataclass(frozen=True)
class Unwritten:
    """Memory that nobody had written: elements `indices` of `argument`, loaded at `file`:`line`."""

    argument: str | None
    file: str
    line: int
    extent: tuple[int, int] | None
    indices: tuple[int, int]


@dataclass(frozen=True)
class Finding:
    """One class of fault at one line of a launch, with the first program in grid order that shows it.

    `indices` (least and greatest offending element) and `extent` count elements of the argument's dtype from
    its first element; both, and `argument`, are None where no memory is involved. `lanes`: how many.
    `other`: of a race, the program that `program` raced with. `unwritten`: where uninitialised memory was read.
    `caused_by`: key of an earlier finding of which this one is a consequence; None for a root cause.
    """

    kind: FindingKind
    kernel: str
    file: str
    line: int
    program: tuple[int, int, int]
    argument: str | None
    indices: tuple[int, int] | None
    extent: tuple[int, int] | None
    lanes: int
    other: tuple[int, int, int] | None = None
    unwritten: Unwritten | None = None
    detail: str = ""
    caused_by: Key | None = None

    @property
    def key(self) -> Key:
        """Findings with equal keys are one finding, seen several times."""
        read = self.unwritten and (self.unwritten.argument, self.unwritten.file, self.unwritten.line)
        place = self.kind, self.kernel, self.file, self.line, self.argument, self.extent
        return (*place, self.detail, read, self.caused_by)

    @property
    def message(self) -> str:
        """One line."""
        text = f"{self.kind} in {self.kernel}, {self.file}:{self.line}, program {self.program}"
        if self.other is not None:
            text += f" against program {self.other}"
        if self.argument is not None and self.indices is not None and self.extent is not None:
            text += f": {self.argument}[{_span(self.indices)}], extent [{_span(self.extent)}]"
        text += f" ({self.lanes} lane{'s' * (self.lanes != 1)})"
        if self.detail:
            text += f": {self.detail}"
        if self.unwritten is not None:
            read = self.unwritten
            text += f"; nobody wrote {read.argument}[{_span(read.indices)}], loaded at {read.file}:{read.line}"
        if self.caused_by is not None:
            kind, _, file, line, *_ = self.caused_by
            text += f"; follows from {kind} at {file}:{line}"
        return text

    def merged(self, other: Finding) -> Finding:
        """Both as one: the earlier program, the union of indices, the sum of lanes."""
        first, second = sorted((self, other), key=lambda finding: finding.program[::-1])
        indices, unwritten = first.indices, first.unwritten
        if indices is not None and second.indices is not None:
            indices = _union(indices, second.indices)
        if unwritten is not None and second.unwritten is not None:
            unwritten = replace(unwritten, indices=_union(unwritten.indices, second.unwritten.indices))
        return replace(first, indices=indices, unwritten=unwritten, lanes=first.lanes + second.lanes)


class FindingsError(Exception):
    """A kernel launched outside a session had findings."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        super().__init__("\n".join(finding.message for finding in findings))
        self.findings = findings


def _span(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}..{high}" if low < high else "empty"


def _union(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return min(a[0], b[0]), max(a[1], b[1])


def report(
    kind: FindingKind,
    lanes: Tensor,
    offsets: Tensor | None,
    buffer: Memory | None,
    *,
    detail: str = "",
    other: int | None = None,
) -> Tensor:
    """Record `lanes` (bool [P or 1, ...]) as offending, if there are any; `offsets` has the same shape.

    Lanes without a program axis of their own count once for each program. Lanes that are undefined for several
    reasons give a finding for each, and each lane counts for one. `other`: linear id of the program in a race.
    Returns the lanes as consequences of what was recorded, for the mask of undefined lanes that they go to.
    """
    rest = plain(lanes)
    if not some(rest):
        return lanes
    causes: Sources = {}
    for origin, source in sources(lanes):
        part = source.lanes.expand(rest.shape) & rest
        if some(part):
            rest = rest & ~part
            finding = _record(kind, part, offsets, buffer, detail, other, origin, source)
            if origin.cause is None:
                origin = Origin(finding.file, finding.line, cause=finding.key)
            causes[origin] = Source(part, source.low, source.high)
    if some(rest):
        finding = _record(kind, rest, offsets, buffer, detail, other)
        mask = from_origin(rest, Origin(finding.file, finding.line, cause=finding.key))
        causes.update(sources(mask))
    return traced(plain(lanes), causes)


def _record(
    kind: FindingKind,
    lanes: Tensor,
    offsets: Tensor | None,
    buffer: Memory | None,
    detail: str,
    other: int | None,
    origin: Origin | None = None,
    source: Source | None = None,
) -> Finding:
    context = active()
    location = context.location or user_location()
    showing = lanes.reshape(len(lanes), -1).any(1)
    count = int(lanes.sum()) * (len(context.programs) if len(lanes) == 1 else 1)
    indices = extent = unwritten = None
    if offsets is not None and buffer is not None:
        touched = offsets.expand(lanes.shape)[lanes]
        indices, extent = (int(touched.amin()), int(touched.amax())), (buffer.low, buffer.high)
    if origin is not None and source is not None and origin.cause is None:
        kind = _UNINITIALISED.get(kind, kind)
        low, high = (bound.expand(len(showing))[showing] for bound in (source.low, source.high))
        read = int(low.amin()), int(high.amax())
        unwritten = Unwritten(origin.argument, origin.file, origin.line, origin.extent, read)
    finding = Finding(
        kind,
        context.kernel,
        location.file,
        location.line,
        _position(int(context.programs[int(showing.int().argmax())]), context.grid),
        None if buffer is None else buffer.name,
        indices,
        extent,
        count,
        None if other is None else _position(other, context.grid),
        unwritten,
        detail,
        origin.cause if origin is not None else None,
    )
    context.findings.append(finding)
    return finding


def _position(linear: int, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """A program along the axes of its grid."""
    rest, x = divmod(linear, grid[0])
    z, y = divmod(rest, grid[1])
    return x, y, z


def shared_load(name: str, written: Tensor, read: Tensor | None = None) -> Tensor | None:
    """Undefined lanes of a load from shared memory, reported; None if there are none.

    `written`: bool [P or 1, *shape] of the loaded view, true where the program has stored. `read`: the lanes
    that are loaded, if not all. `name`: the allocation's. Indices count row-major within the view.
    """
    missing = ~written if read is None else ~written & read
    if not some(missing):
        return None
    size = missing[0].numel()
    offsets = torch.arange(size).reshape(1, *missing.shape[1:]).expand(missing.shape)
    return report(FindingKind.SHARED_READ_BEFORE_STORE, missing, offsets, _Shared(name, 0, size - 1))


def merge(findings: list[Finding]) -> tuple[Finding, ...]:
    """Findings with equal keys merged into one, in the order of their first appearance."""
    merged: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        known = merged.get(finding.key)
        merged[finding.key] = finding if known is None else known.merged(finding)
    return tuple(merged.values())
