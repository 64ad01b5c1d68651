"""What can go wrong while a kernel executes, apart from findings (see `sanitizer`)."""

import sys
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType

from torch import Tensor

# Every module that the loader executes carries this name in its globals: so a frame is known to be user code.
SOURCE_MARK = "__emulated_source__"


@dataclass(frozen=True)
class Location:
    """A line of a kernel's source file: the file's base name and the line number, 1-based (0: unknown)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_location() -> Location:
    """The innermost line of user code on the call stack. Walks frames: only for when something is found."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if SOURCE_MARK in frame.f_globals:
            return Location(PurePath(frame.f_code.co_filename).name, frame.f_lineno)
        frame = frame.f_back
    return Location("?", 0)


class KernelError(Exception):
    """The kernel asks for something that Triton refuses to compile, or that has no meaning.

    `location` is the line of user code that asked for it; `kernel` the launched kernel, once known.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.location = user_location()
        self.kernel = ""

    def __str__(self) -> str:
        where = f"kernel {self.kernel}, {self.location}" if self.kernel else str(self.location)
        return f"{where}: {self.message}"


class UnknownName(KernelError, AttributeError):
    """The kernel uses a name of the language that the emulator's table lacks."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not known to the emulator; it can be added to the table in its lang module")


class BatchTooLarge(Exception):
    """A value of this batch of programs outgrew the memory budget: the batch must be split. Internal."""


class Divergence(Exception):
    """The programs of a batch part ways. `outcome`: one number a program, [programs]. Internal."""

    def __init__(self, outcome: Tensor) -> None:
        super().__init__()
        self.outcome = outcome
