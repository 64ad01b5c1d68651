"""Rows that a design gives keys of their own, and the keys at the edges of what they see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fuzz.features import PARTITION
from fuzz.probes.geometry import BLOCK, Geometry
from fuzz.probes.stream import Stream
from oracle import philox

WATCHED = 4
"""Rows of a request that are watched: all of a decode's, of a long prefill the first, the last and two others."""


@dataclass(frozen=True)
class Edges:
    """A watched row and the positions lo .. hi - 1 of its request that it sees.

    which: its number among the watched rows of its request. inner: a position at which parts of a split context
    may start; lo if it sees too few keys.
    """

    request: int
    which: int
    row: int
    lo: int
    hi: int
    inner: int


def watched(geometry: Geometry) -> list[Edges]:
    """Every watched row that sees a key."""
    case = geometry.case
    lo, hi = (x.tolist() for x in geometry.ranges)
    picks = philox.uniform_int(case.seed, Stream.PICKS, (len(case.query_lens), 3), 0, 1 << 30).tolist()
    found, start = [], 0
    for request, count in enumerate(case.query_lens):
        rows = list(range(count))
        if count > WATCHED:
            rows = [0, count - 1, *(1 + pick % (count - 2) for pick in picks[request][:2])]
        for which, row in enumerate(start + r for r in rows):
            if lo[row] < hi[row]:
                inner = _inner(case.page_size, lo[row], hi[row], picks[request][2])
                found.append(Edges(request, which, row, lo[row], hi[row], inner))
        start += count
    return found


def _inner(page_size: int, lo: int, hi: int, pick: int) -> int:
    """A multiple of the partition, else of a page, else of a block, with keys of lo .. hi - 1 on both sides."""
    for step in (PARTITION, page_size, BLOCK):
        first, last = lo // step + 1, (hi - 1) // step
        if first <= last:
            return (first + pick % (last - first + 1)) * step
    return lo


def boundary_keys(geometry: Geometry) -> Tensor:
    """Keys at the edges of watched rows, just inside and just outside: int64, counted through all requests."""
    starts, lengths = geometry.key_starts.tolist(), geometry.case.context_lens
    found = {
        starts[row.request] + at
        for row in watched(geometry)
        for at in (row.lo - 1, row.lo, row.hi - 1, row.hi)
        if 0 <= at < lengths[row.request]
    }
    return torch.tensor(sorted(found), dtype=torch.int64)
