"""The fewest keys, or runs or pages of keys, counted otherwise that explain a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from oracle.diagnose.decode_rows import Row
from oracle.diagnose.decoded import Change

MOST_KEYS = 6
MOST_PAGES = 4
"""Changes that are looked for together: two pages exchanged for others are four."""
BEAM = 4
"""Partial explanations that are kept at each step of the search."""
RESOLVED = 3.0
"""A key is looked for only if it moves some element by more than so many units of ``Row.moves``."""
UNSEEN = 1e-3
"""Units of ``Row.moves`` below which a key is no part of an answer."""
_LARGEST_MATRIX = 1 << 24


class AtomKind(IntEnum):
    """What an atom is."""

    KEY = 0
    RUN = 1
    PAGE = 2


@dataclass(frozen=True, eq=False)
class Atoms:
    """What may have been counted wrongly together: single candidates, then ranges of them (runs and pages).

    moves [A, M] and goal [M]: as ``Row.moves``; least, most [A]: how often more than asked for. kinds: where
    the atoms of each kind start and end. ranges: of the atoms after the candidates.
    """

    moves: Tensor
    goal: Tensor
    least: Tensor
    most: Tensor
    kinds: tuple[tuple[int, int], ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def singles(self) -> int:
        """How many candidates there are."""
        return self.kinds[AtomKind.KEY][1]

    @cached_property
    def seen(self) -> list[bool]:
        """Whether a candidate shows at all: one behind a closed gate moves nothing, alone or in a range."""
        shown: list[bool] = (self.moves[: self.singles].nan_to_num(0.0).abs().amax(1) > UNSEEN).tolist()
        return shown

    @cached_property
    def size(self) -> Tensor:
        """Squared length of each atom's moves, 0 for those that are too small to be told."""
        told = self.moves.isfinite().all(1) & (self.moves.abs().amax(1) > RESOLVED)
        return torch.where(told, (self.moves * self.moves).sum(1), 0.0)

    def members(self, atom: int) -> Iterator[int]:
        """Candidates of an atom."""
        for start, stop in ((atom, atom + 1),) if atom < self.singles else self.ranges[atom - self.singles]:
            yield from range(start, stop)

    def counts(self, chosen: Sequence[int], times: Tensor) -> dict[int, int]:
        """Candidates that show and how often more they are counted, for atoms counted ``times``."""
        found: Counter[int] = Counter()
        for atom, n in zip(chosen, times.tolist(), strict=True):
            for i in self.members(atom):
                found[i] += int(n)
        return {i: n for i, n in sorted(found.items()) if n and self.seen[i]}

    def best(self, left: Tensor) -> tuple[Tensor, Tensor]:
        """For each atom how often to count it to explain what is left, and how much of its square that is."""
        along = self.moves.nan_to_num(0.0, 0.0, 0.0) @ left
        allowed = (self.size > 0) & torch.where(along > 0, self.most > 0, self.least < 0)
        times = torch.where(allowed, along / self.size.clamp(min=1e-300), 0.0)
        return times, times * along

    def fit(self, index: Sequence[int]) -> tuple[Tensor, Tensor]:
        """How often to count some atoms together, by least squares, and what that leaves of the goal."""
        moves = self.moves[list(index)].T
        times: Tensor = torch.linalg.lstsq(moves, self.goal[:, None]).solution.squeeze(1)
        return times, self.goal - moves @ times

    def whole(self, index: Sequence[int], times: Tensor) -> Tensor:
        """The nearest counts that are integers and allowed."""
        own = list(index)
        return times.round().clamp(self.least[own], self.most[own])


def _atoms(row: Row, heads: Sequence[int]) -> Atoms:
    """Candidates alone; runs at both ends of what the row sees; its pages, and other pages in their place."""
    c = row.candidates
    singles, goal = row.moves(heads)
    n = len(singles)
    least = torch.zeros(n, dtype=torch.float64)
    least[row.first : row.last] = -1.0
    sums = torch.cat([torch.zeros(1, singles.shape[1], dtype=torch.float64), singles.nan_to_num(0.0).cumsum(0)])
    start = c.problem.kv_starts[row.request]
    stop = start + c.problem.kv_lens[row.request]
    lost = [(row.first, at) for at in range(row.first + 2, row.last)]
    lost += [(at, row.last) for at in range(row.first + 1, row.last - 1)]
    more = [(at, row.first) for at in range(start, row.first - 1)]
    more += [(row.last, at) for at in range(row.last + 2, stop + 1)]
    ranges: list[tuple[tuple[int, int], ...]] = [(r,) for r in lost + more]
    times = [-1.0] * len(lost) + [1.0] * len(more)
    runs = n + len(ranges)
    for group, count in _pages(row):
        ranges.append(group)
        times.append(count)
    grouped = torch.zeros(len(ranges), singles.shape[1], dtype=torch.float64)
    for part in range(max((len(r) for r in ranges), default=0)):
        which = [i for i, r in enumerate(ranges) if len(r) > part]
        a = torch.tensor([ranges[i][part][0] for i in which], dtype=torch.int64)
        b = torch.tensor([ranges[i][part][1] for i in which], dtype=torch.int64)
        grouped[which] += sums[b] - sums[a]
    signs = torch.tensor(times, dtype=torch.float64)
    return Atoms(
        torch.cat([singles, grouped]),
        goal,
        torch.cat([least, signs.clamp(max=0.0)]),
        torch.cat([least + 3.0, signs.clamp(min=0.0)]),
        ((0, n), (n, runs), (runs, n + len(ranges))),
        tuple(ranges),
    )


def _pages(row: Row) -> Iterator[tuple[tuple[tuple[int, int], ...], float]]:
    """The row's pages, to be lost, and the same places of every other page, to be read instead or as well."""
    c, g = row.candidates, row.candidates.page_size
    if g is None or g == 1:
        return
    start = c.problem.kv_starts[row.request]
    own, places = {}, set()
    for number in range((row.first - start) // g, (row.last - 1 - start) // g + 1):
        a, b = max(row.first, start + number * g), min(row.last, start + (number + 1) * g)
        own[c.page_of[row.request][number]] = (a, b)
        places.add((a - start - number * g, b - start - number * g))
    for a, b in own.values():
        if b - a > 1:
            yield ((a, b),), -1.0
    for ranges in c.by_page.values():
        for first, last in places:
            found, at = [], 0
            for a, b in ranges:
                low, high = max(first, at), min(last, at + b - a)
                if low < high:
                    found.append((a + low - at, a + high - at))
                at += b - a
            if last - first > 1 and sum(b - a for a, b in found) == last - first:
                yield tuple(found), 1.0


def search(row: Row, heads: tuple[int, ...]) -> tuple[Change, ...] | None:
    """The fewest changes that explain the heads; None if there are none, or others that do as well.

    Keys are tried first, then one run of them, then pages: not together, since long runs have enough in common with
    any change to mislead a search that grows.
    """
    some = heads[: max(1, _LARGEST_MATRIX // (4 * len(row.candidates.identity) * row.out.shape[1]))]
    atoms = _atoms(row, some)
    for kind, most in ((AtomKind.KEY, MOST_KEYS), (AtomKind.RUN, 1), (AtomKind.PAGE, MOST_PAGES)):
        beam: list[tuple[int, ...]] = [()]
        for _ in range(most):
            grown = {longer for chosen in beam for longer in _extensions(atoms, chosen, kind)}
            left = {chosen: float(atoms.fit(chosen)[1].square().sum()) for chosen in grown}
            beam = sorted(left, key=lambda chosen: (left[chosen], chosen))[:BEAM]
            for chosen in beam:
                times, _ = atoms.fit(chosen)
                whole = atoms.whole(chosen, times)
                counts = atoms.counts(chosen, whole)
                if bool(whole.all()) and counts and row.fits(counts, heads):
                    another = _another(row, heads, atoms, chosen, whole, counts)
                    return None if another else _changes(row, atoms, chosen, times, counts)
    return None


def _extensions(atoms: Atoms, chosen: tuple[int, ...], kind: AtomKind) -> Iterator[tuple[int, ...]]:
    """``chosen`` and one atom of a kind more: each of those that explain most of what is left."""
    _, gain = atoms.best(atoms.fit(chosen)[1] if chosen else atoms.goal)
    start, stop = atoms.kinds[kind]
    own = gain[start:stop]
    for atom in (own.topk(min(BEAM + len(chosen), len(own))).indices + start).tolist():
        if atom not in chosen and gain[atom] > 0:
            yield tuple(sorted((*chosen, atom)))


def _another(
    row: Row,
    heads: tuple[int, ...],
    atoms: Atoms,
    chosen: tuple[int, ...],
    whole: Tensor,
    counts: dict[int, int],
) -> bool:
    """Whether some other atom, in place of one of the chosen, explains the heads too."""
    grown = 1.0 + max(sum(n * float(row.p[head, i]) for i, n in counts.items()) for head in heads)
    limit = len(atoms.goal) * max(grown, 1.0) ** 2
    for i, own in enumerate(chosen):
        rest = [j for j in range(len(chosen)) if j != i]
        others, fixed = tuple(chosen[j] for j in rest), whole[rest]
        left = atoms.goal - fixed @ atoms.moves[list(others)]
        times = torch.maximum(torch.minimum(atoms.best(left)[0].round(), atoms.most), atoms.least)
        along = atoms.moves.nan_to_num(0.0, 0.0, 0.0) @ left
        cost = left.square().sum() - 2 * times * along + times * times * atoms.size
        near = ((cost <= limit) & (times != 0)).nonzero().squeeze(1).tolist()
        for atom in near:
            other = atoms.counts((*others, atom), torch.cat([fixed, times[atom : atom + 1]]))
            if atom != own and other != counts and row.fits(other, heads):
                return True
    return False


def _changes(
    row: Row, atoms: Atoms, chosen: tuple[int, ...], times: Tensor, counts: dict[int, int]
) -> tuple[Change, ...]:
    weights: Counter[int] = Counter()
    for atom, fitted in zip(chosen, times.tolist(), strict=True):
        for i in atoms.members(atom):
            weights[i] += fitted
    found = []
    for i, n in counts.items():
        expected = int(row.first <= i < row.last)
        found.append(Change(row.candidates.identity[i], expected + n, expected, expected + weights[i]))
    return tuple(sorted(found, key=lambda change: change.key))
