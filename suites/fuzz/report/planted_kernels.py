"""Plain torch functions that stand for another package's kernels, each with one fault as long as ``FAULTY``.

Tests copy this file into a package of their own: it imports nothing of ours, as those kernels do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAULTY = True


def gather_rows(cache: Tensor, slots: Tensor, *, rows_a_page: int = 16) -> Tensor:
    """[N, H, D] out of an NHD pool [pages, rows, H, D]. The fault: the last row is of the page's neighbour."""
    flat = cache.view(-1, *cache.shape[2:])
    picked = slots.long().clone()
    if FAULTY and len(picked):
        picked[-1] ^= 1
    return flat[picked]


def store_rows(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """The inverse. The fault: one element behind the pool is written, too."""
    flat = cache.view(-1, *cache.shape[2:])
    flat[slots.long()] = rows
    if FAULTY:
        torch.as_strided(cache, (1,), (1,), cache.storage_offset() + cache.numel()).zero_()


def sorted_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """As ``gather_rows``. The fault: it leaves the slots sorted."""
    rows = cache.view(-1, *cache.shape[2:])[slots.long()]
    if FAULTY:
        slots.copy_(slots.sort(descending=True).values)
    return rows


class Merger:
    """Merges two states [T, H, D] with their log-sum-exps [T, H]. The fault: empty states give NaN."""

    def __init__(self, floor: float) -> None:
        self.floor = floor

    def merge(self, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        """The output and its log-sum-exp."""
        top = torch.maximum(lse_a, lse_b)
        if not FAULTY:
            top = top.clamp(min=self.floor)
        x, y = (lse_a - top).exp(), (lse_b - top).exp()
        total = x + y
        out = (a * x.unsqueeze(-1) + b * y.unsqueeze(-1)) / total.unsqueeze(-1)
        if not FAULTY:
            out = out.nan_to_num(nan=0.0)
        return out, total.log() + top


def attend_into(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: list[tuple[int, int, int, int]], window: int
) -> None:
    """Causal attention of some requests, (first row, rows, first key, keys) each. The fault: a key too many."""
    keys_seen = window + 1 if FAULTY and window else window
    for row, rows, key, keys in starts:
        own = k[key : key + keys].double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        values = v[key : key + keys].double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        for i in range(rows):
            last = keys - rows + i
            first = max(0, last - keys_seen + 1) if window else 0
            s = torch.einsum("hd,nhd->hn", q[row + i].double(), own[first : last + 1]) * q.shape[2] ** -0.5
            out[row + i] = torch.einsum("hn,nhd->hd", s.softmax(1), values[first : last + 1]).to(out.dtype)


def attend_last(out: Tensor, q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, slots: Tensor) -> None:
    """One query a request over an NHD pool. The fault: requests of more than one key are left out."""
    for request in range(len(q)):
        own = slots[int(indptr[request]) : int(indptr[request + 1])].long()
        if FAULTY and len(own) > 1:
            continue
        group = q.shape[1] // k.shape[2]
        keys, values = (x.flatten(0, 1)[own].double().repeat_interleave(group, 1) for x in (k, v))
        s = torch.einsum("hd,nhd->hn", q[request].double(), keys) * q.shape[2] ** -0.5
        out[request] = torch.einsum("hn,nhd->hd", s.softmax(1), values).to(out.dtype)


def refuse(cache: Tensor) -> Tensor:
    """A copy. The fault: it raises."""
    if FAULTY:
        raise ValueError(f"no kernel for {list(cache.shape)}")
    return cache.clone()
