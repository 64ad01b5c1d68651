"""Launch the kernel."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    kernels: ModuleType | None = None,
) -> Tensor:
    """q [R, Hq, D], caches [pages, page size, Hkv, D], page_table [R, pages], lengths [R]; returns [R, Hq, D].

    window: how many keys a query sees, its own counted; 0: all. kernels: the module of kernels, if it is loaded.
    """
    if kernels is None:
        from triton_decode import kernels  # where Triton is installed and sees a GPU
    requests, heads, dim = q.shape
    out = torch.empty_like(q)
    if requests:
        kernels.decode[(requests, heads)](
            q,
            k_cache,
            v_cache,
            page_table,
            lengths,
            out,
            dim**-0.5 if scale is None else scale,
            window,
            page_table.stride(0),
            HEADS=heads,
            GROUP=heads // k_cache.shape[2],
            PAGE=k_cache.shape[1],
            DIM=dim,
        )
    return out
