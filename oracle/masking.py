"""Which keys a query sees, as ranges of keys, and which blocks of keys a block of queries needs.

With the keys of a request in order of position, causality and the window leave every query one contiguous
range [lo, hi) of them, whichever keys were given. Attention does not depend on the order of keys, so
unordered keys are sorted first (`key_order`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16
"""Full blocks start and end at multiples of this many keys where they meet masked ones: aligned rows
multiply faster.
"""

_NO_KEY = 1 << 62  # beyond any position, and exact as the float that pad_sequence takes


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """Visible keys of B requests of at most Q queries: key j is visible to query (b, i) if lo[b, i] <= j <
    hi[b, i].

    lo, hi: int64 [B, Q] on the CPU. Queries without a visible key, and those past the end of a request,
    have lo = hi = 0.
    """

    lo: Tensor
    hi: Tensor

    def span(self) -> tuple[int, int]:
        """Smallest range that holds every visible key; (0, 0) if there is none."""
        if not self.lo.numel():
            return 0, 0
        high = int(self.hi.amax())
        return (int(self._low().amin()), high) if high else (0, 0)

    def shifted(self, start: int) -> "KeyRanges":
        """The same ranges when the first `start` keys, invisible to all, are left out."""
        return KeyRanges((self.lo - start).clamp_(min=0), (self.hi - start).clamp_(min=0))

    def _low(self) -> Tensor:
        """`lo` with empty rows moved out of the way of a minimum."""
        return self.lo.masked_fill(self.lo == self.hi, _NO_KEY)


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
    starts = torch.tensor(kv_lens, dtype=torch.int64).cumsum(0).sub_(torch.tensor(kv_lens)).tolist()
    return torch.cat([part.argsort() + start for part, start in zip(parts, starts, strict=True)])


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
    q_len = torch.tensor(q_lens).unsqueeze(1)
    kv_len = torch.tensor(kv_lens).unsqueeze(1)
    first = torch.tensor(context_lens).unsqueeze(1) - q_len
    row = torch.arange(max(q_lens, default=0))
    at = first + row
    table = None if positions is None else _padded(positions)
    hi = kv_len if not causal else _keys_up_to(at, kv_len, table)
    lo = torch.zeros_like(at) if window is None else _keys_up_to(at - window, kv_len, table)
    empty = (hi <= lo) | (row >= q_len)
    return KeyRanges(lo.masked_fill(empty, 0), hi.expand_as(lo).masked_fill(empty, 0))


def _padded(positions: Sequence[Tensor]) -> Tensor:
    table = torch.nn.utils.rnn.pad_sequence(list(positions), batch_first=True, padding_value=_NO_KEY)
    return table.contiguous()


def _keys_up_to(position: Tensor, kv_len: Tensor, table: Tensor | None) -> Tensor:
    """How many keys of the request sit at or before `position` [B, Q]."""
    if table is not None:
        return torch.searchsorted(table, position, right=True)
    return torch.minimum((position + 1).clamp_(min=0), kv_len)


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
    low, high = _per_block(ranges._low(), block_q, torch.amin), _per_block(ranges.hi, block_q, torch.amax)
    all_low, all_high = _per_block(ranges.lo, block_q, torch.amax), _per_block(ranges.hi, block_q, torch.amin)
    return [
        QueryBlock(start, min(start + block_q, queries), _cut((a, b), (c, d), block_k))
        for start, a, b, c, d in zip(starts, low, high, all_low, all_high, strict=True)
    ]


def _per_block(x: Tensor, block_q: int, reduce: Callable[[Tensor], Tensor]) -> list[int]:
    return [int(reduce(part)) for part in torch.split(x, block_q, 1)]


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
