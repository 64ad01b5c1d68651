"""One extend step of sglang's Triton backend over several ranks, which share a prefix; each has the new tokens.

Every rank attends its own heads to the new tokens, and all heads to its share of the prefix; shares are merged and
joined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle import Precision, Supports, declare
from oracle.convention import SinkUnits, Window
from oracle.kinds import Engine
from suites.targets import ranks, sglang_attention, sglang_dcp_backend, sglang_dcp_modules, sglang_wheel
from suites.targets.sglang_dcp_backend import Mode, Step

CONVENTION = replace(
    sglang_attention.EXTEND_CONVENTION,
    source="sglang/srt/layers/attention/triton_backend.py, _forward_extend_dcp, which refuses sinks and windows",
    index_dtypes=("int32",),
    sink=SinkUnits.UNSUPPORTED,
    window=Window(),
)
SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    kv_dtypes=("e4m3fn",),
    head_dims=(64,),
    page_sizes=(16,),
    # Up to 0.5.16 no model gives the ranks of a group the same keys unless there is one head of them.
    num_kv_heads=(1, 2) if sglang_dcp_modules.later() else (1,),
    group_sizes=(4, 2),
    features=frozenset({"soft_cap", "chunked", "non_causal"}),
)
STEP = (
    ("1370-1500", "c09161c77e4586064c0d70c5dda4f943378510a4facb187590ac31e17b0e6e73"),
    ("1998-2138", "2e095cfafcd30ad0e720fd1ecd70c92f1a83f47a86a28da0ab739ab5717100aa"),
)
"""``_forward_extend_dcp``, by version."""


def _precision(count: int) -> Precision:
    """The new tokens are one more part; parts are float32, and so are their weighting and their sum."""
    usual = sglang_attention.EXTEND_PRECISION
    return replace(
        usual,
        source=f"{usual.source}; _forward_extend_dcp: the output and log-sum-exp of each part in float32",
        cited=usual.cited + sglang_wheel.cited(sglang_dcp_backend.FILES * 2, *STEP),
        ranks=count + 1,
    )


def _step(
    count: int,
    run: ranks.Run,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    **options: Any,
) -> Tensor:
    """All ranks' share of the heads, put together: [Tq, H, D_v]."""
    prefixes = kv_indptr.diff()
    if not len(q):
        return torch.empty(0, q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    step = Step(
        count=count,
        mode=Mode.EXTEND,
        q=q,
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        lengths=prefixes,
        query_lens=q_indptr.diff(),
        table=sglang_dcp_backend.widened_table(prefixes, slots, count),
        radius=-1,
        options=options,
    )
    return sglang_dcp_backend.run(step, run)


def _unavailable(engine: Engine) -> str | None:
    return sglang_dcp_backend.missing(engine) or sglang_attention.no_extend(engine)


@declare.varlen_extend(
    name="sglang.dcp.extend.2_ranks",
    convention=CONVENTION,
    precision=sglang_attention.with_fp8(_precision(2), *SUPPORTS.kv_dtypes),
    supports=SUPPORTS,
    unavailable=_unavailable,
)
def two_ranks(**arguments: Any) -> Tensor:
    """Two ranks in one process."""
    return _step(2, ranks.stepped, **arguments)
