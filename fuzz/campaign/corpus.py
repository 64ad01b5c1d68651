"""What a target's results say about which cases to try next.

Only integers and sets enter (coverage, margins in coarse buckets), only between rounds, and in the order of the cases:
the state is the same whatever the number of workers, and on any machine that sees the same results.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from fuzz.case import Case
from fuzz.check.result import CaseResult
from fuzz.features import Feature
from fuzz.plan import Choices, CounterChooser, Coverage, dtypes_of
from fuzz.space import Space
from oracle.verdict import Verdict

T = TypeVar("T")

MARGINS = (1 / 8, 1 / 4, 1 / 2)
"""Error over budget: how many of these a case reaches is its margin. Coarse, so that it rarely differs by machine."""

LENGTH_CHOICES = ("length", "other_length")


class Reason(StrEnum):
    """Why a case is kept for mutation."""

    PAIR = "pair"
    """it shows a pair of features that none had shown"""
    KERNEL = "kernel"
    """it reached something in a kernel that none had reached; emulator only"""
    MARGIN = "margin"
    """of all cases of its dtypes it came closest to its budget"""


@dataclass(frozen=True)
class Seen:
    """What one case's result tells: whether it ran, whether it failed, its margin, what its kernels reached."""

    ran: bool
    failed: bool
    margin: int
    reached: frozenset[str] = frozenset()


def seen_of(result: CaseResult, recorded: frozenset[str] = frozenset()) -> Seen:
    """Read a result, and what was ``recorded`` of what its kernels reached."""
    ratio, coverage = result.worst_ratio, result.coverage or {}
    return Seen(
        ran=result.verdict is not Verdict.UNSUPPORTED,
        failed=result.verdict.is_finding,
        margin=0 if ratio is None else sum(ratio >= limit for limit in MARGINS),
        reached=recorded.union(reached(coverage)),
    )


def reached(coverage: Mapping[str, Mapping[str, object]]) -> Iterable[str]:
    """What kernels reached, one text for each line and each outcome, from ``emulator.Coverage.to_dict``."""
    for name, function in coverage.items():
        for line in _sequence(function["reached"]):
            yield f"{name} line {line}"
        for kind in ("conditions", "loops", "accesses"):
            table = function[kind]
            assert isinstance(table, Mapping)
            for place, outcomes in table.items():
                for outcome in outcomes:
                    yield f"{name} {kind} {place} {outcome}"


def _sequence(value: object) -> Sequence[object]:
    assert isinstance(value, Sequence)
    return value


@dataclass(frozen=True)
class Entry:
    """A case that is kept for mutation: where it was tried, how it was drawn, and why it is kept."""

    round: int
    index: int
    choices: Choices
    reasons: tuple[Reason, ...]


@dataclass
class Corpus:
    """What is known of a target at the start of a round."""

    space: Space
    coverage: Coverage = field(init=False)
    reached: set[str] = field(default_factory=set)
    margins: dict[tuple[str, ...], int] = field(default_factory=dict)
    entries: dict[Reason, list[Entry]] = field(default_factory=lambda: {reason: [] for reason in Reason})

    def __post_init__(self) -> None:
        self.coverage = Coverage(self.space)

    def absorb(self, round_: int, results: Mapping[int, tuple[Case, Choices, Seen]]) -> list[Entry]:
        """Take over what a round's cases, by index, have shown. Returns the entries that this adds.

        A case that failed is a finding, not an entry: its neighbours fail as well.
        """
        added = []
        for index in sorted(results):
            case, choices, seen = results[index]
            reasons = self._reasons(case, seen) if seen.ran else ()
            if reasons and not seen.failed:
                entry = Entry(round_, index, choices, reasons)
                added.append(entry)
                for reason in reasons:
                    self.entries[reason].append(entry)
        return added

    def _reasons(self, case: Case, seen: Seen) -> tuple[Reason, ...]:
        dtypes = (case.dtype, case.kv_dtype)
        found = {
            Reason.PAIR: bool(self.coverage.add(case)),
            Reason.KERNEL: bool(seen.reached - self.reached),
            Reason.MARGIN: seen.margin > self.margins.get(dtypes, 0),
        }
        self.reached |= seen.reached
        self.margins[dtypes] = max(seen.margin, self.margins.get(dtypes, 0))
        return tuple(reason for reason, new in found.items() if new)

    def weight(self, picked: Mapping[str, object], boundary: str) -> int:
        """How often a boundary class of a length is offered beside what was picked before it: 1, or up to 4 for one
        that few or no features were shown with.
        """
        cell = (dtypes_of(picked), boundary)
        wanted = self.coverage.wanted_cells.get(cell)
        if not wanted:
            return 1
        missing: set[Feature] = wanted - self.coverage.cells.get(cell, set())
        return 1 + 3 * len(missing) // len(wanted)


class Weighted(CounterChooser):
    """Draws freely, but offers boundary classes of lengths as often as their weights say."""

    def __init__(self, key: int, stream: int, corpus: Corpus) -> None:
        super().__init__(key, stream)
        self._corpus = corpus

    def choose(self, name: str, options: Sequence[T]) -> T:
        """One of ``options``."""
        if name in LENGTH_CHOICES:
            picked = dict(self.picked)
            options = [option for option in options for _ in range(self._corpus.weight(picked, str(option)))]
        return super().choose(name, options)


class Altered(CounterChooser):
    """Picks again what ``choices`` say, up to pick ``at``, which becomes another.

    Where what was picked is no longer offered, or more is asked for than was, it draws. So every result is a case
    that the space allows, and nearly the one that ``choices`` made.
    """

    def __init__(self, key: int, stream: int, choices: Choices, at: int) -> None:
        super().__init__(key, stream)
        self._before: dict[str, deque[tuple[str | int, bool]]] = defaultdict(deque)
        for place, (name, value) in enumerate(choices):
            self._before[name].append((value, place == at))

    def choose(self, name: str, options: Sequence[T]) -> T:
        """One of ``options``."""
        if self._before[name]:
            value, change = self._before[name].popleft()
            options = [option for option in options if (str(option) == value) is not change] or options
        return super().choose(name, options)

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``: changed to a neighbour or an end, a seed to any other."""
        if self._before[name]:
            value, change = self._before[name].popleft()
            if isinstance(value, int) and low <= value <= high:
                if not change:
                    return super().integer(name, value, value)
                near = sorted({low, value - 1, value + 1, high} - {value, low - 1, high + 1})
                if near and name != "seed":
                    nearest = near[self._below(len(near))]
                    return super().integer(name, nearest, nearest)
        return super().integer(name, low, high)
