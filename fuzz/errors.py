"""What a user can cause: shown as one line, without a traceback, with an exit code. Needs the standard library only."""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import ClassVar


class Exit(IntEnum):
    """Exit codes. Where several apply: 3, 2, 1, 125, 0."""

    CLEAN = 0
    FINDINGS = 1
    USAGE = 2
    HARNESS = 3
    NOTHING = 125
    BISECT_ABORT = 128


class Expected(Exception):
    """An error that a user can cause. The message is one line; ``exit_code`` is what a command ends with."""

    exit_code: ClassVar[Exit] = Exit.USAGE


class Stop(Expected):
    """End the command with an exit code and, perhaps, one line."""

    def __init__(self, code: Exit, message: str = "") -> None:
        super().__init__(message)
        self.code = code


class OutputError(Stop):
    """Standard output takes no more: nobody reads it, or the disk is full."""

    def __init__(self, message: str) -> None:
        super().__init__(Exit.HARNESS, message)


def exit_of(error: OSError) -> Exit:
    """For what cannot be written: a disk that is full or fails is no fault of what was asked for."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    return Exit.HARNESS if full else Exit.USAGE
