"""aiter's functions for attention over a SHUFFLE 5D pool, in plain torch: for reproducer scripts where it is missing.

The text below this docstring is copied into the scripts as it stands, so that it may use torch and nothing else.
"""

# --- copied from here
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def get_recommended_splits(*_: Any, **__: Any) -> int:
    """One: nothing is split here."""
    return 1


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    sinks: Tensor | None,
    soft_cap: float,
) -> Tensor:
    """Queries [n, Hq, D], the last positions of keys [m, Hkv, D] and values: float64 [n, Hq, D_v]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if soft_cap:
        s = soft_cap * torch.tanh(s / soft_cap)
    position = torch.arange(len(q), device=q.device)[:, None] + (len(k) - len(q))
    key = torch.arange(len(k), device=q.device)
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    if causal:
        hidden |= key > position
    if window is not None:
        hidden |= key <= position - window
    s = s.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    weights = s.softmax(-1)[..., : len(k)].nan_to_num(nan=0.0)
    return torch.einsum("hqk,khd->qhd", weights, values)


def _factor(factor: Tensor | None, of: Tensor) -> float:
    """fp8 alone has a factor."""
    return 1.0 if factor is None or of.element_size() > 1 else float(factor)


def mha_batch_prefill_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Ragged prefill over linear keys and values [T, H, D]: [Tq, Hq, D_v]."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scale *= _factor(q_descale, q) * _factor(k_descale, k)
    dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=dtype, device=q.device)
    rows, keys = cu_seqlens_q.tolist(), kv_indptr.tolist()
    for request in range(len(rows) - 1):
        own = kv_page_indices[keys[request] : keys[request + 1]].long()
        at = slice(rows[request], rows[request + 1])
        window = None if window_size[0] < 0 else window_size[0] + 1
        part = _attended(q[at], _rows(k, own), _rows(v, own), scale, causal, window, sink_ptr, logits_soft_cap)
        out[at] = (part * _factor(v_descale, v)).to(dtype)
    return out


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows, of fp8 as float32, which holds it exactly."""
    return (x if x.element_size() > 1 else x.float())[rows]


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *,
    sinks: Tensor | None = None,
    shuffled_kv_cache: bool = False,
    **_: Any,
) -> None:
    """Ragged causal queries, into ``out``, over pages [pages, page size, heads, dim]."""
    if shuffled_kv_cache:
        k, v = k.permute(0, 3, 1, 2, 4).flatten(3), v.permute(0, 2, 4, 1, 3).flatten(1, 2)
    rows, scale = cu_seqlens_q.tolist(), softmax_scale * _factor(k_descale, k)
    window = None if window_size[0] < 0 else window_size[0] + 1
    for request, length in enumerate(seqused_k.tolist()):
        pages = block_table[request, : -(-length // k.shape[1])].long()
        keys, values = (_rows(x, pages).flatten(0, 1)[:length] for x in (k, v))
        at = slice(rows[request], rows[request + 1])
        part = _attended(q[at], keys, values, scale, causal, window, sinks, softcap)
        out[at] = (part * _factor(v_descale, v)).to(out.dtype)


def pa_decode_gluon(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lengths: Tensor,
    block_tables: Tensor,
    softmax_scale: float,
    query_length: int,
    *_: Any,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    sliding_window: int = 0,
    **__: Any,
) -> None:
    """Decode over a SHUFFLE 5D pool, into ``output``: K [pages, H, D / x, g, x] and V [pages, H, g / x, D_v, x]."""
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables: {block_tables.dim()} dimensions; it is a table of pages, a row a request")
    page_size = key_cache.shape[3]
    factor = softmax_scale * _factor(key_scale, key_cache)
    for request, length in enumerate(context_lengths.tolist()):
        pages = block_tables[request, : -(-length // page_size)].long()
        k, v = (c.float() if c.element_size() == 1 else c for c in (key_cache[pages], value_cache[pages]))
        k = k.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[:length]
        v = v.permute(0, 2, 4, 1, 3).flatten(0, 2)[:length]
        at = slice(request * query_length, (request + 1) * query_length)
        part = _attended(query[at], k, v, factor, True, sliding_window or None, sinks, 0.0)
        output[at] = (part * _factor(value_scale, value_cache)).to(output.dtype)
