"""All entries, by the name of the public list that they come from."""

from __future__ import annotations

from collections.abc import Sequence

from fuzz.errors import Exit, Stop
from suites.museum import ours, production
from suites.museum.entry import Entry

ENTRIES: tuple[Entry, ...] = (*ours.ENTRIES, *production.ENTRIES)


def chosen(ids: Sequence[str]) -> tuple[Entry, ...]:
    """The entries of these names, in the museum's order. Raises ``Stop`` (usage) for one that is not there."""
    unknown = [name for name in ids if name not in {entry.id for entry in ENTRIES}]
    if unknown:
        known = ", ".join(entry.id for entry in ENTRIES)
        raise Stop(Exit.USAGE, f"--entry {unknown[0]}: unknown; known: {known}")
    return tuple(entry for entry in ENTRIES if entry.id in ids)
