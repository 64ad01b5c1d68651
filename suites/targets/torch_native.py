"""torch's own attention, believed right: the whole way from oracle to report runs on it."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, LseLayout, Window, WindowMeaning

CONVENTION = Convention(
    source="torch documentation, torch.nn.functional.scaled_dot_product_attention",
    index_dtypes=("int32", "int64"),
    window=Window(meaning=WindowMeaning.KEYS, off=(0,)),
    default_scale=DefaultScale.RSQRT_HEAD_DIM,
)
"""Causality and the window are handed over as a mask, so that their meaning is ours."""

CONVENTION_LSE = Convention(
    source="aten/src/ATen/native/native_functions.yaml: logsumexp is the second result of both operators",
    index_dtypes=("int32", "int64"),
    window=Window(meaning=WindowMeaning.KEYS, off=(0,)),
    default_scale=DefaultScale.RSQRT_HEAD_DIM,
    lse_layout=LseLayout.TOKEN_HEAD,
)

FLOAT32 = Precision(
    source="aten/src/ATen/native/cpu/FlashAttentionKernel.cpp and native/transformers/attention.cpp: float32 "
    "accumulation, weights in the input dtype, vectorised exp of 20 ulp",
    qk_product=None,
    p_dtype="input",
    exp_error=20 * 2.0**-23,
)

REDUCED = replace(
    FLOAT32,
    source=f"{FLOAT32.source}; for bf16 and fp16 the exp of aten/src/ATen/cpu/vec/vec512/vec512_float.h, "
    "fexp_u20: a cubic whose largest relative error is its constant term, 1.071e-4",
    exp_error=2.0**-13,
)

PRECISION = {"fp32": FLOAT32, "bf16": REDUCED, "fp16": REDUCED}

SUPPORTS = Supports(
    dtypes=("bf16", "fp16", "fp32"),
    head_dims=(64, 80, 128),
    num_kv_heads=(1, 2, 3),
    group_sizes=(1, 4),
    features=frozenset({"window", "non_causal", "chunked", "custom_scale", "strided"}),
)


def _visible(queries: int, keys: int, causal: bool, window: int, device: torch.device) -> Tensor:
    """Mask [queries, keys], True where a query sees a key: bottom-right aligned, ``window`` 0 is off."""
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        visible &= key <= position
    if window:
        visible &= key > position - window
    return visible


def _requests(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, kv_indptr: Tensor) -> list[list[Tensor]]:
    """Per request q, k, v as [1, H, tokens, D], keys repeated for grouped heads."""
    found = []
    for request in range(len(q_indptr) - 1):
        rows = slice(int(q_indptr[request]), int(q_indptr[request + 1]))
        keys = slice(int(kv_indptr[request]), int(kv_indptr[request + 1]))
        group = q.shape[1] // k.shape[1]
        own = [q[rows], k[keys].repeat_interleave(group, 1), v[keys].repeat_interleave(group, 1)]
        found.append([t.transpose(0, 1).unsqueeze(0) for t in own])
    return found


@declare.varlen_extend(name="torch.sdpa", convention=CONVENTION, precision=PRECISION, supports=SUPPORTS)
def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int,
    sinks: None,
    soft_cap: None,
    q_descale: None,
    k_descale: None,
    v_descale: None,
) -> Tensor:
    """Attention of each request through the public function."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    row = 0
    for qi, ki, vi in _requests(q, k, v, q_indptr, kv_indptr):
        queries, keys = qi.shape[2], ki.shape[2]
        if queries:
            mask = _visible(queries, keys, causal, window, q.device)
            result = F.scaled_dot_product_attention(qi, ki, vi, attn_mask=mask, scale=scale)
            out[row : row + queries] = result[0].transpose(0, 1)
        row += queries
    return out


@declare.varlen_extend(name="torch.sdpa_with_lse", convention=CONVENTION_LSE, precision=PRECISION, supports=SUPPORTS)
def sdpa_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int,
    sinks: None,
    soft_cap: None,
    q_descale: None,
    k_descale: None,
    v_descale: None,
) -> tuple[Tensor, Tensor]:
    """Attention of each request through the operators beneath, which also return the log-sum-exp."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[1], dtype=torch.float32, device=q.device)
    row = 0
    for qi, ki, vi in _requests(q, k, v, q_indptr, kv_indptr):
        queries, keys = qi.shape[2], ki.shape[2]
        if queries:
            visible = _visible(queries, keys, causal, window, q.device)
            bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, -torch.inf)
            own_out, own_lse = _with_lse(qi, ki, vi, bias, scale)
            out[row : row + queries] = own_out[0].transpose(0, 1)
            lse[row : row + queries] = own_lse[0, :, :queries].transpose(0, 1)
        row += queries
    return out, lse


def _with_lse(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if q.device.type == "cpu":
        result = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return result[0], result[1]
    # The memory-efficient kernel reads its bias in vectors of 16: rows are padded, and expanded over heads.
    padded = F.pad(bias, (0, -bias.shape[1] % 16))[:, : bias.shape[1]]
    expanded = padded.expand(1, q.shape[1], *bias.shape)
    result = aten._scaled_dot_product_efficient_attention(q, k, v, expanded, True, 0.0, False, scale=scale)
    return result[0], result[1]
