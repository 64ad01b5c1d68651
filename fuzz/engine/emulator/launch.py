"""Running a grid: in batches, split where programs part ways, one by one where order matters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fuzz.engine.emulator.allocator import keep_memory
from fuzz.engine.emulator.context import Context, activate
from fuzz.engine.emulator.coverage import Coverage, traced_lines
from fuzz.engine.emulator.errors import BatchTooLarge, Divergence, KernelError
from fuzz.engine.emulator.journal import Journal, Verdict
from fuzz.engine.emulator.memory import store_in_turn
from fuzz.engine.emulator.options import Options
from fuzz.engine.emulator.races import Races
from fuzz.engine.emulator.sanitizer import FindingsError, merge
from fuzz.engine.emulator.session import Launch, current
from fuzz.engine.emulator.specialisation import Specialisation

Grid = tuple[int, int, int]

_FIRST_BATCH = 64  # programs, while the size of a program's values is unknown
_LARGEST_BATCH = 1 << 16
_BYTES_PER_LANE = 64  # eight live values of eight bytes


@dataclass
class Experience:
    """What earlier launches of one specialisation taught: how many lanes its largest value has in a program,
    and through which arguments it loads what it also stores to. `complete`: there was such a launch, of
    several programs.

    Loads that could race are noted once it is known that they could: a batch that stores to what it loads runs
    again with its loads noted, and where programs run one by one, the first launch notes all. So a race can be
    missed once: in a launch that is the first to store to what an earlier chunk of it loaded, or, where programs
    run one by one after a launch that did not, what an earlier program loaded. The next launch finds it.
    """

    lanes: int = 0
    noted: frozenset[str] = frozenset()
    complete: bool = False


def launch(
    kernel: str,
    body: Callable[[], None],
    grid: Grid,
    experience: Experience,
    specialisation: Specialisation | None = None,
) -> None:
    """Execute `body` for all programs of `grid`, logging to the session.

    The result is that of programs running one after another, the first grid axis fastest. Raises KernelError
    with the kernel's name, and FindingsError outside a session.
    """
    keep_memory()
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
            programs = grid[0] * grid[1] * grid[2]
            log.launches.append(Launch(kernel, grid, programs, runner.batches, specialisation))
            log.coverage.merge(runner.coverage)
    if log is None and runner.context.findings:
        raise FindingsError(merge(runner.context.findings))


class _Runner:
    """`races` knows of the programs that are through, once a later one may race with them."""

    def __init__(
        self, kernel: str, body: Callable[[], None], grid: Grid, options: Options, experience: Experience
    ) -> None:
        self.body, self.experience = body, experience
        self.serial, self.batches = options.serial, 0
        self.context = Context(kernel=kernel, grid=grid, options=options)
        self.context.limit = max(1, options.batch_bytes // _BYTES_PER_LANE)
        self.races = Races(experience.noted if experience.complete else None)
        self.coverage = Coverage()

    def run(self) -> None:
        start, total = 0, self.context.grid[0] * self.context.grid[1] * self.context.grid[2]
        several = False
        while start < total:
            end = min(total, start + self._batch_size())
            programs = torch.arange(start, end)
            several = several or end < total
            if len(programs) == 1 or not self._run_batched(programs, several):
                self._run_serially(programs, total > 1)
            start = end
        self.experience.noted |= self.races.mixed()
        self.experience.complete |= total > 1

    def _batch_size(self) -> int:
        if self.serial:
            return _LARGEST_BATCH
        if not self.experience.lanes:
            return _FIRST_BATCH
        return max(1, min(_LARGEST_BATCH, self.context.limit // self.experience.lanes))

    def _run_serially(self, programs: Tensor, several: bool) -> None:
        self.context.journal = Journal()
        self.context.races = self.races if several else None
        with self._covered():
            for program in torch.split(programs, 1):
                self.races.begin(int(program))
                self._execute(program)
        self.context.races = None

    def _execute(self, programs: Tensor) -> None:
        self.context.programs = programs
        self.context.largest = 0
        self.body()
        self.batches += 1
        self._learn(programs)

    def _learn(self, programs: Tensor) -> None:
        lanes = -(-self.context.largest // len(programs))
        self.experience.lanes = max(self.experience.lanes, lanes)

    @contextmanager
    def _covered(self) -> Iterator[Coverage]:
        """Collect coverage within, if it is asked for; counted unless the block raises or empties it."""
        seen = Coverage()
        if not self.context.options.coverage:
            yield seen
            return
        self.context.coverage = seen
        try:
            with traced_lines(seen):
                yield seen
        finally:
            self.context.coverage = None
        self.coverage.merge(seen)

    def _run_batched(self, programs: Tensor, several: bool) -> bool:
        """Run a chunk as batches. False, with nothing left of it, if its programs must run in order.

        `several`: the launch has more chunks.
        """
        if self.serial:
            return False
        context = self.context
        findings, batches = len(context.findings), self.batches
        while True:
            journal = context.journal = Journal(enabled=True, noted=self.experience.noted)
            with self._covered() as seen:
                self._run_parts(programs)
                verdict = journal.verdict()
                if several and verdict is Verdict.INDEPENDENT:
                    # Atomics order programs of several chunks only if they run in order.
                    if not journal.synchronised and self.races.absorb(journal):
                        return True
                    verdict = Verdict.DEPENDENT
                if verdict is Verdict.STORES_MEET and not several:
                    self._store_in_turn(programs)
                    verdict = Verdict.INDEPENDENT
                if verdict is Verdict.INDEPENDENT:
                    return True
                seen.clear()
            self.experience.noted |= journal.unknown()
            journal.take_back((0, 0))
            del context.findings[findings:]
            self.batches = batches
            if verdict is not Verdict.LOADS_UNKNOWN:
                self.serial = True
                return False
            if self.races.noted is not None:
                self.races.noted = self.experience.noted

    def _store_in_turn(self, programs: Tensor) -> None:
        """The batch is the whole launch, and its programs met only where they store."""
        journal, self.context.journal = self.context.journal, Journal()
        stores = list(journal.stores)
        journal.take_back((0, 0))
        store_in_turn(stores, programs, self.races)

    def _run_parts(self, programs: Tensor) -> None:
        """Run a batch; where it cannot stay one, take back what it did and run its parts anew."""
        context, waiting = self.context, [programs]
        while waiting:
            group = waiting.pop()
            mark, findings = context.journal.mark(), len(context.findings)
            try:
                self._execute(group)
            except Divergence as divergence:
                parts = _by_outcome(context.programs, divergence.outcome)
                rest = group[~torch.isin(group, context.programs)]
                parts = [*parts, rest] if len(rest) else parts
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
