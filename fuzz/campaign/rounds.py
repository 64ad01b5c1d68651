"""Which cases a campaign tries on one target, in rounds of a fixed size.

Every second case of each shard is the plan's, until every pair of features that it can reach is covered: what takes
three of them together would wait too long for its turn. Each of the others is a mutation of one that showed something,
or a free draw with a preference for boundary classes that were tried with little. Case i of a round is a function of
(seed, round, i, number of shards, corpus at the round's start) alone; results change the corpus between rounds only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from fuzz.campaign.corpus import Altered, Corpus, Entry, Reason, Seen, Weighted
from fuzz.case import Case
from fuzz.errors import Exit, Stop
from fuzz.plan import Choices, CounterChooser, Plan, key_of
from fuzz.space import Space

ROUND = 32
"""Cases in one round of one target, those of all shards together."""

PLANNED_EVERY = 2
"""Of so many cases of a shard, one is the plan's."""

_STREAMS = 2
"""Counters of one case: what kind it is, and the case itself."""


class Origin(StrEnum):
    """How a case came to be."""

    PLAN = "plan"
    FRESH = "fresh"
    MUTATION = "mutation"


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``of`` of every round, counted from 1."""

    number: int = 1
    of: int = 1

    @property
    def indices(self) -> range:
        """The indices of a round that are this shard's."""
        return range(self.number - 1, ROUND, self.of)

    def count(self, round_: int, index: int) -> int:
        """How many cases the shard has before this one of its own, over all rounds."""
        return round_ * len(self.indices) + index // self.of


WHOLE = Shard()


def parse_shard(text: str) -> Shard:
    """``2/4``. Raises ``Stop`` (usage)."""
    number, slash, of = text.partition("/")
    if slash and number.isdecimal() and of.isdecimal() and len(text) < 8 and 1 <= int(number) <= int(of) <= ROUND:
        return Shard(int(number), int(of))
    raise Stop(Exit.USAGE, f"--shard: {text[:60]!r}; allowed: I/N with 1 <= I <= N <= {ROUND}, as in 2/4")


@cache
def _turns(shards: int, cases: int) -> Mapping[tuple[int, int], int]:
    """The plan's turns among so many shards of rounds of so many cases, by round and index; later rounds repeat them.

    Of each shard's own cases every second one is the plan's, whichever its indices are. Neighbouring shards take turns.
    """
    parts = [Shard(number, shards) for number in range(1, shards + 1)]
    places = [(round_, index) for round_ in range(PLANNED_EVERY) for index in range(cases)]
    planned = [(r, i) for r, i in places if (parts[i % shards].count(r, i) + i % shards) % PLANNED_EVERY == 0]
    return {place: turn for turn, place in enumerate(planned)}


@dataclass(frozen=True)
class Ask:
    """A case, and its place in the search of its target."""

    target: str
    round: int
    index: int
    case: Case
    choices: Choices
    origin: Origin


@dataclass(frozen=True)
class Closed:
    """A round that has all its results: how many, and what they added to the corpus."""

    target: str
    round: int
    cases: int
    entries: tuple[Entry, ...]


class Search:
    """The cases of one target. ``next`` gives them, ``note`` takes what came of them, in any order within a round."""

    def __init__(self, space: Space, seed: int, shard: Shard = WHOLE) -> None:
        self.name = space.declaration.name
        self.corpus = Corpus(space)
        self.space = space
        self._seed, self._shard = seed, shard
        self._plan = Plan(space, seed)
        self._begin(0)

    def _begin(self, round_: int) -> None:
        self._round = round_
        self._todo = iter(self._shard.indices)
        self._next_index = next(self._todo, None)
        self._seen: dict[int, tuple[Case, Choices, Seen]] = {}

    @property
    def covered(self) -> bool:
        """Whether the plan has no pair of features left to cover."""
        return not self._plan.missing

    def place(self) -> int | None:
        """The number of the next case, counted over all rounds and shards; None while the round's results are out."""
        return None if self._next_index is None else self._round * ROUND + self._next_index

    def next(self) -> Ask:
        """The next case. Raises ``RuntimeError`` where ``place`` is None."""
        if self._next_index is None:
            raise RuntimeError("the results of the round are not in")
        index, self._next_index = self._next_index, next(self._todo, None)
        case, choices, origin = self._draw(index)
        return Ask(self.name, self._round, index, case, choices, origin)

    def note(self, ask: Ask, seen: Seen) -> Closed | None:
        """Take over a result. Returns the round, if this was the last that it waited for."""
        self._seen[ask.index] = (ask.case, ask.choices, seen)
        if len(self._seen) < len(self._shard.indices):
            return None
        added = self.corpus.absorb(self._round, self._seen)
        closed = Closed(self.name, self._round, len(self._seen), tuple(added))
        self._begin(self._round + 1)
        return closed

    def _draw(self, index: int) -> tuple[Case, Choices, Origin]:
        turn = self._turn(index)
        planned = None if turn is None else self._plan.covering(turn)
        if planned is not None:
            return *planned, Origin.PLAN
        key = key_of(self._seed, self._round, self.name, "search")
        decide, stream = CounterChooser(key, index * _STREAMS), index * _STREAMS + 1
        reasons = [reason for reason in Reason if self.corpus.entries[reason]]
        if not reasons or decide.integer("mutate", 0, 1) == 0:
            fresh = Weighted(key, stream, self.corpus)
            return self.space.draw(fresh), fresh.picked, Origin.FRESH
        entries = self.corpus.entries[decide.choose("reason", reasons)]
        choices = entries[decide.integer("entry", 0, len(entries) - 1)].choices
        altered = Altered(key, stream, choices, decide.integer("at", 0, len(choices) - 1))
        return self.space.draw(altered), altered.picked, Origin.MUTATION

    def _turn(self, index: int) -> int | None:
        """Which of the plan's cases this one is; None where it is not the plan's turn."""
        turns = _turns(self._shard.of, ROUND)
        repeated, round_ = divmod(self._round, PLANNED_EVERY)
        turn = turns.get((round_, index))
        return None if turn is None else repeated * len(turns) + turn
