"""Sessions: what the kernels launched within one found and did."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fuzz.engine.emulator.options import Options
from fuzz.engine.emulator.sanitizer import Finding, merge


@dataclass(frozen=True)
class Launch:
    """One launch: `programs` of the grid ran in `batches` batches (equal numbers: one by one)."""

    kernel: str
    grid: tuple[int, int, int]
    programs: int
    batches: int


@dataclass(eq=False)
class Log:
    """Launches of a session, in order, and their findings, equal ones merged."""

    options: Options
    launches: list[Launch] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return merge(self.found)


_sessions: list[Log] = []


@contextmanager
def session(options: Options | None = None) -> Iterator[Log]:
    """Collect findings and launches of the kernels that run within; nested sessions keep their own.

    Outside any session kernels run under default options, and a launch with findings raises FindingsError
    when it is through, so that none is lost.
    """
    log = Log(options or Options())
    _sessions.append(log)
    try:
        yield log
    finally:
        _sessions.pop()


def current() -> Log | None:
    """The innermost session."""
    return _sessions[-1] if _sessions else None
