"""Which keys a query sees, as ranges of keys, and which blocks of keys a block of queries needs.

With the keys of a request in order of position, causality and the window leave every query one contiguous
range [lo, hi) of them, whichever keys were given. Attention does not depend on the order of keys, so
unordered keys are sorted first (`key_order`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.int64]

ALIGNMENT = 16
"""Full blocks start and end at multiples of this many keys where they meet masked ones: aligned rows
multiply faster."""


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """Visible keys of B requests of at most Q queries: query (b, i) sees key j if lo[b, i] <= j < hi[b, i].

    lo, hi: int64 [B, Q] on the CPU. Queries without a visible key, and those past the end of a request, have
    lo = hi = 0.
    Computed with NumPy, which on few numbers costs a fraction of what torch does.
    """

    lo: Tensor
    hi: Tensor

    def span(self) -> tuple[int, int]:
        """Smallest range that holds every visible key; (0, 0) if there is none."""
        high = int(self.hi.numpy().max(initial=0))
        return (int(self.low().min()), high) if high else (0, 0)

    def shifted(self, start: int) -> "KeyRanges":
        """The same ranges when the first `start` keys, invisible to all, are left out."""
        return KeyRanges((self.lo - start).clamp_(min=0), (self.hi - start).clamp_(min=0)) if start else self

    def low(self) -> Integers:
        """`lo`, with empty rows moved out of the way of a minimum."""
        lo, hi = self.lo.numpy(), self.hi.numpy()
        return np.where(lo == hi, np.iinfo(np.int64).max, lo)


@dataclass(frozen=True)
class KeyBlock:
    """Keys start .. stop - 1. masked: some query of the block does not see some of them; else all see all."""

    start: int
    stop: int
    masked: bool


@dataclass(frozen=True)
class QueryBlock:
    """Queries start .. stop - 1 and the blocks of keys that at least one of them may see, in order."""

    start: int
    stop: int
    keys: tuple[KeyBlock, ...]


def key_order(positions: Tensor, kv_lens: Sequence[int]) -> Tensor | None:
    """Index [Tk] that sorts the keys of every request by position; None if they are in order already.

    positions: int64 [Tk] on the CPU.
    """
    parts = torch.split(positions, list(kv_lens))
    if all(bool((part[1:] > part[:-1]).all()) for part in parts):
        return None
    starts = (0, *accumulate(kv_lens))
    return torch.cat([part.argsort() + start for part, start in zip(parts, starts, strict=False)])


def key_ranges(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    causal: bool,
    window: int | None,
    positions: Sequence[Tensor] | None = None,
) -> KeyRanges:
    """Ranges of visible keys of B requests, padded to the longest.

    positions: of each request's keys, int64 and ascending; default 0 .. kv_len - 1.
    """
    q_len, kv_len, context = (np.array(x, dtype=np.int64)[:, None] for x in (q_lens, kv_lens, context_lens))
    row = np.arange(max(q_lens, default=0))
    at = context - q_len + row
    hi = np.broadcast_to(kv_len, at.shape) if not causal else _keys_up_to(at, kv_len, positions)
    lo = np.zeros_like(at) if window is None else _keys_up_to(at - window, kv_len, positions)
    some = (lo < hi) & (row < q_len)
    return KeyRanges(torch.from_numpy(lo * some), torch.from_numpy(hi * some))


def _keys_up_to(at: Integers, kv_len: Integers, positions: Sequence[Tensor] | None) -> Integers:
    """How many keys of the request sit at or before the position `at` [B, Q]."""
    if positions is None:
        return np.clip(at + 1, 0, kv_len)
    rows = [np.searchsorted(keys.numpy(), where, side="right") for keys, where in zip(positions, at, strict=True)]
    return np.array(rows, dtype=np.int64).reshape(at.shape)


def plan_blocks(ranges: KeyRanges, block_q: int, block_k: int) -> list[QueryBlock]:
    """Blocks of at most block_q queries by block_k keys that cover every visible pair; others are skipped.

    A run of keys that every query of the block sees is cut out of the masked ones around it, so that only
    blocks on the diagonal and at the edge of the window need a mask. Every query is in a block, be it one
    without keys.
    """
    queries = ranges.lo.shape[1]
    starts = range(0, queries, block_q)
    if not starts:
        return []
    # Per block: the keys that some query sees, and those that every query sees.
    low = np.minimum.reduceat(ranges.low().min(0), starts).tolist()
    high = np.maximum.reduceat(ranges.hi.numpy().max(0), starts).tolist()
    all_low = np.maximum.reduceat(ranges.lo.numpy().max(0), starts).tolist()
    all_high = np.minimum.reduceat(ranges.hi.numpy().min(0), starts).tolist()
    return [
        QueryBlock(start, min(start + block_q, queries), _cut((a, b), (c, d), block_k))
        for start, a, b, c, d in zip(starts, low, high, all_low, all_high, strict=True)
    ]


def _cut(seen: tuple[int, int], seen_by_all: tuple[int, int], block_k: int) -> tuple[KeyBlock, ...]:
    (low, high), (full_low, full_high) = seen, seen_by_all
    if low >= high:
        return ()
    if low >= full_low and high <= full_high:
        return _chunks(low, high, block_k, masked=False)
    if high - low <= block_k:
        return (KeyBlock(low, high, masked=True),)
    if full_low > low:
        full_low = -(-full_low // ALIGNMENT) * ALIGNMENT
    if full_high < high:
        full_high = full_high // ALIGNMENT * ALIGNMENT
    if full_low >= full_high:
        return _chunks(low, high, block_k, masked=True)
    return (
        *_chunks(low, full_low, block_k, masked=True),
        *_chunks(full_low, full_high, block_k, masked=False),
        *_chunks(full_high, high, block_k, masked=True),
    )


def _chunks(start: int, stop: int, size: int, *, masked: bool) -> tuple[KeyBlock, ...]:
    return tuple(KeyBlock(i, min(i + size, stop), masked) for i in range(start, stop, size))
