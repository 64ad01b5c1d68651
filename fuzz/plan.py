"""Which cases a campaign tries on a target, and which feature pairs they cover.

Case i of a round is a function of (seed, round, i) and the target's space alone. As long as a pair of
features has not been covered, each case is the best of a few candidates that are pinned to such a pair;
afterwards cases are free draws.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import combinations, count, product
from typing import TypeVar

from fuzz.case import Case
from fuzz.features import Feature, request_labels, shared_labels
from fuzz.space import Pair, Space
from oracle import philox

T = TypeVar("T")

CANDIDATES = 6
"""Draws tried for one case while pairs are missing: the most new pairs win."""

ATTEMPTS = 8
"""Times that one pair is pinned before it is given up; coverage then shows it as a hole."""

Choices = tuple[tuple[str, str | int], ...]
"""What a chooser was asked for and picked, in order: a case is drawn again from it, or with one pick changed."""


def key_of(*words: object) -> int:
    """A key for counters, of the words that say what is drawn from it."""
    return int.from_bytes(blake2b("/".join(map(str, words)).encode(), digest_size=8).digest(), "little")


class CounterChooser:
    """Picks from Philox counters: the same on every machine and version.

    ``pins`` fixes named options; a pin that is not among the options offered is passed over.
    """

    def __init__(self, key: int, stream: int, pins: Mapping[str, str] | None = None) -> None:
        self._key, self._stream, self._pins = key, stream, pins or {}
        self._words: list[int] = []
        self._blocks = 0
        self._picked: list[tuple[str, str | int]] = []

    @property
    def picked(self) -> Choices:
        """Everything that was picked so far."""
        return tuple(self._picked)

    def _below(self, limit: int) -> int:
        if not self._words:
            self._words = philox.block(self._key, self._stream, self._blocks)[::-1]
            self._blocks += 1
        return self._words.pop() * limit >> 32

    def choose(self, name: str, options: Sequence[T]) -> T:
        """One of ``options``, each as likely as the others."""
        drawn = options[self._below(len(options))]
        if name in self._pins:
            drawn = next((option for option in options if str(option) == self._pins[name]), drawn)
        self._picked.append((name, str(drawn)))
        return drawn

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""
        drawn = low + self._below(high - low + 1)
        self._picked.append((name, drawn))
        return drawn


class Plan:
    """An endless sequence of cases for one target, with the coverage reached so far."""

    def __init__(self, space: Space, seed: int, round_: int = 0) -> None:
        self.space = space
        self.missing: dict[Pair, None] = dict.fromkeys(space.pairs())
        self._attempts: dict[Pair, int] = {}
        self._key = key_of(seed, round_, space.declaration.name)
        self._next_index = 0

    def __iter__(self) -> Iterator[Case]:
        for index in count(self._next_index):
            drawn = self.covering(index)
            yield self.space.draw(CounterChooser(self._key, index * CANDIDATES)) if drawn is None else drawn[0]

    def covering(self, index: int) -> tuple[Case, Choices] | None:
        """Case ``index``, and how it was drawn; None where no pair is missing any more.

        The cases before it, which it depends on, are drawn too if they were not yet. Cases can be asked for in
        rising order only.
        """
        drawn = None
        while self.missing and self._next_index <= index:
            drawn = self._draw(self._next_index)
            self._next_index += 1
        return drawn if self._next_index == index + 1 else None

    def _draw(self, index: int) -> tuple[Case, Choices]:
        pair = next(iter(self.missing))
        self._attempts[pair] = self._attempts.get(pair, 0) + 1
        choosers = [CounterChooser(self._key, index * CANDIDATES + i, dict(pair)) for i in range(CANDIDATES)]
        drawn = [(self.space.draw(chooser), chooser.picked) for chooser in choosers]
        covered = [pairs_among(self.missing, self.space, case) for case, _ in drawn]
        best = max(range(CANDIDATES), key=lambda i: (pair in covered[i], len(covered[i])))
        if pair not in covered[best] and self._attempts[pair] >= ATTEMPTS:
            del self.missing[pair]
        for one in covered[best]:
            del self.missing[one]
        return drawn[best]


def pairs_of(space: Space, case: Case) -> set[Pair]:
    """Declared feature pairs that ``case`` shows.

    A length and a query make a pair only where one request has both. Two labels of one feature make none.
    """
    found: set[Pair] = set()
    for shown in _shown(space, case):
        found |= {frozenset((a, b)) for a, b in combinations(sorted(shown), 2) if a[0] != b[0]}
    return found


def pairs_among(pairs: Container[Pair], space: Space, case: Case) -> set[Pair]:
    """Those of ``pairs`` that ``case`` shows: far quicker than ``pairs_of``, as what all requests share is paired once.

    Pairs of two labels of one feature are not looked for: ``pairs`` are to have none.
    """
    shared = space.declared(shared_labels(case))
    shown = [*combinations(shared, 2)]
    for own in {space.declared(labels) for labels in request_labels(case)}:
        shown += [*product(own, shared), *combinations(own, 2)]
    return {pair for pair in map(frozenset, shown) if pair in pairs}


def _shown(space: Space, case: Case) -> Iterator[frozenset[Feature]]:
    """The declared features that each request shows, with those of the whole case."""
    shared = space.declared(shared_labels(case))
    for own in request_labels(case) or [set()]:
        yield shared | space.declared(own)


DTYPES = ("dtype", "kv_dtype")

Cell = tuple[tuple[str, ...], str]
"""Dtypes, as their features are labelled, and the boundary class of a length."""


def dtypes_of(picked: Mapping[str, object]) -> tuple[str, ...]:
    """The labels of the features that are dtypes."""
    return tuple(str(picked[name]) for name in DTYPES if name in picked)


class Coverage:
    """What was shown by cases that were really run, against what a target declares: pairs of features, and features
    for each choice of dtypes and each boundary class of a length.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.wanted = set(space.pairs())
        self.seen: set[Pair] = set()
        self._unseen = set(self.wanted)
        self.cells: dict[Cell, set[Feature]] = {}

    def add(self, case: Case) -> set[Pair]:
        """Count a case that ran. Returns the pairs that no case had shown."""
        found = pairs_among(self._unseen, self.space, case)
        self._unseen -= found
        self.seen |= found
        for shown in _shown(self.space, case):
            dtypes = dtypes_of(dict(shown))
            for _, boundary in (feature for feature in shown if feature[0] == "length"):
                self.cells.setdefault((dtypes, boundary), set()).update(shown)
        return found

    @property
    def holes(self) -> list[Pair]:
        """Declared pairs that no case has shown, in a fixed order."""
        return sorted(self.wanted - self.seen, key=sorted)

    def boundary_classes(self) -> tuple[set[str], set[str]]:
        """Length classes seen, and those declared."""
        seen = {label for pair in self.seen for name, label in pair if name == "length"}
        return seen, set(self.space.dimensions["length"])

    @cached_property
    def wanted_cells(self) -> dict[Cell, set[Feature]]:
        """For dtypes and a boundary class, the features that some case could show together with them."""
        dimensions = self.space.dimensions
        axes = [[(name, label) for label in dimensions[name]] for name in DTYPES if name in dimensions]
        rest = [(name, label) for name, own in dimensions.items() if name not in (*DTYPES, "length") for label in own]
        cells: dict[Cell, set[Feature]] = {}
        for boundary in dimensions["length"]:
            for dtypes in product(*axes):
                fixed = [*dtypes, ("length", boundary)]
                if all(frozenset(pair) in self.wanted for pair in combinations(fixed, 2)):
                    cell = (dtypes_of(dict(dtypes)), boundary)
                    cells[cell] = {f for f in rest if all(frozenset((f, one)) in self.wanted for one in fixed)}
        return cells

    def missing_cells(self) -> dict[Cell, set[Feature]]:
        """For dtypes and a boundary class, the features that no case has shown together with them."""
        return {cell: wanted - self.cells.get(cell, set()) for cell, wanted in self.wanted_cells.items()}
