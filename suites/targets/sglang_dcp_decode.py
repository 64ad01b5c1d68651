"""One decode step of sglang's Triton backend over several ranks: index lists, attention and the merge.

The methods are the backend's own, called on a stand-in that holds what they read. Position p of a request belongs to
rank p % N. Every rank sees the same pool here: what is checked is which rows it reads and how the parts are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.loader import KernelLoader
from oracle import Precision, declare
from oracle.kinds import Engine
from oracle.precision import RankOwnership
from suites.targets import ranks, sglang_attention, sglang_dcp, sglang_dcp_comm, sglang_wheel

BACKEND = ("srt/layers/attention/triton_backend.py",)
LAYOUT = ("srt/layers/dcp/layout.py",)

_group: ranks.Group | None = None
"""The group of the rank whose step is being run: sglang keeps it in a global, too."""


@KernelLoader
def _backend() -> ModuleType:
    group = {"get_dcp_group": lambda: _group}
    dcp = vars(sglang_dcp._kernels()) | vars(sglang_wheel.load(LAYOUT, {}))
    dcp["cp_lse_ag_out_rs_mha"] = sglang_dcp_comm._comm().cp_lse_ag_out_rs_mha
    return sglang_wheel.load(
        BACKEND,
        {
            "sglang.srt.distributed.parallel_state": group,
            "sglang.srt.distributed.device_communicators.pynccl_allocator": {
                "use_symmetric_memory": lambda group: nullcontext()
            },
            "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": object},
            "sglang.srt.layers.dcp": dcp,
            "sglang.srt.utils": {
                "is_cuda": lambda: False,
                "is_xpu": lambda: False,
                "is_gfx942_supported": lambda: False,
            },
        },
    )


def _unavailable(engine: Engine) -> str | None:
    if not sglang_wheel.has(sglang_dcp.FILES[:1]):
        return sglang_wheel.missing(sglang_dcp.FILES[:1], engine)
    return sglang_wheel.missing(BACKEND, engine)


CONVENTION = replace(
    sglang_attention.CONVENTION,
    source="sglang/srt/layers/attention/triton_backend.py, forward_decode: what the model asks of a step, ranks or not",
)


def _step(
    count: int,
    run: Callable[[Sequence[ranks.Rank]], list[Tensor]],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """All ranks' share of the heads, put together: [B, H, D_v]."""
    lengths = kv_indptr.diff()
    if not len(lengths):
        return torch.empty(0, q.shape[1], v_cache.shape[2], dtype=q.dtype, device=q.device)
    table = torch.zeros(len(lengths), max(1, int(lengths.max())), dtype=torch.int32, device=q.device)
    for row, own in enumerate(slots.split(lengths.tolist())):
        # Widened: the owner's row times the number of ranks, and the owner.
        position = torch.arange(len(own), device=q.device)
        table[row, : len(own)] = own * count + position % count
    work = [partial(_rank, rank, count, q, (k_cache, v_cache), lengths, table, options) for rank in range(count)]
    shares = run(work)
    return torch.cat([share.view(len(q), q.shape[1] // count, -1) for share in shares], 1)


def _rank(
    rank: int,
    count: int,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    lengths: Tensor,
    table: Tensor,
    options: dict[str, Any],
    group: ranks.Group,
) -> Tensor:
    """One rank's decode step: its own query heads in, its own heads of the output out, [B, H / N * D_v]."""
    global _group
    batch, heads = len(q), q.shape[1] // count
    dim_v, splits = caches[1].shape[2], sglang_attention.SPLITS
    backend = SimpleNamespace(
        dcp_size=count,
        dcp_rank=rank,
        device=q.device,
        req_to_token=table,
        max_kv_splits=splits,
        token_to_kv_pool=SimpleNamespace(
            get_key_buffer=lambda layer: caches[0], get_value_buffer=lambda layer: caches[1]
        ),
        decode_attention_fwd=sglang_attention._decode().decode_attention_fwd,
    )
    methods = _backend().TritonAttnBackend
    backend._dcp_lens = partial(methods._dcp_lens, backend)
    requests = torch.arange(batch, dtype=torch.int32, device=q.device)
    indptr = torch.zeros(batch + 1, dtype=torch.int32, device=q.device)
    indptr, indices, _ = methods._dcp_kv_indices(backend, requests, lengths, indptr)
    shape = (batch, q.shape[1], splits)
    backend.forward_metadata = SimpleNamespace(
        kv_indptr=indptr,
        kv_indices=indices,
        attn_logits=torch.empty(*shape, dim_v, dtype=torch.float32, device=q.device),
        attn_lse=torch.empty(shape, dtype=torch.float32, device=q.device),
        num_kv_splits=torch.arange(batch, dtype=torch.int32, device=q.device) % splits + 1,
        swa_attn_logits=None,
    )
    scales = (options["k_descale"], options["v_descale"])
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        qk_head_dim=q.shape[2],
        v_head_dim=dim_v,
        logit_capping_method="tanh",
        logit_cap=options["soft_cap"] or 0.0,
        scaling=options["scale"],
        sliding_window_size=-1,
        xai_temperature_len=-1,
        # The backend uses scales only where a layer has both.
        k_scale=None if scales == (None, None) else scales,
        v_scale=None if scales == (None, None) else scales,
        k_scale_float=1.0 if scales[0] is None else float(scales[0]),
        v_scale_float=1.0 if scales[1] is None else float(scales[1]),
    )
    own = q[:, rank * heads : (rank + 1) * heads].flatten(1)
    _group = group
    result: Tensor = methods.forward_decode(
        backend, own, None, None, layer, None, save_kv_cache=False, sinks=options["sinks"]
    )
    return result


def _target(count: int, run: Callable[[Sequence[ranks.Rank]], list[Tensor]], suffix: str = "") -> Callable[..., Tensor]:
    """The target for ``count`` ranks."""

    @declare.paged_decode(
        name=f"sglang.dcp.decode.{count}_ranks{suffix}",
        convention=CONVENTION,
        precision=_precision(count),
        supports=replace(
            sglang_attention.SUPPORTS,
            v_head_dims=(),
            num_kv_heads=(1, 2),
            group_sizes=(2 * count, count),
        ),
        unavailable=_unavailable,
        engines=(Engine.EMULATOR,) if suffix else tuple(Engine),
    )
    def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor, slots: Tensor, **options: Any) -> Tensor:
        return _step(count, run, q, k_cache, v_cache, kv_indptr, slots, options)

    return decode


def _precision(count: int) -> Precision:
    """Partial outputs of a rank are float32, and so are their weighting and their sum."""
    return replace(
        sglang_attention.GROUPED,
        source=f"{sglang_attention.GROUPED.source}; triton_backend.py: each rank's output and log-sum-exp in float32",
        ranks=count,
        rank_ownership=RankOwnership.CYCLIC,
    )


two_ranks, three_ranks, four_ranks = (_target(count, ranks.stepped) for count in (2, 3, 4))
two_ranks_over_gloo = _target(2, ranks.over_gloo, ".gloo")
