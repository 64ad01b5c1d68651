"""What a driver learns about one request that ran in a worker process."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Status(enum.Enum):
    """How a request ended."""

    OK = "ok"
    EXCEPTION = "exception"  # the job raised; the worker lives on
    CRASH = "crash"  # the worker died, or broke its channel
    HANG = "hang"  # a watchdog killed the worker
    OUT_OF_MEMORY = "out of memory"  # over the memory limit, or killed by the kernel for memory


@dataclass(frozen=True)
class Raised:
    """A Python exception of a job, as text: `message` is one line, `traceback` is bounded in length."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Reply:
    """The answer to one request.

    `phase` is the last phase reached: `boot` (fork, import, set-up), `start` (request delivered) or one that
    the job named. `seconds` has the time spent in each phase; a fresh worker's boot is counted in it, but
    not against the request's timeout.

    `harness` is True when the request failed before the job entered the phase `kernel`, in a process where
    no kernel ran before: no target can be to blame. `fresh` is False when the process had run kernels of
    earlier requests: what they corrupted may have caused this failure, and a repetition in a fresh worker
    tells. `retried` says that this is the second attempt (see `Worker`).
    """

    status: Status
    phase: str
    seconds: Mapping[str, float]
    value: dict[str, Any] | None = None
    raised: Raised | None = None
    exit_code: int | None = None  # of a worker that ended by itself; negative: the signal's number
    detail: str = ""  # one line, for people; empty when OK
    output: str = ""  # when it failed: the last 4 KiB that the process wrote to stdout and stderr
    harness: bool = False
    fresh: bool = True
    retried: bool = False

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that killed the worker (`SIGSEGV`), None if none did."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        return signal_name(-self.exit_code)


def signal_name(number: int) -> str:
    """`SIGSEGV` for 11; `signal 40` for one that has no name of its own (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
