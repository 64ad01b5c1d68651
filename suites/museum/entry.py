"""What an entry of the museum is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from suites.museum.mutation import Mutation


class BugClass(StrEnum):
    """The kinds of mistakes that public reports are sorted by."""

    MASKING = "masking"
    LAYOUT = "layout stride"
    SUPPORT = "capacity/shape support"
    NAN = "nan/inf"
    INDEX_LOGIC = "index logic"
    OVERFLOW = "indexing-overflow"
    SINK = "sink"
    LSE_MERGE = "lse-merge"
    STALE = "stale state"
    RACE = "race"
    DISPATCH = "dropped argument / dispatch"
    SCALING = "scaling"
    OUT_OF_BOUNDS = "out-of-bounds"
    UNINITIALISED = "uninitialised memory"
    DTYPE = "dtype format"
    SPECIALISATION = "specialization cache"
    COMPILER = "compiler"
    PRECISION = "precision / determinism"


class Room(StrEnum):
    """Which code the mistake is in."""

    DECODE = "decode"
    EXTEND = "extend"
    WRITE = "write"
    GATHER = "gather"
    MERGE = "merge"
    INDEX = "index"
    HOST = "host"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A public bug, and the same mistake in code that a target runs.

    ``reference`` is OWNER/REPOSITORY#NUMBER on GitHub; ``sentence`` says in our words what was wrong there, and
    ``mutated`` what was done here. ``huge``: cases are drawn as with ``fuzz --huge``.
    """

    id: str
    reference: str
    kind: BugClass
    room: Room
    sentence: str
    mutated: str
    target: str
    mutation: Mutation
    huge: bool = False

    @property
    def url(self) -> str:
        """Where the reference leads."""
        repository, _, number = self.reference.partition("#")
        return f"https://github.com/{repository}/issues/{number}"
