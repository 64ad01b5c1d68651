"""Sessions: what the kernels launched within one found and did."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from fuzz.engine.emulator.coverage import Coverage
from fuzz.engine.emulator.fresh import FreshMemory
from fuzz.engine.emulator.options import Options
from fuzz.engine.emulator.sanitizer import Finding, merge
from fuzz.engine.emulator.specialisation import Specialisation


@dataclass(frozen=True)
class Launch:
    """One launch: `programs` of the grid ran in `batches` batches (equal numbers: one by one).

    `specialisation` is what a compiler would have compiled for it, None where no kernel was given.
    """

    kernel: str
    grid: tuple[int, int, int]
    programs: int
    batches: int
    specialisation: Specialisation | None = None


@dataclass(eq=False)
class Log:
    """Launches of a session, in order, and their findings, equal ones merged.

    `coverage`: what the launches reached, if the options ask for it. `fresh`: memory, by storage, that was
    handed out unwritten (`mark_fresh`).
    """

    options: Options
    launches: list[Launch] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    fresh: dict[int, FreshMemory] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return merge(self.found)

    def mark_fresh(self, tensor: Tensor, pattern: int | None = None) -> None:
        """Note that nobody has written to the storage of `tensor`; the log keeps it alive.

        `pattern`: what every element holds, as an integer of the element's bits. With it, elements that the
        host writes are told from those that it does not; without it, a host that writes any writes all.
        """
        if tensor.device.type == "cpu" and tensor.numel():
            self.fresh[tensor.untyped_storage().data_ptr()] = FreshMemory(tensor, pattern)


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


def fresh_memory(storage: int) -> FreshMemory | None:
    """The fresh memory at a storage's address, if a session knows of any there."""
    for log in reversed(_sessions):
        if storage in log.fresh:
            return log.fresh[storage]
    return None
