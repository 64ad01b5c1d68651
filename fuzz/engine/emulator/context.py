"""What the running launch knows: its kernel, its programs, its options. Values and functions read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuzz.engine.emulator.errors import BatchTooLarge, Location
from fuzz.engine.emulator.journal import Journal
from fuzz.engine.emulator.options import Options

if TYPE_CHECKING:
    from fuzz.engine.emulator.coverage import Coverage
    from fuzz.engine.emulator.races import Races
    from fuzz.engine.emulator.sanitizer import Finding


@dataclass(slots=True)
class Context:
    """State of one launch while a batch of its programs executes.

    `programs`: linear ids of the batch, int64 [P], ascending; the first grid axis runs fastest. `findings`:
    those of the launch so far, not merged. `races`: given while programs run in order, if there are several.
    `coverage`: given if it is collected. `largest`: elements of the largest value seen in this batch; one
    above `limit` raises BatchTooLarge while the batch can still be split. `location`: of what happens, given while
    no user code runs.
    """

    kernel: str = ""
    grid: tuple[int, int, int] = (1, 1, 1)
    options: Options = field(default_factory=Options)
    journal: Journal = field(default_factory=Journal)
    findings: list[Finding] = field(default_factory=list)
    races: Races | None = None
    coverage: Coverage | None = None
    programs: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    largest: int = 0
    limit: int = 1 << 62
    location: Location | None = None

    @property
    def running(self) -> bool:
        """Whether a launch is under way."""
        return bool(self.kernel)

    def grew(self, elements: int) -> None:
        """Record a value larger than any before it in this batch."""
        self.largest = elements
        if elements > self.limit and len(self.programs) > 1:
            raise BatchTooLarge


_IDLE = Context()
_active = _IDLE


def active() -> Context:
    """The context of the running launch, or an idle one (for values handled outside a launch)."""
    return _active


def activate(context: Context) -> Context:
    """Make `context` the active one; returns the one before it, to be put back."""
    global _active
    previous, _active = _active, context
    return previous
