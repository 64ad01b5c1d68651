"""Keys and values of each request, from dense or ragged tensors or from a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from oracle.assertion.arguments import ArgumentsError, Lengths, lengths, tensor, within, wrong
from oracle.assertion.queries import TensorLayout, padded_rows
from oracle.diagnose.model import Surroundings
from oracle.kinds import KVLayout, Role, VLayout
from oracle.layout import CacheGeometry, LayoutError, read_slots, unpack, vector_width

_POOL_ELEMENTS = 1 << 21
"""Of a pool no larger than this, what its other slots hold is looked at to explain a failure."""


@dataclass(frozen=True, eq=False)
class Keys:
    """k [Tk, Hkv, D], v [Tk, Hkv, D_v], their number in each request, and what lies around them."""

    k: Tensor
    v: Tensor
    lens: tuple[int, ...]
    around: Callable[[], Surroundings] = Surroundings
    """looked at where the result is wrong"""
    words: str = ""
    """the cache's layout, for the description"""


def given_keys(k: object, v: object, layout: TensorLayout, own: Lengths) -> Keys:
    """Keys from tensors in the layout of q."""
    if layout is TensorLayout.THD:
        k = tensor("k", k, "tokens, kv heads, dim", None, None, None)
        v = tensor("v", v, "tokens, kv heads, dim", k.shape[0], k.shape[1], None)
        lens = lengths("lengths", own, None, None)
        if sum(lens) != k.shape[0]:
            raise wrong("lengths", list(lens), f"a sum of k's {k.shape[0]} tokens")
        return Keys(k, v, lens)
    axes = "B, H, S, D" if layout is TensorLayout.BHSD else "B, S, H, D"
    k = tensor("k", k, axes, None, None, None, None)
    v = tensor("v", v, axes, *k.shape[:3], None)
    if layout is TensorLayout.BHSD:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    batch, longest = k.shape[:2]
    lens = lengths("lengths", own, batch, (longest,) * batch)
    within("lengths", lens, longest, "k")
    rows = padded_rows(lens, longest).to(k.device)
    return Keys(k.flatten(0, 1)[rows], v.flatten(0, 1)[rows], lens)


@dataclass(frozen=True, eq=False, kw_only=True)
class Cache:
    """The arguments that say where a paged cache has its keys. Shapes: `oracle.layout`."""

    k_cache: object
    v_cache: object
    page_table: object
    slots: object
    lengths: Lengths
    layout: KVLayout
    v_layout: VLayout
    page_size: object

    def keys(self) -> Keys:
        """Read every key that a request has."""
        k, v = self._geometry(Role.K, self.k_cache), self._geometry(Role.V, self.v_cache)
        if (k.heads, k.num_slots) != (v.heads, v.num_slots):
            raise wrong("v_cache", self.v_cache, f"the pages and heads of k_cache, {shown_pages(k)}")
        rows = self._rows(k)
        lens = tuple(len(own) for own in rows)
        flat = torch.cat([*rows, torch.arange(0)])
        k_cache, v_cache = _tensor(self.k_cache), _tensor(self.v_cache)
        words = f"{self.layout} cache" + (f", page {k.page_size}" if k.page_size > 1 else "")
        return Keys(
            read_slots(k_cache, flat, k), read_slots(v_cache, flat, v), lens, partial(self._around, rows, k, v), words
        )

    def _geometry(self, role: Role, cache: object) -> CacheGeometry:
        name = f"{role}_cache"
        if not isinstance(cache, Tensor) or not cache.is_floating_point():
            hint = "; of bytes that are fp8, its view in that dtype" if isinstance(cache, Tensor) else ""
            raise wrong(name, cache, f"a floating tensor in the layout {self.layout}{hint}")
        try:
            sizes = self._sizes(role, cache)
            found = CacheGeometry(self.layout, role, *sizes, cache.dtype, self.v_layout)
        except ArgumentsError:
            raise
        except LayoutError as error:
            raise wrong(name, cache, f"the layout {self.layout}: {error}") from None
        except (IndexError, ValueError):
            raise wrong(name, cache, f"the axes of {self._axes(role)}") from None
        if found.shape != tuple(cache.shape):
            raise wrong(name, cache, f"{list(found.shape)} in the layout {self.layout}")
        return found

    def _axes(self, role: Role) -> str:
        if self.layout is not KVLayout.SHUFFLE_5D:
            axes = {"linear": "slots, Hkv, D", "nhd": "pages, page size, Hkv, D", "hnd": "pages, Hkv, page size, D"}
            return f"{self.layout}, [{axes[self.layout]}]"
        of_v = {VLayout.V5D: "page size / x, D, x", VLayout.V4D: "D, page size"}[self.v_layout]
        return f"shuffle_5d, [pages, Hkv, {'D / x, page size, x' if role is Role.K else of_v}], x = 16 bytes"

    def _sizes(self, role: Role, cache: Tensor) -> tuple[int, int, int, int]:
        """Blocks, heads, page size, dim."""
        shape = cache.shape
        match self.layout, role, self.v_layout:
            case KVLayout.LINEAR, _, _:
                slots, heads, dim = shape
                size = self._linear_page(slots)
                return slots // size, heads, size, dim
            case KVLayout.NHD, _, _:
                blocks, size, heads, dim = shape
            case KVLayout.HND, _, _:
                blocks, heads, size, dim = shape
            case _, Role.K, _:
                blocks, heads, groups, size, _ = shape
                dim = groups * vector_width(cache.dtype)
            case _, _, VLayout.V5D:
                blocks, heads, groups, dim, _ = shape
                size = groups * vector_width(cache.dtype)
            case _:
                blocks, heads, dim, size = shape
        return blocks, heads, size, dim

    def _linear_page(self, slots: int) -> int:
        if self.page_size is None and self.page_table is None:
            return 1
        size = self.page_size
        if not isinstance(size, int) or size < 1 or slots % size:
            raise wrong("page_size", size, f"an integer that divides the {slots} slots of a linear cache")
        return size

    def _rows(self, k: CacheGeometry) -> list[Tensor]:
        """Slots of each request, in order of position, on the CPU."""
        if (self.page_table is None) == (self.slots is None):
            given = "neither" if self.slots is None else "both"
            raise wrong("page_table", None, f"one of page_table and slots, {given} is given")
        if self.slots is not None:
            lens = lengths("lengths", self.lengths, None, None)
            slots = _integers("slots", self.slots, 1, "[tokens]")
            if sum(lens) != len(slots):
                raise wrong("lengths", list(lens), f"a sum of the {len(slots)} slots")
            _inside("slots", slots, k.num_slots)
            return list(slots.split(list(lens)))
        table = _integers("page_table", self.page_table, 2, "[requests, pages]")
        lens = lengths("lengths", self.lengths, table.shape[0], None)
        within("lengths", lens, table.shape[1] * k.page_size, f"a table of {table.shape[1]} pages of {k.page_size}")
        found = []
        for own, length in zip(table, lens, strict=True):
            position = torch.arange(length)
            pages = own[position // k.page_size]
            _inside("page_table", pages, k.num_blocks)
            found.append(pages * k.page_size + position % k.page_size)
        return found

    def _around(self, rows: list[Tensor], k: CacheGeometry, v: CacheGeometry) -> Surroundings:
        """What is known beside the keys: the pages, the slots behind the last key, and a small pool as a whole."""
        size = k.page_size
        if size == 1:
            return Surroundings()
        pages = tuple(tuple((own[::size] // size).tolist()) for own in rows)
        if self.page_table is None and any(
            own[i] != own[i - i % size] + i % size for own in rows for i in range(len(own))
        ):
            return Surroundings()  # slots that do not fill pages in order
        past = [torch.arange(int(own[-1]) + 1, (int(own[-1]) // size + 1) * size) if len(own) else own for own in rows]
        flat, counts = torch.cat([*past, torch.arange(0)]), [len(own) for own in past]
        k_cache, v_cache = _tensor(self.k_cache), _tensor(self.v_cache)
        stale = [read_slots(cache, flat, g).cpu().split(counts) for cache, g in ((k_cache, k), (v_cache, v))]
        around = Surroundings(page_size=size, stale=tuple(zip(*stale, strict=True)), pages=pages)
        if k_cache.numel() + v_cache.numel() > _POOL_ELEMENTS:
            return around
        pools = [unpack(c, g).cpu().view(g.num_blocks, size, g.heads, g.dim) for c, g in ((k_cache, k), (v_cache, v))]
        return replace(around, pool_k=pools[0], pool_v=pools[1])


def shown_pages(geometry: CacheGeometry) -> str:
    """What K and V caches have in common."""
    return f"{geometry.num_blocks} pages of {geometry.page_size} slots and {geometry.heads} heads"


def _tensor(cache: object) -> Tensor:
    assert isinstance(cache, Tensor)
    return cache


def _integers(name: str, value: object, axes: int, shape: str) -> Tensor:
    fits = isinstance(value, Tensor) and value.ndim == axes and value.dtype in (torch.int32, torch.int64)
    if not isinstance(value, Tensor) or not fits:
        raise wrong(name, value, f"an int32 or int64 tensor {shape}")
    return value.to("cpu", torch.int64)


def _inside(name: str, index: Tensor, most: int) -> None:
    outside = index[(index < 0) | (index >= most)]
    if len(outside):
        raise wrong(name, int(outside[0]), f"0 to {most - 1} where a request has keys")
