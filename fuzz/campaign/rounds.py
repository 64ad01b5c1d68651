"""Which cases a campaign tries on one target, in rounds of a fixed size.

Every second case is the plan's, until every pair of features that it can reach is covered: what takes three of them
together would wait too long for its turn. Each of the others is a mutation of one that showed something, or a free draw
with a preference for boundary classes that were tried with little. Case i of a round is a function of (seed, round, i,
corpus at the round's start) alone; results change the corpus between rounds only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fuzz.campaign.corpus import Altered, Corpus, Entry, Reason, Seen, Weighted
from fuzz.case import Case
from fuzz.errors import Exit, Stop
from fuzz.plan import Choices, CounterChooser, Plan, key_of
from fuzz.space import Space

ROUND = 32
"""Cases in one round of one target, those of all shards together."""

PLANNED_EVERY = 2
"""Of so many cases, one is the plan's."""

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


WHOLE = Shard()


def parse_shard(text: str) -> Shard:
    """``2/4``. Raises ``Stop`` (usage)."""
    number, slash, of = text.partition("/")
    if slash and number.isdecimal() and of.isdecimal() and len(text) < 8 and 1 <= int(number) <= int(of) <= ROUND:
        return Shard(int(number), int(of))
    raise Stop(Exit.USAGE, f"--shard: {text[:60]!r}; allowed: I/N with 1 <= I <= N <= {ROUND}, as in 2/4")


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
        turn, rest = divmod(self._round * ROUND + index, PLANNED_EVERY)
        planned = self._plan.covering(turn) if rest == 0 else None
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
