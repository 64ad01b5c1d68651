"""One extend step of sglang's Triton backend over several ranks, which share a prefix; each has the new tokens.

Every rank attends its own heads to the new tokens, and all heads to its share of the prefix; shares are merged and
joined. The method is the backend's own, called on a stand-in that holds what it reads (``sglang_dcp_decode``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oracle import Precision, Supports, declare
from oracle.convention import Descales, SinkUnits, Window
from oracle.kinds import Engine
from suites.targets import ranks, sglang_attention, sglang_dcp_decode, sglang_dcp_modules, sglang_wheel

_backend, _kernels, _extend = sglang_dcp_decode._backend, sglang_dcp_modules.kernels, sglang_attention._extend

CONVENTION = replace(
    sglang_attention.EXTEND_CONVENTION,
    source="sglang/srt/layers/attention/triton_backend.py, _forward_extend_dcp, which refuses sinks and windows",
    index_dtypes=("int32",),
    sink=SinkUnits.UNSUPPORTED,
    window=Window(),
    descales=Descales(),
)
SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
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
        cited=usual.cited + sglang_wheel.cited(sglang_dcp_decode.BACKEND * 2, *STEP),
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
    table = sglang_dcp_decode.widened_table(prefixes, slots, count)
    shared = (k, v, k_cache, v_cache, q_indptr, prefixes, table)
    shares = run([partial(_rank, rank, count, q, *shared, options) for rank in range(count)])
    return torch.cat([share.view(len(q), q.shape[1] // count, -1) for share in shares], 1)


def _rank(
    rank: int,
    count: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_indptr: Tensor,
    prefixes: Tensor,
    table: Tensor,
    options: dict[str, Any],
    group: ranks.Group,
) -> Tensor:
    """One rank's extend step: its own query heads in, its own heads of the output out, [Tq, H / N * D_v]."""
    heads = q.shape[1] // count
    methods = _backend().TritonAttnBackend
    backend = SimpleNamespace(
        dcp_size=count,
        dcp_rank=rank,
        device=q.device,
        req_to_token=table,
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda layer: k_cache, get_value_buffer=lambda layer: v_cache),
        extend_attention_fwd=_extend().extend_attention_fwd,
    )
    backend._dcp_lens = partial(methods._dcp_lens, backend)
    requests = torch.arange(len(prefixes), dtype=torch.int32, device=q.device)
    indptr = torch.zeros(len(prefixes) + 1, dtype=torch.int32, device=q.device)
    indptr, indices, _ = methods._dcp_kv_indices(backend, requests, prefixes, indptr)
    backend.forward_metadata = SimpleNamespace(
        kv_indptr=indptr,
        kv_indices=indices,
        qo_indptr=q_indptr,
        max_extend_len=int(q_indptr.diff().max()),
        custom_mask=None,
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=k.shape[1],
        qk_head_dim=q.shape[2],
        v_head_dim=v.shape[2],
        scaling=options["scale"],
        sliding_window_size=-1,
        xai_temperature_len=-1,
        k_scale=None,
        v_scale=None,
    )
    own = q[:, rank * heads : (rank + 1) * heads].flatten(1)
    with sglang_dcp_modules.as_rank(group, q.device):
        result: Tensor = methods._forward_extend_dcp(
            backend, own, k, v, layer, None, options["causal"], options["soft_cap"] or 0.0, None
        )
    return result


def _unavailable(engine: Engine) -> str | None:
    return sglang_dcp_decode._unavailable(engine) or sglang_attention._no_extend(engine)


@declare.varlen_extend(
    name="sglang.dcp.extend.2_ranks",
    convention=CONVENTION,
    precision=_precision(2),
    supports=SUPPORTS,
    unavailable=_unavailable,
)
def two_ranks(**arguments: Any) -> Tensor:
    """Two ranks in one process."""
    return _step(2, ranks.stepped, **arguments)
