"""Launch the portable kernels: attention of ragged queries over keys from one or several caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz.engine import loader
from fuzz.engine.loader import KernelLoader
from oracle.fp8 import FORMAT_OF_DTYPE

BLOCK_M, BLOCK_N = 32, 32
"""Query rows of a tile, and keys of one step: the same for every batch, so that a request's result is too."""

LONGEST_WINDOW = 1 << 30
"""A window of no fewer keys is no window."""


@KernelLoader
def kernels() -> ModuleType:
    """The module of Triton kernels beside this one."""
    return loader.load_source(Path(__file__).with_name("kernels.py"), f"{__package__}.kernels", {}, engines.current())


@dataclass(frozen=True, eq=False, kw_only=True)
class Keys:
    """Some keys of each of R requests, with their values, in one cache.

    ``k`` and ``v``: linear [slots, Hkv, D] (a page of one), or SHUFFLE 5D, V in 5D or 4D. ``index``: the page table
    [R, most pages], or the slots of all requests one after the other, those of request r from ``starts[r]`` on.
    ``counts`` [R]: how many; ``firsts`` [R]: the position of the first. ``k_descale`` and ``v_descale`` have one
    element, or one a kv head.
    """

    k: Tensor
    v: Tensor
    index: Tensor
    counts: Tensor
    starts: Tensor | None = None
    firsts: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.k.shape[3] if self.k.dim() == 5 else 1

    @property
    def v_dim(self) -> int:
        """Dimension of the values."""
        return self.v.shape[2] if self.v.dim() == 4 else self.v.shape[-2] if self.v.dim() == 5 else self.v.shape[-1]

    def k_strides(self) -> tuple[int, ...]:
        """Of page, head, group of dimensions, slot in the page."""
        return self.k.stride()[:4] if self.k.dim() == 5 else (*self.k.stride()[:2], 0, 0)

    def v_strides(self) -> tuple[int, ...]:
        """Of page, head, group of slots, dimension, slot in its group."""
        if self.v.dim() == 5:
            return self.v.stride()
        page, head, third, *fourth = self.v.stride()
        return (page, head, fourth[0], third, 0) if fourth else (page, head, 0, third, 0)


def attention(
    q: Tensor,
    q_indptr: Tensor,
    contexts: Tensor,
    parts: Sequence[Keys],
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    splits: int = 1,
    block: int = BLOCK_N,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [Tq, Hq, D] over every part of the keys: out [Tq, Hq, D_v], lse float32 [Tq, Hq].

    The queries of request r are rows ``q_indptr[r]`` to ``q_indptr[r + 1]`` and its last positions among
    ``contexts[r]``. ``window`` counts keys, the query's own included; ``sinks`` [Hq] are logits. Each part is
    cut into ``splits``, of whole steps of ``block`` keys, a power of two from 16.
    """
    heads, kv_heads, dim, dim_v = q.shape[1], parts[0].k.shape[1], q.shape[2], parts[0].v_dim
    longest = max((q_indptr[1:] - q_indptr[:-1]).tolist(), default=0)
    if out is None:
        out = torch.empty(q.shape[0], heads, dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], heads, dtype=torch.float32, device=q.device)
    if not longest:
        return out, lse
    group, all_splits = heads // kv_heads, splits * len(parts)
    tops = torch.empty(q.shape[0], heads, all_splits, dtype=torch.float32, device=q.device)
    sums = torch.empty_like(tops)
    accs = torch.empty(*tops.shape, dim_v, dtype=torch.float32, device=q.device)
    windowed = window is not None and window < LONGEST_WINDOW
    for place, part in enumerate(parts):
        none = torch.zeros_like(part.counts)
        format_ = part.k.dtype if part.k.dtype.itemsize == 1 else None
        grid = (len(part.counts), -(-longest * group // BLOCK_M), kv_heads * splits)
        kernels().attend[grid](
            q,
            _raw(part.k),
            _raw(part.v),
            part.index,
            q_indptr,
            none if part.starts is None else part.starts,
            part.counts,
            none if part.firsts is None else part.firsts,
            contexts,
            _by_head(part.k_descale, kv_heads, q.device),
            _by_head(part.v_descale, kv_heads, q.device),
            _values(format_, str(q.device)),
            tops,
            sums,
            accs,
            float(scale),
            float(soft_cap or 1.0),
            window if windowed else 0,
            *q.stride()[:2],
            *part.k_strides(),
            *part.v_strides(),
            part.index.stride(0),
            place * splits,
            splits,
            all_splits,
            kv_heads,
            PAGED=part.index.dim() == 2,
            PAGE=part.page_size,
            KX=part.k.shape[-1],
            VX=part.v.shape[-1] if part.v.dim() == 5 else 1,
            GROUP=group,
            D=dim,
            DV=dim_v,
            CAUSAL=causal,
            WINDOWED=windowed,
            CAPPED=soft_cap is not None,
            FP8=format_ is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_N=block,
            BLOCK_D=tile_of(dim),
            BLOCK_DV=tile_of(dim_v),
        )
    none = torch.full((heads,), -torch.inf, dtype=torch.float32, device=q.device)
    kernels().combine[(q.shape[0], heads)](
        tops,
        sums,
        accs,
        none if sinks is None else sinks,
        out,
        lse,
        *out.stride()[:2],
        all_splits,
        heads,
        DV=dim_v,
        BLOCK_S=1 << (all_splits - 1).bit_length(),
        BLOCK_DV=tile_of(dim_v),
    )
    return out, lse


def _raw(stored: Tensor) -> Tensor:
    """fp8 as bytes: no device's compiler knows every format."""
    return stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored


def tile_of(size: int) -> int:
    """A tile that holds ``size``, as a matrix product takes it."""
    return max(16, 1 << (size - 1).bit_length())


def _by_head(factors: Tensor | None, heads: int, device: torch.device) -> Tensor:
    if factors is None:
        return torch.ones(heads, dtype=torch.float32, device=device)
    return factors.reshape(-1).expand(heads).contiguous()


@cache
def _values(format_: torch.dtype | None, device: str) -> Tensor:
    """The value of each code of an fp8 format; nothing to look up for others."""
    values = (0.0,) if format_ is None else FORMAT_OF_DTYPE[format_].values
    return torch.tensor(values, dtype=torch.float32, device=device)
