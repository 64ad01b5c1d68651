"""Running a grid: in batches, split where programs part ways, one by one where order matters."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fuzz.engine.emulator.context import Context, activate
from fuzz.engine.emulator.errors import BatchTooLarge, Divergence, KernelError
from fuzz.engine.emulator.journal import Journal, Verdict
from fuzz.engine.emulator.options import Options
from fuzz.engine.emulator.sanitizer import FindingsError, merge
from fuzz.engine.emulator.session import Launch, current

Grid = tuple[int, int, int]

_FIRST_BATCH = 64  # programs, while the size of a program's values is unknown
_LARGEST_BATCH = 1 << 16
_BYTES_PER_LANE = 64  # eight live values of eight bytes


@dataclass
class Experience:
    """What earlier launches of one specialisation taught: how many lanes its largest value has in a program,
    and whether its loads must be noted to know if programs depend on each other.
    """

    lanes: int = 0
    note_loads: bool = False


def launch(kernel: str, body: Callable[[], None], grid: Grid, experience: Experience) -> None:
    """Execute `body` for all programs of `grid`, logging to the session.

    The result is that of programs running one after another, the first grid axis fastest. Raises KernelError
    with the kernel's name, and FindingsError outside a session.
    """
    log = current()
    runner = _Runner(kernel, body, grid, log.options if log else Options(), experience)
    previous = activate(runner.context)
    try:
        runner.run()
    except KernelError as error:
        error.kernel = error.kernel or kernel
        raise
    finally:
        activate(previous)
        if log is not None:
            log.found.extend(merge(runner.context.findings))
            log.launches.append(Launch(kernel, grid, grid[0] * grid[1] * grid[2], runner.batches))
    if log is None and runner.context.findings:
        raise FindingsError(merge(runner.context.findings))


class _Runner:
    def __init__(
        self, kernel: str, body: Callable[[], None], grid: Grid, options: Options, experience: Experience
    ) -> None:
        self.body, self.experience = body, experience
        self.serial, self.batches = options.serial, 0
        self.context = Context(kernel=kernel, grid=grid, options=options)
        self.context.limit = max(1, options.batch_bytes // _BYTES_PER_LANE)

    def run(self) -> None:
        start, total = 0, self.context.grid[0] * self.context.grid[1] * self.context.grid[2]
        while start < total:
            end = min(total, start + self._batch_size())
            programs = torch.arange(start, end)
            if len(programs) == 1 or not self._run_batched(programs):
                self._run_serially(programs)
            start = end

    def _batch_size(self) -> int:
        if self.serial:
            return _LARGEST_BATCH
        if not self.experience.lanes:
            return _FIRST_BATCH
        return max(1, min(_LARGEST_BATCH, self.context.limit // self.experience.lanes))

    def _run_serially(self, programs: Tensor) -> None:
        self.context.journal = Journal()
        for program in torch.split(programs, 1):
            self._execute(program)

    def _execute(self, programs: Tensor) -> None:
        self.context.programs = programs
        self.context.largest = 0
        self.body()
        self.batches += 1
        self._learn(programs)

    def _learn(self, programs: Tensor) -> None:
        lanes = -(-self.context.largest // len(programs))
        self.experience.lanes = max(self.experience.lanes, lanes)

    def _run_batched(self, programs: Tensor) -> bool:
        """Run a chunk as batches. False, with nothing left of it, if its programs must run in order."""
        if self.serial:
            return False
        context = self.context
        findings, batches = len(context.findings), self.batches
        while True:
            journal = Journal(enabled=True, note_loads=self.experience.note_loads)
            context.journal = journal
            self._run_parts(programs)
            verdict = journal.verdict()
            if verdict is Verdict.INDEPENDENT:
                return True
            journal.take_back((0, 0))
            del context.findings[findings:]
            self.batches = batches
            if verdict is Verdict.DEPENDENT:
                self.serial = True
                return False
            self.experience.note_loads = True

    def _run_parts(self, programs: Tensor) -> None:
        """Run a batch; where it cannot stay one, take back what it did and run its parts anew."""
        context, waiting = self.context, [programs]
        while waiting:
            group = waiting.pop()
            mark, findings = context.journal.mark(), len(context.findings)
            try:
                self._execute(group)
            except Divergence as divergence:
                parts = _by_outcome(group, divergence.outcome)
            except BatchTooLarge:
                self._learn(group)
                parts = list(group.tensor_split(2))
            else:
                continue
            context.journal.take_back(mark)
            del context.findings[findings:]
            waiting.extend(reversed(parts))


def _by_outcome(programs: Tensor, outcome: Tensor) -> list[Tensor]:
    parts = [programs[outcome == value] for value in torch.unique(outcome)]
    return sorted(parts, key=lambda part: int(part[0]))
