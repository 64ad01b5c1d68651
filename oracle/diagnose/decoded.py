"""Which keys a row attended to, as data and in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, order=True)
class Key:
    """A key of a request, by its position, or a slot of the pool that holds no key (request and position -1).

    slot: in the pool, page * page size + place in the page; -1 where no pool is known.
    """

    request: int
    position: int
    slot: int = -1


@dataclass(frozen=True)
class Change:
    """A key that a row counted otherwise than it should.

    count: 0 is missing, 1 once, 2 twice. weight: the multiple of the key's own weight that fits best, before it is
    taken for the integer. expected: 1 for a key that the row sees, 0 for others.
    """

    key: Key
    count: int
    expected: int
    weight: float


@dataclass(frozen=True)
class RowKeys:
    """What some heads of a row attended to. changes: None where it cannot be told, or not in one way only."""

    row: int
    request: int
    heads: tuple[int, ...]
    all_heads: bool
    changes: tuple[Change, ...] | None

    @property
    def missing(self) -> tuple[Key, ...]:
        """Keys that the row sees and did not count."""
        return tuple(c.key for c in self.changes or () if c.count < c.expected)

    @property
    def extra(self) -> tuple[Key, ...]:
        """Keys and slots counted that the row does not see, or more often than once."""
        return tuple(c.key for c in self.changes or () if c.count > c.expected)


def lines(
    decoded: Iterable[RowKeys], page_size: int | None = None, pages: Sequence[Sequence[int]] | None = None
) -> list[str]:
    """One line for each thing that is wrong: 'row 0 misses key 255', 'row 1: page 3 read where page 7 belongs'.

    page_size: to recognise whole pages; of physical pages where slots are known, else of a request's pages, from 0.
    pages: the pool's page of each page of each request; that they are read in order instead is said first.
    """
    rows = _together(decoded)
    found = [line for row in rows for line in _lines(row, page_size)]
    if page_size is not None and pages is not None and _in_order(rows, page_size, pages):
        found.insert(0, "the pool's pages 0, 1, ... are read in order: the page table is not followed")
    return found


def _together(decoded: Iterable[RowKeys]) -> list[RowKeys]:
    """Heads of a row that counted the same keys as one."""
    found: dict[object, RowKeys] = {}
    for row in decoded:
        counted = None if row.changes is None else tuple((c.key, c.count) for c in row.changes)
        same = found.get((row.row, counted))
        heads = row.heads if same is None else tuple(sorted({*same.heads, *row.heads}))
        if heads == tuple(range(heads[0], heads[-1] + 1)):
            found[row.row, counted] = replace(row, heads=heads)
        else:
            found[row.row, counted, row.heads] = row
    return list(found.values())


def _in_order(rows: Sequence[RowKeys], g: int, pages: Sequence[Sequence[int]]) -> bool:
    """Whether each row read the first pages of the pool, as many as its request has, and two of them wrongly in all."""
    wrong = 0
    for row in rows:
        own = set(pages[row.request])
        lost = {c.key.slot // g for c in row.changes or () if c.count < c.expected}
        more = {c.key.slot // g for c in row.changes or () if c.count > c.expected}
        if (own - lost) | more != set(range(len(own))):
            return False
        wrong += len(lost)
    return wrong > 1


def _lines(row: RowKeys, g: int | None) -> list[str]:
    who = f"row {row.row}" if row.all_heads else f"row {row.row}, {_several('head', row.heads)}"
    if row.changes is None:
        return [f"{who}: what it attended to cannot be told"]
    lost = [c for c in row.changes if c.count < c.expected]
    more = [c for c in row.changes if c.count > c.expected]
    found = []
    if g is not None and g > 1:
        for page, members in _by_page_name(lost, g).items():
            places = [_place(c.key, g) for c in members]
            read = _by_page_name(more, g)
            other = next((name for name, own in read.items() if [_place(c.key, g) for c in own] == places), None)
            if len(members) > 1 and other is not None:
                found.append(f"{who}: {other} read where {page} belongs")
                taken = {*members, *read[other]}
                lost, more = [c for c in lost if c not in taken], [c for c in more if c not in taken]
    found += [f"{who} misses {words}" for words in _runs(lost, row.request)]
    for count in sorted({c.count for c in more}):
        often = "" if count == 1 else " twice" if count == 2 else f" {count} times"
        same = [c for c in more if c.count == count]
        hidden = [c for c in same if not c.expected and c.key.request == row.request]
        others = [c for c in same if c not in hidden]
        found += [f"{who} counts {words}{often}" for words in _runs(others, row.request)]
        found += [f"{who} counts {words}{often}, which it may not see" for words in _runs(hidden, row.request)]
    return found


def _by_page_name(changes: Iterable[Change], g: int) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    for change in changes:
        key = change.key
        name = f"page {key.slot // g}" if key.slot >= 0 else f"page {key.position // g} of request {key.request}"
        found.setdefault(name, []).append(change)
    return found


def _place(key: Key, g: int) -> int:
    return (key.slot if key.slot >= 0 else key.position) % g


def _runs(changes: Sequence[Change], own: int) -> list[str]:
    """Neighbouring keys together: 'key 3', 'keys 5 to 9', 'key 3 of request 1', 'unused slot 70'."""
    runs: list[list[Key]] = []
    for key in sorted(change.key for change in changes):
        before = runs[-1][-1] if runs else None
        step = None if before is None or before.request != key.request else _number(key) - _number(before)
        if step == 1:
            runs[-1].append(key)
        else:
            runs.append([key])
    found = []
    for run in runs:
        stale = run[0].request < 0
        noun = "unused slot" if stale else "key"
        of = "" if stale or run[0].request == own else f" of request {run[0].request}"
        found.append(_several(noun, [_number(key) for key in run]) + of)
    return found


def _number(key: Key) -> int:
    return key.slot if key.request < 0 else key.position


def _several(noun: str, numbers: Sequence[int]) -> str:
    """'head 3', 'heads 4 to 7'. The numbers are neighbours."""
    return f"{noun} {numbers[0]}" if len(numbers) == 1 else f"{noun}s {numbers[0]} to {numbers[-1]}"
