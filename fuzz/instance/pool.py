"""The pool of pages: how large, which pages a request has, and the caches that hold them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fuzz.buffers import DTYPES, Buffer, Poison, empty_buffer, huge_buffer
from fuzz.case import Case, Placement, Pool
from fuzz.probes import Stream
from oracle import philox
from oracle.kinds import Operation, Role
from oracle.layout import CacheGeometry

HUGE_ELEMENTS = 1 << 31


def geometry(case: Case, role: Role) -> CacheGeometry:
    """Where the elements of the K or V cache of ``case`` lie."""
    return CacheGeometry(
        layout=case.kv_layout,
        role=role,
        num_blocks=num_blocks(case),
        heads=case.num_kv_heads,
        page_size=case.page_size,
        dim=case.head_dim if role is Role.K else case.v_head_dim,
        dtype=DTYPES[case.kv_dtype],
        v_layout=case.v_layout,
    )


def pages_per_request(case: Case) -> list[int]:
    """Pages that each request occupies: exactly as many as its length needs."""
    return [-(-length // case.page_size) for length in case.context_lens]


def reserved(case: Case) -> int:
    """Pages at the start that no request is given: a backend's first one is a dummy."""
    return int(case.operation is Operation.BACKEND)


def num_blocks(case: Case) -> int:
    """Pages in the pool."""
    used = sum(pages_per_request(case))
    if case.pool is Pool.TIGHT:
        return max(used + reserved(case), 1)
    if case.pool is Pool.SPARE:
        return 2 * used + 3 + reserved(case)
    per_block = case.num_kv_heads * case.page_size * min(case.head_dim, case.v_head_dim)
    return HUGE_ELEMENTS // per_block + 2 + used


def pages(case: Case, stream: Stream = Stream.PAGES) -> list[int]:
    """Physical page of each logical page, request after request, shuffled by ``stream``."""
    return [reserved(case) + page for page in _pages(case, stream, num_blocks(case) - reserved(case))]


def _pages(case: Case, stream: Stream, blocks: int) -> list[int]:
    used = sum(pages_per_request(case))
    shuffled = case.placement is Placement.SHUFFLED
    if shuffled and case.pool is Pool.SPARE:
        return [int(page) for page in philox.permutation(case.seed, stream, blocks)[:used]]
    if case.pool is Pool.HUGE:
        half = used // 2
        found = [*range(half), *range(blocks - (used - half), blocks)]
    else:
        found = [2 * page + 1 if case.pool is Pool.SPARE else page for page in range(used)]
    if shuffled:
        found = [found[int(i)] for i in philox.permutation(case.seed, stream, used)]
    return found


def own_pages(case: Case, stream: Stream = Stream.PAGES) -> list[list[int]]:
    """Physical pages of each request, in the order of its positions."""
    table, start = pages(case, stream), 0
    found = []
    for count in pages_per_request(case):
        found.append(table[start : start + count])
        start += count
    return found


@lru_cache(maxsize=2)
def slots_of(case: Case, stream: Stream = Stream.PAGES) -> Tensor:
    """Pool slot of every position of every request: int64 [T]. Not to be written to."""
    g = case.page_size
    rows = [
        own[p // g] * g + p % g
        for own, length in zip(own_pages(case, stream), case.context_lens, strict=True)
        for p in range(length)
    ]
    return torch.tensor(rows, dtype=torch.int64)


def unused_slots(case: Case, held: Tensor) -> Tensor:
    """Slots of the pool that are not among ``held``, ascending: int64. Of a huge pool, those of pages in use."""
    g = case.page_size
    if case.pool is Pool.HUGE:
        listed = torch.tensor(sorted(pages(case)), dtype=torch.int64)
        slots = (listed[:, None] * g + torch.arange(g)).flatten()
    else:
        slots = torch.arange(num_blocks(case) * g)
    return slots[~torch.isin(slots, held)]


def cache(case: Case, role: Role, poison: Poison, device: str) -> Buffer:
    """A poisoned K or V cache, named ``k_cache`` or ``v_cache``."""
    name, shape, dtype = f"{role.value}_cache", geometry(case, role).shape, DTYPES[case.kv_dtype]
    if case.pool is Pool.HUGE:
        return huge_buffer(name, shape, dtype, poison, device=device, blocks=pages(case))
    return empty_buffer(name, shape, dtype, poison, device=device)


def page_table(case: Case, poison: Poison, device: str) -> Buffer:
    """Pages of each request [R, most pages], exactly as wide as needed; past a request's own pages, poison."""
    own = own_pages(case)
    shape = (len(own), max((len(row) for row in own), default=0))
    buffer = empty_buffer("page_table", shape, DTYPES[case.index_dtype], poison, device=device)
    for row, listed in enumerate(own):
        buffer.view[row, : len(listed)] = torch.tensor(listed, dtype=buffer.view.dtype, device=device)
    return buffer
