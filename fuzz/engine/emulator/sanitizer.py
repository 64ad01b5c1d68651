"""Findings: what no correct kernel does, each named by kernel, line, program and argument."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from torch import Tensor

from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.errors import user_location

if TYPE_CHECKING:
    from fuzz.engine.emulator.memory import Buffer


class FindingKind(StrEnum):
    """Classes of findings."""

    OUT_OF_BOUNDS_LOAD = "out-of-bounds load"
    OUT_OF_BOUNDS_STORE = "out-of-bounds store"
    UNDEFINED_OUTPUT = "undefined lane stored"
    UNDEFINED_ADDRESS = "undefined lane in an address or mask"
    UNDEFINED_BRANCH = "undefined scalar in a condition"
    INT32_WRAP_ADDRESS = "wrapped int32 in an address"
    INTEGER_DIVISION_BY_ZERO = "integer division by zero"


@dataclass(frozen=True)
class Finding:
    """One class of fault at one line of a launch, with the first program in grid order that shows it.

    `indices` (least and greatest offending element) and `extent` count elements of the argument's dtype from
    its first element; both, and `argument`, are None where no memory is involved. `lanes`: how many.
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

    @property
    def key(self) -> tuple[object, ...]:
        """Findings with equal keys are one finding, seen several times."""
        return self.kind, self.kernel, self.file, self.line, self.argument, self.extent

    @property
    def message(self) -> str:
        """One line."""
        text = f"{self.kind} in {self.kernel}, {self.file}:{self.line}, program {self.program}"
        if self.argument is not None and self.indices is not None and self.extent is not None:
            text += f": {self.argument}[{_span(self.indices)}], extent [{_span(self.extent)}]"
        return f"{text} ({self.lanes} lane{'s' * (self.lanes != 1)})"

    def merged(self, other: Finding) -> Finding:
        """Both as one: the earlier program, the union of indices, the sum of lanes."""
        indices = self.indices
        if indices is not None and other.indices is not None:
            indices = min(indices[0], other.indices[0]), max(indices[1], other.indices[1])
        first = min(self.program, other.program, key=lambda program: program[::-1])
        return replace(self, program=first, indices=indices, lanes=self.lanes + other.lanes)


class FindingsError(Exception):
    """A kernel launched outside a session had findings."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        super().__init__("\n".join(finding.message for finding in findings))
        self.findings = findings


def _span(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}..{high}" if low < high else "empty"


def report(kind: FindingKind, lanes: Tensor, offsets: Tensor | None, buffer: Buffer | None) -> None:
    """Record `lanes` (bool [P or 1, ...]) as offending, if there are any; `offsets` has the same shape.

    Lanes without a program axis of their own count once for each program.
    """
    count = int(lanes.sum())
    if not count:
        return
    context, location = active(), user_location()
    first = 0
    if lanes.shape[0] == 1:
        count *= len(context.programs)
    else:
        first = int(lanes.reshape(len(lanes), -1).any(1).int().argmax())
    linear, program = int(context.programs[first]), []
    for size in context.grid:
        linear, position = divmod(linear, size)
        program.append(position)
    indices = extent = None
    if offsets is not None and buffer is not None:
        touched = offsets.expand(lanes.shape)[lanes]
        indices, extent = (int(touched.amin()), int(touched.amax())), (buffer.low, buffer.high)
    context.findings.append(
        Finding(
            kind,
            context.kernel,
            location.file,
            location.line,
            (program[0], program[1], program[2]),
            None if buffer is None else buffer.name,
            indices,
            extent,
            count,
        )
    )


def merge(findings: list[Finding]) -> tuple[Finding, ...]:
    """Findings with equal keys merged into one, in the order of their first appearance."""
    merged: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        known = merged.get(finding.key)
        merged[finding.key] = finding if known is None else known.merged(finding)
    return tuple(merged.values())
