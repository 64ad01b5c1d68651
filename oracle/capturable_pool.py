"""Whether the caches of a captured call fit the rest of it, in any layout: which one it is, only the target knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from oracle import limits
from oracle.capturable_options import shown
from oracle.kinds import KVLayout, Role, VLayout
from oracle.layout import CacheGeometry, LayoutError, geometry_of


def pooled(arguments: Mapping[str, Any], out_dim: int) -> Iterator[str]:
    """What is wrong with the caches and what indexes them, by the first layout, if something is by every layout."""
    k, v = arguments["k_cache"], arguments["v_cache"]
    size = arguments.get("page_size", 1)
    if k.ndim == 3 and (type(size) is not int or not 1 <= size <= limits.PAGE_SIZE):
        yield f"page_size: {shown(size)}; allowed: an integer from 1 to {limits.PAGE_SIZE}"
        return
    readings = list(_readings(k, v, size))
    if not readings:
        yield (
            f"v_cache: {v.dtype} {list(v.shape)}; allowed: as many pages, heads and tokens a page as k_cache has, "
            f"{k.dtype} {list(k.shape)}, of its dtype, in a layout of caches"
        )
        return
    said = [next(_misfits(arguments, *reading, out_dim), None) for reading in readings]
    if None not in said:
        yield f"{said[0]}" if len(said) == 1 else f"{said[0]} (in layout {readings[0][0].layout})"


def _readings(k: Tensor, v: Tensor, page_size: int) -> Iterator[tuple[CacheGeometry, CacheGeometry]]:
    """What the two caches can be."""
    for layout, form in product(KVLayout, VLayout):
        try:
            one, other = (
                geometry_of(tuple(cache.shape), cache.dtype, layout, role, form, page_size)
                for cache, role in ((k, Role.K), (v, Role.V))
            )
        except LayoutError:
            continue
        if (one.num_blocks, one.heads, one.page_size, one.dtype) == (
            *(other.num_blocks, other.heads, other.page_size, other.dtype),
        ):
            yield one, other


def _misfits(arguments: Mapping[str, Any], k: CacheGeometry, v: CacheGeometry, out_dim: int) -> Iterator[str]:
    q, new = arguments["q"], arguments.get("k")
    if k.dim != q.shape[2]:
        yield f"k_cache: {k.dim} dimensions; allowed: {q.shape[2]}, those of q"
    if v.dim != out_dim:
        yield f"v_cache: {v.dim} dimensions; allowed: {out_dim}, those of {'out' if new is None else 'v'}"
    if new is not None and k.heads != new.shape[1]:
        yield f"k_cache: {k.heads} heads; allowed: {new.shape[1]}, those of k"
    yield from heads_fit(q.shape[1], k.heads)
    if k.page_size > limits.PAGE_SIZE or max(k.dim, v.dim) > limits.DIM:
        yield f"k_cache: allowed: at most {limits.PAGE_SIZE} tokens a page, {limits.DIM} dimensions"
    if "slots" in arguments:
        yield from _within("slots", arguments["slots"], k.num_slots)
    if "page_table" in arguments:
        yield from _table(arguments["page_table"].cpu(), arguments["lengths"].cpu().long(), k)
    for name in ("k_descale", "v_descale"):
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.ndim == 3:
            if tuple(value.shape) != (k.num_blocks, k.heads, k.page_size):
                yield f"{name}: {list(value.shape)}; allowed: {[k.num_blocks, k.heads, k.page_size]}"
        else:
            yield from factors_fit(name, value, k.heads)


def heads_fit(queries: int, keys: int) -> Iterator[str]:
    """A line, if so many heads of queries cannot share so many of keys."""
    if not 1 <= keys <= limits.HEADS or queries % keys or not 1 <= queries // keys <= limits.HEADS:
        yield f"q: {queries} heads; allowed: a multiple of the {keys} of the keys, at most {limits.HEADS} times it"


def factors_fit(name: str, value: object, heads: int) -> Iterator[str]:
    """A line, if factors are neither one nor one a head."""
    if isinstance(value, Tensor) and value.numel() not in (1, heads):
        yield f"{name}: {list(value.shape)}; allowed: [1], [{heads}] or, of a pool, [pages, {heads}, page size]"


def _table(table: Tensor, lengths: Tensor, k: CacheGeometry) -> Iterator[str]:
    room = table.shape[1] * k.page_size
    for row, length in enumerate(lengths.tolist()):
        if length > room:
            yield f"lengths[{row}]: {length}; allowed: 0 to {room}, what the page table has room for"
    used = torch.arange(table.shape[1]) < (-(-lengths // k.page_size)).unsqueeze(1)
    for row, (pages, own) in enumerate(zip(table, used, strict=True)):
        yield from _within(f"page_table[{row}]", pages[own], k.num_blocks)


def _within(name: str, index: Tensor, limit: int) -> Iterator[str]:
    outside = ((index < 0) | (index >= limit)).nonzero()
    if len(outside):
        place = int(outside[0])
        yield f"{name}: entry {place} is {int(index[place])}; allowed: 0 to {limit - 1}, the pool's"
