"""What the wrapped operator claims, for attn-oracle."""

from __future__ import annotations

import torch

from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, Window, WindowMeaning
from oracle.kinds import Engine
from ort_attention.attention import attention


def on_the_cpu(engine: Engine) -> str | None:
    return None if engine is Engine.EMULATOR else "the example runs onnxruntime's kernel for the CPU"


@declare.varlen_extend(
    name="ort_attention.group_query",
    convention=Convention(
        source="onnxruntime docs/ContribOperators.md, com.microsoft.GroupQueryAttention",
        window=Window(meaning=WindowMeaning.KEYS, off=(-1,)),
        default_scale=DefaultScale.RSQRT_HEAD_DIM,
        soft_cap=True,
    ),
    precision=Precision(
        source="onnxruntime contrib_ops/cpu/bert/gqa_attention_base.h: float32, softmax before the second product",
        kv_cast=None,
        qk_product=None,
        p_dtype=None,
        p_normalised=True,
    ),
    supports=Supports(dtypes=("fp32",), features=frozenset({"window", "soft_cap", "custom_scale", "chunked"})),
    unavailable=on_the_cpu,
)
def group_query(q, k, v, q_indptr, kv_indptr, *, scale, window, soft_cap, **_):
    out = torch.empty_like(q)
    for r in range(len(q_indptr) - 1):
        rows, keys = (slice(*indptr[r : r + 2].tolist()) for indptr in (q_indptr, kv_indptr))
        if rows.start < rows.stop:
            out[rows] = attention(q[rows], k[keys], v[keys], window=window, soft_cap=soft_cap, scale=scale)
    return out
