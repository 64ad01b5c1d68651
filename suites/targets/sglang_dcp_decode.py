"""One decode step of sglang's Triton backend over several ranks: index lists, attention and the merge.

The methods are the backend's own, called on a stand-in that holds what they read. Position p of a request belongs to
rank p % N. Every rank sees the same pool here: what is checked is which rows it reads and how the parts are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.loader import KernelLoader, scoped_imports
from oracle import Precision, Supports, declare
from oracle.convention import Descales
from oracle.kinds import Engine
from oracle.precision import RankOwnership
from suites.targets import ranks, sglang_attention, sglang_dcp_modules, sglang_wheel

BACKEND = ("srt/layers/attention/triton_backend.py",)
_kernels = sglang_dcp_modules.kernels


def _given() -> sglang_wheel.Given:
    dcp = vars(sglang_dcp_modules.kernels()) | vars(sglang_dcp_modules.layout())
    dcp["cp_lse_ag_out_rs_mha"] = sglang_dcp_modules.comm().cp_lse_ag_out_rs_mha
    told = sglang_dcp_modules.given(cuda=False)
    told["sglang.srt.utils"] |= {"is_gfx942_supported": lambda: False, "is_gfx95_supported": lambda: False}
    told["sglang.srt.layers.dcp"] = dcp
    told["sglang.srt.layers.attention.base_attn_backend"] = {"AttentionBackend": object}
    return told


@KernelLoader
def _backend() -> ModuleType:
    return sglang_wheel.load(BACKEND, _given())


def _unavailable(engine: Engine) -> str | None:
    return sglang_dcp_modules.missing(engine) or sglang_wheel.missing(BACKEND, engine)


STEP = (
    ("1714-1757", "c09161c77e4586064c0d70c5dda4f943378510a4facb187590ac31e17b0e6e73"),
    ("2422-2472", "2e095cfafcd30ad0e720fd1ecd70c92f1a83f47a86a28da0ab739ab5717100aa"),
)
"""The part of ``forward_decode`` for several ranks, by version."""

CONVENTION = replace(
    sglang_attention.CONVENTION,
    index_dtypes=("int32",),
    source="sglang/srt/layers/attention/triton_backend.py, forward_decode: what the model asks of a step, ranks or not",
)


def _step(
    count: int,
    run: ranks.Run,
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
    table = widened_table(lengths, slots, count)
    work = [partial(_rank, rank, count, q, (k_cache, v_cache), lengths, table, options) for rank in range(count)]
    shares = run(work)
    return torch.cat([share.view(len(q), q.shape[1] // count, -1) for share in shares], 1)


def widened_table(lengths: Tensor, slots: Tensor, count: int) -> Tensor:
    """int32 [R, longest]: the widened slot of each position, its row times the number of ranks plus its owner."""
    table = torch.zeros(len(lengths), max(1, int(lengths.max())), dtype=torch.int32, device=slots.device)
    for row, own in enumerate(slots.split(lengths.tolist())):
        table[row, : len(own)] = own * count + torch.arange(len(own), device=slots.device) % count
    return table


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
    batch, heads = len(q), q.shape[1] // count
    dim_v, splits = caches[1].shape[2], sglang_attention.SPLITS
    backend = SimpleNamespace(
        dcp_size=count,
        dcp_rank=rank,
        device=q.device,
        req_to_token=table,
        max_kv_splits=splits,
        enable_deterministic=True,
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
        **dict.fromkeys(("lean_Mp", "lean_Lp", "lean_Op", "lean_locks", "uneven_batch")),
    )
    scales = (options["k_descale"], options["v_descale"])
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=caches[0].shape[1],
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
    # Later versions import within the step.
    with sglang_dcp_modules.as_rank(group, q.device), scoped_imports(sglang_wheel.packages(_given())):
        result: Tensor = methods.forward_decode(
            backend, own, None, None, layer, None, save_kv_cache=False, sinks=options["sinks"]
        )
    return result


SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    kv_dtypes=("e4m3fn",),
    head_dims=(64, 80),
    page_sizes=(1, 16),
    num_kv_heads=(1, 3),
    group_sizes=(4, 2),
    max_query_len=1,
    features=frozenset({"sinks", "soft_cap"}),
)
LATENT = replace(
    SUPPORTS,
    dtypes=("bf16",),
    kv_dtypes=(),
    head_dims=(576,),
    v_head_dims=(512,),
    page_sizes=(16,),
    num_kv_heads=(1,),
    group_sizes=(12,),
    features=frozenset(),
)
"""Latent attention (MLA): one key head of 512 dims and 64 of position, whose first 512 are its values."""


def _target(count: int, name: str, supports: Supports, run: ranks.Run = ranks.stepped) -> Callable[..., Tensor]:
    """The target for ``count`` ranks."""
    fp8 = bool(supports.kv_dtypes)

    @declare.paged_decode(
        name=f"sglang.dcp.decode.{name}",
        convention=CONVENTION if fp8 else replace(CONVENTION, descales=Descales()),
        precision=sglang_attention._with_fp8(_precision(count), *supports.kv_dtypes),
        supports=supports,
        unavailable=_unavailable,
        engines=tuple(Engine) if run is ranks.stepped else (Engine.EMULATOR,),
    )
    def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor, slots: Tensor, **options: Any) -> Tensor:
        return _step(count, run, q, k_cache, v_cache, kv_indptr, slots, options)

    return decode


def _precision(count: int) -> Precision:
    """Partial outputs of a rank are float32, and so are their weighting and their sum."""
    return replace(
        sglang_attention.GROUPED,
        source=f"{sglang_attention.GROUPED.source}; forward_decode: each rank's output and log-sum-exp in float32",
        cited=sglang_attention.GROUPED.cited + sglang_wheel.cited(BACKEND * 2, *STEP),
        ranks=count,
        rank_ownership=RankOwnership.CYCLIC,
    )


# A step costs as many attention kernels as there are ranks: these two are tried with everything, other numbers of ranks
# and real processes in tests.
two_ranks = _target(2, "2_ranks", SUPPORTS)
three_ranks_latent = _target(3, "3_ranks_latent", LATENT)
