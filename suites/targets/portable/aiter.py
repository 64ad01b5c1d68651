"""aiter's functions that sglang's backend calls over a SHUFFLE 5D pool, as aiter documents them, over our kernels.

Signatures, defaults and contracts are those of aiter's ``ops/mha.py``, ``ops/triton/gluon/pa_decode_gluon.py`` and
``ops/triton/attention/unified_attention.py``; a test compares the signatures with a source tree. What the contract
leaves open is refused, never guessed, apart from ``sliding_window`` of ``pa_decode_gluon``: it is W keys, the query's
own among them, as its caller's name for it says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.fp8 import FORMAT_OF_DTYPE, decode
from suites.targets.arguments import check_range, check_scale, check_shuffle_5d, check_table, require
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
    """Ragged prefill: [Tq, Hq, D_v].

    Keys and values are linear, [tokens, heads, dim] (a page of one) or [pages, page size, heads, dim], or in
    SHUFFLE 5D. Their pages: ``kv_page_indices``, those of request r from ``kv_indptr[r]`` on, of which the last one
    holds ``kv_last_page_lens[r]``; or the rows of ``block_table``, with the lengths ``seqlen_k``. The window is
    (left, right), -1 for no limit; causality is bottom-right. Descales belong to fp8 alone, whose result is bf16.
    Raises ``ArgumentError`` before anything is launched.
    """
    plain = {
        "dropout_p": (dropout_p, 0.0),
        "alibi_slopes": (alibi_slopes, None),
        "return_lse": (return_lse, False),
        "return_attn_probs": (return_attn_probs, False),
        "out": (out, None),
        "kv_block_descale": (kv_block_descale, None),
        "sink_size": (sink_size, 0),
    }
    _refuse(plain)
    page_size = _check_prefill(q, k, v, cu_seqlens_q)
    if block_table is None:
        counts, slots = _by_list(k, kv_indptr, kv_page_indices, kv_last_page_lens, page_size, len(cu_seqlens_q))
    else:
        counts, slots = _by_table(k, block_table, seqlen_k, page_size, len(cu_seqlens_q))
    if k.dim() == 4:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
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
        index=slots.to(torch.int32),
        starts=(counts.cumsum(0) - counts).to(torch.int32),
        counts=counts.to(torch.int32),
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


PREFILL_PAGES = (1, 16, 1024)
"""What aiter compiles prefill for."""


def _check_prefill(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor) -> int:
    """What holds of the operands, whichever way pages are listed; returns the page size."""
    dims = k.dim()
    layouts = "3: [tokens, heads, dim], 4: [pages, page size, heads, dim], 5: SHUFFLE"
    require(dims in (3, 4, 5), "k", f"{dims} dimensions", layouts)
    require(v.dim() == dims, "v", f"{v.dim()} dimensions", f"those of k, {dims}")
    for name, given in (("k", k), ("v", v)):
        require(given.stride(-1) == 1, name, f"a last stride of {given.stride(-1)}", "1")
    require(q.dtype == k.dtype == v.dtype, "q, k, v", f"{q.dtype}, {k.dtype}, {v.dtype}", "one dtype")
    heads = k.shape[1] if dims != 4 else k.shape[2]
    if dims == 5:
        check_shuffle_5d(k, v, q.shape[-1])
    else:
        require(k.shape[-1] == q.shape[-1], "k", f"head dim {k.shape[-1]}", f"the query's, {q.shape[-1]}")
        require(v.shape[:-1] == k.shape[:-1], "v", list(v.shape), f"all but the head dim of k, {list(k.shape)}")
    require(q.shape[1] % heads == 0, "q", f"{q.shape[1]} heads", f"a multiple of k's {heads}")
    tokens = int(q_indptr[-1])
    require(tokens == q.shape[0], "cu_seqlens_q", f"{tokens} tokens", f"the query's {q.shape[0]}")
    page_size = {3: 1, 4: k.shape[1], 5: k.shape[-2]}[dims]
    require(page_size in PREFILL_PAGES, "page size", page_size, ", ".join(map(str, PREFILL_PAGES)))
    return int(page_size)


def _by_list(
    k: Tensor, indptr: Tensor, indices: Tensor, last: Tensor | None, page_size: int, entries: int
) -> tuple[Tensor, Tensor]:
    """Keys of each request and the slots of all, from a list of pages."""
    require(len(indptr) == entries, "kv_indptr", f"{len(indptr)} entries", str(entries))
    total, pages = int(indptr[-1]), indptr[1:] - indptr[:-1]
    require(total <= len(indices), "kv_page_indices", f"{len(indices)} entries", f"{total} and more")
    check_range("kv_page_indices", indices[:total], k.shape[0], "tokens" if k.dim() == 3 else "pages")
    if page_size == 1:
        return pages, indices[:total].long()
    require(last is not None, "kv_last_page_lens", None, "a length a request, where pages hold more than one key")
    if last is None:
        raise TypeError("kv_last_page_lens")
    require(len(last) == len(pages), "kv_last_page_lens", f"{len(last)} entries", str(len(pages)))
    wrong = last[(pages > 0) & ((last < 1) | (last > page_size))]
    require(not len(wrong), "kv_last_page_lens", int(wrong[0]) if len(wrong) else None, f"1 to {page_size}")
    counts = torch.where(pages > 0, (pages - 1) * page_size + last, 0).long()
    request, position = _positions(counts)
    return counts, indices[indptr[request] + position // page_size].long() * page_size + position % page_size


def _by_table(k: Tensor, table: Tensor, lengths: Tensor | None, page_size: int, entries: int) -> tuple[Tensor, Tensor]:
    """Keys of each request and the slots of all, from a table of pages."""
    require(lengths is not None, "seqlen_k", None, "a length a request, with block_table")
    if lengths is None:
        raise TypeError("seqlen_k")
    require(len(lengths) == entries - 1, "seqlen_k", f"{len(lengths)} entries", str(entries - 1))
    check_table(table, lengths, page_size, k.shape[0], "block_table")
    request, position = _positions(lengths.long())
    return lengths.long(), table[request, position // page_size].long() * page_size + position % page_size


def _positions(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Request and position in it of each of its keys, request after request."""
    request = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    return request, torch.arange(len(request), device=counts.device) - (counts.cumsum(0) - counts)[request]


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
    q_scales: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    output_scale: Tensor | None = None,
    qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    shuffled_kv_cache: bool = False,
    skip_reduce: bool = False,
) -> None:
    """Ragged causal queries over pages, into ``out``. ``seqused_k`` count the queries' own keys.

    Pages are [pages, page size, heads, dim], in SHUFFLE 5D only where ``shuffled_kv_cache`` says so. Of the window
    the left side counts, -1 for no limit. Raises ``ArgumentError`` before anything is launched.
    """
    refused = {"q_descale": q_descale, "q_scales": q_scales, "alibi_slopes": alibi_slopes}
    refused |= {"output_scale": output_scale, "qq_bias": qq_bias}
    _refuse({name: (given, None) for name, given in refused.items()})
    _refuse({"causal": (causal, True), "skip_reduce": (skip_reduce, False)})
    fp8 = k.dtype.itemsize == 1
    descales = {"k_descale": k_descale if fp8 else None, "v_descale": v_descale if fp8 else None}
    if shuffled_kv_cache:
        check_shuffle_5d(k, v, q.shape[-1])
        check_table(block_table, seqused_k, k.shape[3], k.shape[0], "block_table")
        keys = Keys(k=k, v=v, index=block_table, counts=seqused_k, **descales)
    else:
        dims, layout = f"{k.dim()} and {v.dim()} dimensions", "4: [pages, page size, heads, dim]"
        require(k.dim() == v.dim() == 4, "k, v", dims, layout)
        require(k.shape[-1] == q.shape[-1], "k", f"head dim {k.shape[-1]}", f"the query's, {q.shape[-1]}")
        counts, slots = _by_table(k, block_table, seqused_k, k.shape[1], len(cu_seqlens_q))
        keys = Keys(
            k=k.flatten(0, 1),
            v=v.flatten(0, 1),
            index=slots.to(torch.int32),
            starts=(counts.cumsum(0) - counts).to(torch.int32),
            counts=counts.to(torch.int32),
            **descales,
        )
    heads = keys.k.shape[1]
    require(q.shape[1] % heads == 0, "q", f"{q.shape[1]} heads", f"a multiple of k's {heads}")
    attention(
        q,
        cu_seqlens_q,
        keys.counts,
        [keys],
        scale=softmax_scale,
        window=None if window_size[0] < 0 else window_size[0] + 1,
        sinks=None if sinks is None else sinks.float(),
        soft_cap=softcap or None,
        out=out,
    )


def _refuse(plain: dict[str, tuple[Any, Any]]) -> None:
    """Raises ``ArgumentError`` for an argument that is not the plain one: ours do not do what it asks for."""
    for name, (given, only) in plain.items():
        same = given is only if only is None else given == only
        require(same, name, "given" if only is None else given, f"{only}: more is not done here")


for _function in (get_recommended_splits, mha_batch_prefill_func, pa_decode_gluon, unified_attention):
    # Reproducer scripts, which have none of us, carry these.
    _function.standalone = Path(__file__).with_name("plain_aiter.py")
