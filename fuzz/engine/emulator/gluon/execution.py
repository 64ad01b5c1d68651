"""What one execution of a Gluon kernel keeps besides values: its warps, and its copies under way.

A batch that must be split runs anew from the start, so this state begins afresh with every execution.
"""

from dataclasses import dataclass, field

from fuzz.engine.emulator.gluon import layouts
from fuzz.engine.emulator.gluon.shared import Copies


@dataclass
class Execution:
    """State of one execution of a kernel's body by one batch of programs."""

    copies: Copies = field(default_factory=Copies)


_execution = Execution()


def execution() -> Execution:
    """The state of the execution under way."""
    return _execution


def begin(warps: int) -> None:
    """Start an execution with the given number of warps in a program."""
    global _execution
    _execution = Execution()
    layouts.machine.warps, layouts.machine.lanes = warps, 0
