"""What must hold of a call's arguments before anything is launched, each with one clear error."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.layout import vector_width


class ArgumentError(ValueError):
    """An argument that the kernels cannot take. One line: its name, what it is, and what is allowed."""


def require(condition: bool, name: str, got: object, allowed: str) -> None:
    """Raises ``ArgumentError`` unless ``condition`` holds."""
    if not condition:
        raise ArgumentError(f"{name}: {got}; allowed: {allowed}")


def check_shuffle_5d(k_cache: Tensor, v_cache: Tensor, head_dim: int, v_dims: int = 5) -> None:
    """K [pages, H, D // x, g, x], x elements to 16 bytes, and V [pages, H, g // x, D_v, x], or [pages, H, D_v, g]."""
    x = vector_width(k_cache.dtype)
    require(k_cache.dim() == 5, "key_cache", f"{k_cache.dim()} dimensions", "5")
    require(v_cache.dim() == v_dims, "value_cache", f"{v_cache.dim()} dimensions", str(v_dims))
    require(k_cache.dtype == v_cache.dtype, "value_cache", v_cache.dtype, f"the dtype of key_cache, {k_cache.dtype}")
    pages, heads, outer, page_size, inner = k_cache.shape
    require(inner == x, "key_cache", f"vectors of {inner}", f"{x} for {k_cache.dtype}")
    if v_dims == 5:
        require(page_size % x == 0, "page size", page_size, f"a multiple of {x} for {k_cache.dtype}")
    require(outer * x == head_dim, "key_cache", f"head dim {outer * x}", f"the query's, {head_dim}")
    whole = (page_size // x, v_cache.shape[3], x) if v_dims == 5 else (v_cache.shape[2], page_size)
    expected = (pages, heads, *whole)
    require(tuple(v_cache.shape) == expected, "value_cache", list(v_cache.shape), f"{list(expected)}")


def check_table(page_table: Tensor, lengths: Tensor, page_size: int, pages: int, name: str = "block_tables") -> None:
    """A row for each request, wide enough for its context, of pages that there are."""
    require(page_table.dim() == 2, name, f"{page_table.dim()} dimensions", "2: a row of pages a request")
    require(page_table.shape[0] >= len(lengths), name, f"{page_table.shape[0]} rows", f"{len(lengths)}")
    needed = -(-lengths // page_size)
    most = int(needed.max()) if len(lengths) else 0
    width = page_table.shape[1]
    require(width >= most, name, f"{width} pages wide", f"{most} for a context of {_longest(lengths)}")
    used = torch.arange(width, device=page_table.device) < needed[:, None]
    listed = page_table[: len(lengths)][used]
    check_range(name, listed, pages, "pages")


def check_range(name: str, listed: Tensor, count: int, of: str) -> None:
    """Every entry is from 0 to ``count`` - 1."""
    wrong = listed[(listed < 0) | (listed >= count)]
    if len(wrong):
        raise ArgumentError(f"{name}: {int(wrong[0])}; allowed: 0 to {count - 1}, the {of} that there are")


def check_scale(name: str, scale: Tensor | None, of: Tensor) -> None:
    """fp8 needs one factor for the tensor."""
    if of.dtype.itemsize > 1:
        return
    require(scale is not None, name, None, f"a factor for {of.dtype}")
    if scale is not None:
        require(scale.numel() == 1, name, f"{scale.numel()} factors", "1")


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if len(lengths) else 0
