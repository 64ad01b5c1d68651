"""What must hold of a target's arguments, by their names and its convention, checked before its function is called.

A kernel that is given a table too narrow for its contexts, or a slot beyond the pool, reads whatever lies there. The
adapters refuse that with one line, ``ArgumentError``, so that a caller's mistake is not taken for the kernel's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from oracle.convention import Convention
from oracle.kinds import KVLayout, VLayout
from suites.targets.arguments import check_range, check_scale, check_shuffle_5d, check_table, require

F = TypeVar("F", bound=Callable[..., Any])


def checked(convention: Convention) -> Callable[[F], F]:
    """Make a target's function check its arguments first. It raises ``ArgumentError``."""

    def around(function: F) -> F:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*positional: Any, **given: Any) -> Any:
            names = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_POSITIONAL]
            check(convention, dict(zip(names, positional, strict=False)) | given)
            return function(*positional, **given)

        return call  # type: ignore[return-value]

    return around


def check(convention: Convention, given: Mapping[str, Any]) -> None:
    """Raises ``ArgumentError`` for the first thing that cannot be. Names that are not given are not asked about."""
    query, key = given.get("q"), given.get("k", given.get("key"))
    model = next((t for t in (query, key) if t is not None), None)
    if model is not None:
        _check_heads(query, key, given.get("v", given.get("value")))
    k_cache, v_cache = given.get("k_cache"), given.get("v_cache")
    if k_cache is None or v_cache is None:
        return
    head_dim = k_cache.shape[-1] if convention.kv_layout is not KVLayout.SHUFFLE_5D else _dim_of(k_cache)
    pages, page_size = _check_caches(convention, k_cache, v_cache, head_dim if model is None else model.shape[-1])
    if query is not None:
        heads = k_cache.shape[{KVLayout.LINEAR: 1, KVLayout.NHD: 2}.get(convention.kv_layout, 1)]
        require(query.shape[1] % heads == 0, "q", f"{query.shape[1]} heads", f"a multiple of the cache's {heads}")
    _check_lists(given, pages, page_size)
    if convention.descales.fp8_only:
        for name in ("k_descale", "v_descale"):
            scale = given.get(name)
            if k_cache.dtype.itemsize == 1 and (scale is None or scale.dim() == 1):
                check_scale(name, scale, k_cache)


def _dim_of(k_cache: Tensor) -> int:
    return k_cache.shape[2] * k_cache.shape[4] if k_cache.dim() == 5 else -1


def _check_heads(q: Tensor | None, k: Tensor | None, v: Tensor | None) -> None:
    """Queries, keys and values [tokens, heads, dim] fit each other."""
    for name, one in (("q", q), ("k", k), ("v", v)):
        if one is not None:
            require(one.dim() == 3, name, f"{one.dim()} dimensions", "3: [tokens, heads, dim]")
    if k is not None and v is not None:
        require(v.shape[:2] == k.shape[:2], "v", list(v.shape), f"tokens and heads of k, {list(k.shape[:2])}")
    if q is not None and k is not None:
        require(k.shape[-1] == q.shape[-1], "k", f"head dim {k.shape[-1]}", f"the query's, {q.shape[-1]}")
        require(q.shape[1] % k.shape[1] == 0, "q", f"{q.shape[1]} heads", f"a multiple of k's {k.shape[1]}")


def _check_caches(convention: Convention, k: Tensor, v: Tensor, head_dim: int) -> tuple[int, int]:
    """The caches are in the convention's layout; returns how many pages there are, and of how many slots."""
    if convention.kv_layout is KVLayout.SHUFFLE_5D:
        check_shuffle_5d(k, v, head_dim, 5 if convention.v_layout is VLayout.V5D else 4)
        return k.shape[0], k.shape[3]
    dims, layout = _SHAPES[convention.kv_layout]
    for name, one in (("k_cache", k), ("v_cache", v)):
        require(one.dim() == dims, name, f"{one.dim()} dimensions", f"{dims}: {layout}")
    require(k.shape[-1] == head_dim, "k_cache", f"head dim {k.shape[-1]}", f"the query's, {head_dim}")
    require(v.shape[:-1] == k.shape[:-1], "v_cache", list(v.shape), f"all but the head dim of k_cache, {list(k.shape)}")
    page_size = {KVLayout.LINEAR: 1, KVLayout.NHD: k.shape[1]}.get(convention.kv_layout, k.shape[2])
    return k.shape[0], page_size


_SHAPES = {
    KVLayout.LINEAR: (3, "[slots, heads, dim]"),
    KVLayout.NHD: (4, "[pages, page size, heads, dim]"),
    KVLayout.HND: (4, "[pages, heads, page size, dim]"),
}


def _check_lists(given: Mapping[str, Any], pages: int, page_size: int) -> None:
    """Tables and lists name what there is."""
    table, lengths, slots = given.get("page_table"), given.get("lengths"), given.get("slots")
    if table is not None and lengths is not None:
        check_table(table, lengths, page_size, pages, "page_table")
    if slots is None:
        return
    starts, slot_map = given.get("kv_indptr"), given.get("slot_map")
    total = int(starts[-1]) if starts is not None else int(lengths.sum()) if lengths is not None else len(slots)
    require(total <= len(slots), "slots", f"{len(slots)} entries", f"{total} and more")
    stored = slots[:total]
    if "key" in given:
        # A token with a negative slot is not stored.
        stored = stored[stored >= 0]
    if slot_map is not None:
        check_range("slots", stored, len(slot_map), "entries of slot_map")
        if given.get("window", 0) in (None, -1):
            # A layer of a backend without a window has its keys in the full pool, whatever the map says.
            return
        stored = slot_map[stored.to(torch.int64)]
        stored = stored[stored >= 0] if "key" in given else stored
    check_range("slots" if slot_map is None else "slot_map", stored, pages * page_size, "slots of the pool")
