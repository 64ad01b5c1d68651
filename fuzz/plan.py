"""Which cases a campaign tries on a target, and which feature pairs they cover.

Case i of a round is a function of (seed, round, i) and the target's space alone. As long as a pair of
features has not been covered, each case is the best of a few candidates that are pinned to such a pair;
afterwards cases are free draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import combinations
from typing import TypeVar

from fuzz.case import Case
from fuzz.features import Feature
from fuzz.space import Pair, Space
from oracle import philox

T = TypeVar("T")

CANDIDATES = 6
"""Draws tried for one case while pairs are missing: the most new pairs win."""

ATTEMPTS = 8
"""Times that one pair is pinned before it is given up and reported as a hole."""

_BATCH = 128
"""Integers drawn from the counter generator at a time."""


class CounterChooser:
    """Picks from Philox counters: the same on every machine and version.

    ``pins`` fixes named options; a pin that is not among the options offered is passed over.
    """

    def __init__(self, key: int, stream: int, pins: Mapping[str, str] | None = None) -> None:
        self._key, self._stream, self._pins = key, stream, pins or {}
        self._raw: list[int] = []
        self._drawn = 0

    def _below(self, limit: int) -> int:
        if self._drawn == len(self._raw):
            self._raw = philox.raw(self._key, self._stream, len(self._raw) + _BATCH).tolist()
        value = self._raw[self._drawn]
        self._drawn += 1
        return value * limit >> 32

    def choose(self, name: str, options: Sequence[T]) -> T:
        """One of ``options``, each as likely as the others."""
        drawn = options[self._below(len(options))]
        for option in options:
            if name in self._pins and str(option) == self._pins[name]:
                return option
        return drawn

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""
        return low + self._below(high - low + 1)


class Plan:
    """An endless sequence of cases for one target, with the coverage reached so far."""

    def __init__(self, space: Space, seed: int, round_: int = 0) -> None:
        self.space = space
        self.missing: dict[Pair, None] = dict.fromkeys(space.pairs())
        self.total = len(self.missing)
        self.holes: list[Pair] = []
        self._attempts: dict[Pair, int] = {}
        identity = f"{seed}/{round_}/{space.declaration.name}".encode()
        self._key = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little")

    def __iter__(self) -> Iterator[Case]:
        index = 0
        while True:
            case = self._next(index)
            self._cover(case)
            yield case
            index += 1

    def _next(self, index: int) -> Case:
        stream = index * CANDIDATES
        if not self.missing:
            return self.space.draw(CounterChooser(self._key, stream))
        pair = next(iter(self.missing))
        self._attempts[pair] = self._attempts.get(pair, 0) + 1
        pins = dict(pair)
        drawn = [self.space.draw(CounterChooser(self._key, stream + i, pins)) for i in range(CANDIDATES)]
        best = max(drawn, key=lambda case: sum(p in self.missing for p in pairs_of(self.space, case)))
        if pair not in pairs_of(self.space, best) and self._attempts[pair] >= ATTEMPTS:
            self.holes.append(pair)
            del self.missing[pair]
        return best

    def _cover(self, case: Case) -> None:
        for pair in pairs_of(self.space, case):
            self.missing.pop(pair, None)


def pairs_of(space: Space, case: Case) -> set[Pair]:
    """Feature pairs that ``case`` shows. Two labels of one feature (two lengths) make no pair."""
    shown: list[Feature] = sorted(space.features(case))
    return {frozenset((a, b)) for a, b in combinations(shown, 2) if a[0] != b[0]}


class Coverage:
    """Pairs and features shown by cases that were really run, against those a target declares."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.wanted = set(space.pairs())
        self.seen: set[Pair] = set()

    def add(self, case: Case) -> None:
        """Count a case that ran."""
        self.seen |= pairs_of(self.space, case) & self.wanted

    @property
    def holes(self) -> list[Pair]:
        """Declared pairs that no case has shown, in a fixed order."""
        return sorted(self.wanted - self.seen, key=sorted)

    def boundary_classes(self) -> tuple[set[str], set[str]]:
        """Length classes seen, and those declared."""
        seen = {label for pair in self.seen for name, label in pair if name == "length"}
        return seen, set(self.space.dimensions["length"])
