"""aiter's two functions for attention over a SHUFFLE 5D pool, as their documentation has them, over our kernels.

Signatures, defaults and contracts are those of aiter's ``ops/mha.py`` and ``ops/triton/gluon/pa_decode_gluon.py``; a
test compares the signatures with a source tree. What the contract leaves open is refused, never guessed, apart from
``sliding_window`` of ``pa_decode_gluon``: it is W keys, the query's own among them, as its caller's name for it says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.fp8 import FORMAT_OF_DTYPE, decode
from suites.targets.portable.arguments import check_range, check_scale, check_shuffle_5d, check_table, require
from suites.targets.portable.attention import Keys, attention

MULTIPROCESSORS = 304
"""Of an MI300X: how finely aiter splits depends on it."""

MOST_SPLITS = 8


def get_recommended_splits(num_sequences: int, num_kv_heads: int, split_kv_blocks: int = 1) -> int:
    """Splits that fill the device, no more than 8."""
    wanted = -(-MULTIPROCESSORS // (num_sequences * num_kv_heads * split_kv_blocks)) * split_kv_blocks
    return min(wanted, MOST_SPLITS)


def mha_batch_prefill_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    out: Tensor | None = None,
    kv_last_page_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    seqlen_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    kv_block_descale: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    sink_size: int = 0,
) -> Tensor:
    """Ragged prefill over linear keys and values [T, H, D], a page of one token: [Tq, Hq, D_v].

    The window is (left, right), -1 for no limit; causality is bottom-right. Descales belong to fp8 alone, whose
    result is bf16. Raises ``ArgumentError`` before anything is launched.
    """
    plain = {
        "dropout_p": (dropout_p, 0.0),
        "alibi_slopes": (alibi_slopes, None),
        "return_lse": (return_lse, False),
        "return_attn_probs": (return_attn_probs, False),
        "out": (out, None),
        "kv_last_page_lens": (kv_last_page_lens, None),
        "block_table": (block_table, None),
        "seqlen_k": (seqlen_k, None),
        "kv_block_descale": (kv_block_descale, None),
        "sink_size": (sink_size, 0),
    }
    _refuse(plain)
    _check_prefill(q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices)
    left, right = window_size
    require(causal or right == -1, "window_size", window_size, "no limit to the right, or causal")
    fp8 = k.dtype.itemsize == 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if fp8:
        for name, factor, of in (("q_descale", q_descale, q), ("k_descale", k_descale, k), ("v_descale", v_descale, v)):
            check_scale(name, factor, of)
        q, scale = decode(q, FORMAT_OF_DTYPE[q.dtype]).to(torch.bfloat16), scale * float(q_descale)
    keys = Keys(
        k=k,
        v=v,
        index=kv_page_indices,
        starts=kv_indptr[:-1],
        counts=kv_indptr[1:] - kv_indptr[:-1],
        k_descale=k_descale if fp8 else None,
        v_descale=v_descale if fp8 else None,
    )
    result, _ = attention(
        q,
        cu_seqlens_q,
        keys.counts,
        [keys],
        scale=scale,
        causal=causal,
        window=None if left < 0 else left + 1,
        sinks=None if sink_ptr is None else sink_ptr.float(),
        soft_cap=logits_soft_cap or None,
    )
    return result


def _check_prefill(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, kv_indptr: Tensor, indices: Tensor) -> None:
    for name, given in (("k", k), ("v", v)):
        require(given.dim() == 3, name, f"{given.dim()} dimensions", "3: [tokens, heads, dim], a page of one token")
        require(given.stride(-1) == 1, name, f"a last stride of {given.stride(-1)}", "1")
    require(q.dtype == k.dtype == v.dtype, "q, k, v", f"{q.dtype}, {k.dtype}, {v.dtype}", "one dtype")
    require(k.shape[-1] == q.shape[-1], "k", f"head dim {k.shape[-1]}", f"the query's, {q.shape[-1]}")
    require(v.shape[:2] == k.shape[:2], "v", list(v.shape), f"tokens and heads of k, {list(k.shape[:2])}")
    require(q.shape[1] % k.shape[1] == 0, "q", f"{q.shape[1]} heads", f"a multiple of k's {k.shape[1]}")
    require(len(q_indptr) == len(kv_indptr), "kv_indptr", f"{len(kv_indptr)} entries", f"{len(q_indptr)}")
    tokens, total = int(q_indptr[-1]), int(kv_indptr[-1])
    require(tokens == q.shape[0], "cu_seqlens_q", f"{tokens} tokens", f"the query's {q.shape[0]}")
    require(total <= len(indices), "kv_page_indices", f"{len(indices)} entries", f"{total} and more")
    check_range("kv_page_indices", indices[:total], k.shape[0], "tokens")


def pa_decode_gluon(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lengths: Tensor,
    block_tables: Tensor,
    softmax_scale: float,
    query_length: int,
    max_context_partition_num: int,
    context_partition_size: int = 256,
    compute_type: torch.dtype = torch.bfloat16,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    exp_sums: Tensor | None = None,
    max_logits: Tensor | None = None,
    temporary_output: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sliding_window: int = 0,
    ps: bool = True,
) -> None:
    """Decode over a SHUFFLE 5D pool, into ``output``. ``context_lengths`` count the queries' own keys.

    Scales belong to an fp8 cache alone. Raises ``ArgumentError`` before anything is launched.
    """
    _refuse({"query_scale": (query_scale, None), "alibi_slopes": (alibi_slopes, None)})
    heads, requests, page_size = key_cache.shape[1], len(context_lengths), key_cache.shape[3]
    check_shuffle_5d(key_cache, value_cache, query.shape[-1])
    require(page_size in (16, 64, 1024), "page size", page_size, "16, 64, 1024")
    require(query.shape[1] % heads == 0, "query", f"{query.shape[1]} heads", f"a multiple of key_cache's {heads}")
    require(query_length <= 4, "query_length", query_length, "up to 4")
    group = query.shape[1] // heads
    require(query_length * group <= 64, "query_length * group", query_length * group, "up to 64")
    require(query.shape[0] == requests * query_length, "query", f"{query.shape[0]} rows", f"{requests * query_length}")
    check_table(block_tables, context_lengths, page_size, key_cache.shape[0])
    check_scale("key_scale", key_scale, key_cache)
    check_scale("value_scale", value_scale, value_cache)
    partial = (requests, heads, max_context_partition_num, query_length * group)
    for name, buffer, shape in (
        ("exp_sums", exp_sums, partial),
        ("max_logits", max_logits, partial),
        ("temporary_output", temporary_output, (*partial, value_cache.shape[3])),
    ):
        if buffer is not None:
            require(tuple(buffer.shape) == shape, name, list(buffer.shape), str(list(shape)))
    fp8 = key_cache.dtype.itemsize == 1
    keys = Keys(
        k=key_cache,
        v=value_cache,
        index=block_tables,
        counts=context_lengths,
        k_descale=key_scale if fp8 else None,
        v_descale=value_scale if fp8 else None,
    )
    attention(
        query,
        torch.arange(requests + 1, dtype=torch.int32, device=query.device) * query_length,
        context_lengths,
        [keys],
        scale=softmax_scale,
        window=sliding_window or None,
        sinks=sinks,
        splits=max_context_partition_num,
        out=output,
    )


def _refuse(plain: dict[str, tuple[Any, Any]]) -> None:
    """Raises ``ArgumentError`` for an argument that is not the plain one: ours do not do what it asks for."""
    for name, (given, only) in plain.items():
        same = given is only if only is None else given == only
        require(same, name, "given" if only is None else given, f"{only}: more is not done here")


for _function in (get_recommended_splits, mha_batch_prefill_func, pa_decode_gluon):
    # Reproducer scripts, which have none of us, carry these.
    _function.standalone = Path(__file__).with_name("plain_aiter.py")
