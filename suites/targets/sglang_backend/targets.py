"""One step of a layer through sglang's backend for aiter over a SHUFFLE 5D pool, as targets.

The step is sglang's from the request table on: the lists of slots and pages, the write to the pool, the choice of path,
and what aiter's functions are asked for. Truth is what the model asks for, whatever is passed on the way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.facade import MI300X, MI350X, Device
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, Descales, Fp8Flavour, Granularity, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine, IndexForm, KVLayout
from suites.targets import aiter_pa_decode, aiter_prefill
from suites.targets.arguments import require
from suites.targets.checked import checked
from suites.targets.portable.aiter import MOST_SPLITS
from suites.targets.portable.targets import PRECISION as PORTABLE
from suites.targets.portable.targets import kernels as kernels  # the compile gate looks for it here
from suites.targets.sglang_backend import fakes, loading
from suites.targets.sglang_backend.loading import AttentionType
from suites.targets.sglang_backend.loading import cache_kernels as cache_kernels
from suites.targets.sglang_backend.loading import index_kernels as index_kernels
from suites.targets.source_trees import other_arch

CONVENTION = Convention(
    source="sglang's model code: a layer's scaling, logit_cap, sinks, scales; sliding_window_size is W - 1, -1 is off",
    kv_layout=KVLayout.SHUFFLE_5D,
    index_form=IndexForm.SLOT_LIST,
    index_dtypes=("int64",),
    window=Window(meaning=WindowMeaning.LEFT, off=(-1,)),
    sink=SinkUnits.NATURAL,
    soft_cap=True,
    default_scale=DefaultScale.REQUIRED,
    fp8_flavour=Fp8Flavour.FN,
)
QUANTISED = replace(CONVENTION, descales=Descales(k=Granularity.TENSOR, v=Granularity.TENSOR))
QUANTISED_FNUZ = replace(QUANTISED, fp8_flavour=Fp8Flavour.FNUZ)
PRECISION: Precision = replace(
    PORTABLE,
    source=f"{PORTABLE.source}, in the place of aiter's kernels",
    max_splits=MOST_SPLITS,
)
EXTEND = Supports(
    dtypes=("bf16", "fp16"),
    head_dims=(64, 128),
    page_sizes=(64, 16),
    num_kv_heads=(1, 2),
    group_sizes=(4, 1),
    features=frozenset({"window", "sinks", "soft_cap", "custom_scale", "chunked", "slot_map", "strided"}),
)
DECODE = replace(EXTEND, max_query_len=1)
OWN = ("sglang init_forward_metadata", "sglang set_kv_buffer", "sglang launch_reshape_and_cache_shuffle_5d")
RUNS_EXTEND = (
    *OWN,
    "sglang forward_extend_vectorized_5d",
    "sglang launch_gather_shuffle_5d_to_linear",
    "portable mha_batch_prefill_func",
)
RUNS_DECODE = (*OWN, "sglang forward_decode_vectorized_5d", "portable pa_decode_gluon")


def _fp8(supports: Supports, kv_dtype: str = "e4m3fn") -> Supports:
    """Over a pool of fp8. aiter's prefill of it returns bf16 whatever the model computes in."""
    archs = ("gfx942",) if kv_dtype == "e4m3fnuz" else ()
    return replace(supports, dtypes=("bf16",), kv_dtypes=(kv_dtype,), archs=archs)


def _step(
    modules: loading.Modules,
    decodes: bool,
    unified: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_indptr: Tensor,
    lengths: Tensor,
    slots: Tensor,
    slot_map: Tensor | None,
    *,
    causal: bool,
    scale: float,
    window: int,
    sinks: Tensor | None,
    soft_cap: float | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    shares: bool = False,
    verifies: bool = False,
    replays: bool = False,
) -> Tensor:
    """A step, of one kind or the other: the output [Tq, Hq, Dv].

    ``shares``: of two layers that share their keys and values, the second: the first has stored them. ``verifies``: the
    new tokens are drafts, as many of each request. ``replays``: it was captured as a graph, for contexts of one token,
    and is replayed.
    """
    layer = fakes.Layer(
        tp_q_head_num=q.shape[1],
        tp_k_head_num=k.shape[1],
        head_dim=q.shape[2],
        v_head_dim=v.shape[2],
        scaling=scale,
        logit_cap=soft_cap or 0.0,
        sliding_window_size=window,
        k_scale=k_descale,
        v_scale=v_descale,
        attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
    )
    batch, req_to_token = _batch(q_indptr, lengths, slots, fakes.Mode(decodes, verifies))
    drafts = None if batch.spec_info is None else batch.spec_info.draft_token_num
    backend = fakes.backend_of(
        modules, k_cache, v_cache, req_to_token, slot_map, layer, q.dtype, unified=unified, drafts=drafts
    )
    with modules.importing():
        if replays:
            _replay(backend, batch)
        else:
            backend.init_forward_metadata(batch)
        forward = backend.forward_decode if decodes else backend.forward_extend
        out: Tensor = forward(q, k, v, layer, batch, True, sinks=sinks)
        if shares:
            out = forward(q, None, None, layer, batch, False, sinks=sinks)
    return out.view(q.shape[0], q.shape[1], v.shape[2])


def _batch(q_indptr: Tensor, lengths: Tensor, slots: Tensor, mode: fakes.Mode) -> tuple[fakes.Batch, Tensor]:
    """The batch of a step, and the slot of each position of each request, int32 [R, longest]."""
    queries = q_indptr[1:] - q_indptr[:-1]
    position = torch.arange(int(lengths.max()), device=lengths.device)
    listed = position < lengths[:, None]
    req_to_token = torch.zeros(listed.shape, dtype=torch.int32, device=lengths.device)
    req_to_token[listed] = slots.to(torch.int32)
    new = listed & (position >= (lengths - queries)[:, None])
    seq_lens, drafts = lengths, None
    if mode.verifies:
        drafts = fakes.Drafts(int(queries[0]))
        same = bool((queries == drafts.draft_token_num).all())
        require(same, "q_indptr", f"{queries.tolist()} drafts", "as many of each request")
        # Drafted tokens are not counted before they are accepted.
        seq_lens = lengths - queries
    batch = fakes.Batch(
        forward_mode=mode,
        seq_lens=seq_lens,
        extend_seq_lens=queries,
        out_cache_loc=req_to_token[new].long(),
        spec_info=drafts,
    )
    return batch, req_to_token


def _replay(backend: Any, batch: fakes.Batch) -> None:
    """Lists for ``batch`` in the buffers of a captured graph, whose kernels have the arguments of the capture."""
    backend.init_cuda_graph_state(batch.batch_size, batch.batch_size)
    shortest = replace(batch, seq_lens=torch.ones_like(batch.seq_lens))
    backend.init_forward_metadata_out_graph(shortest, in_capture=True)
    captured = backend.forward_metadata
    backend.init_forward_metadata_out_graph(batch)
    backend.forward_metadata = captured


@declare.backend(
    name="sglang.backend.extend_5d",
    convention=CONVENTION,
    precision=PRECISION,
    # Alone, a fresh prompt takes another path than in a batch with a prefix: to the same bits, over our kernels.
    supports=replace(EXTEND, batch_invariant=True),
    unavailable=loading.missing,
    runs=RUNS_EXTEND,
)
@checked(CONVENTION)
def extend(*tensors: Tensor, **options: Any) -> Tensor:
    """New tokens of each request: a fresh prompt, or a chunk after a prefix in the pool."""
    return _step(loading.portable(), False, True, *tensors, **options)


@declare.backend(
    name="sglang.backend.decode_5d",
    convention=CONVENTION,
    precision=PRECISION,
    supports=DECODE,
    unavailable=loading.missing,
    runs=RUNS_DECODE,
    agrees_with=extend,
)
@checked(CONVENTION)
def decode(*tensors: Tensor, **options: Any) -> Tensor:
    """One new token of each request."""
    return _step(loading.portable(), True, True, *tensors, **options)


@declare.backend(
    name="sglang.backend.decode_5d.plain",
    convention=CONVENTION,
    precision=PRECISION,
    supports=replace(DECODE, features=DECODE.features - {"slot_map"}),
    unavailable=loading.missing,
    runs=RUNS_DECODE,
)
@checked(CONVENTION)
def decode_plain(*tensors: Tensor, **options: Any) -> Tensor:
    """The same for a model without layers with a sub-pool, and without SGLANG_USE_AITER_UNIFIED_ATTN."""
    return _step(loading.portable(), True, False, *tensors, **options)


# The same paths with one thing added, without the arguments that the targets above show to be dropped.
EXTEND_MORE = replace(EXTEND, features=EXTEND.features - {"custom_scale"})
DECODE_MORE = replace(DECODE, features=DECODE.features - {"soft_cap", "window"})


@declare.backend(
    name="sglang.backend.extend_5d.shared_layer",
    convention=CONVENTION,
    precision=PRECISION,
    supports=EXTEND_MORE,
    unavailable=loading.missing,
    runs=RUNS_EXTEND,
)
@checked(CONVENTION)
def extend_shared(*tensors: Tensor, **options: Any) -> Tensor:
    """The same for a layer that shares keys and values with an earlier one: they are in the pool, and not given."""
    return _step(loading.portable(), False, True, *tensors, **options, shares=True)


@declare.backend(
    name="sglang.backend.decode_5d.shared_layer",
    convention=CONVENTION,
    precision=PRECISION,
    supports=DECODE_MORE,
    unavailable=loading.missing,
    runs=RUNS_DECODE,
)
@checked(CONVENTION)
def decode_shared(*tensors: Tensor, **options: Any) -> Tensor:
    """One new token of each request, in a layer that shares keys and values with an earlier one."""
    return _step(loading.portable(), True, True, *tensors, **options, shares=True)


ENCODER = replace(EXTEND, features=EXTEND_MORE.features - {"window", "slot_map"} | {"non_causal"})


@declare.backend(
    name="sglang.backend.extend_5d.encoder",
    convention=CONVENTION,
    precision=PRECISION,
    supports=ENCODER,
    unavailable=loading.missing,
    runs=RUNS_EXTEND,
)
@checked(CONVENTION)
def extend_encoder(*tensors: Tensor, **options: Any) -> Tensor:
    """New tokens of each request, in a layer where they see those after them too if its ``attn_type`` says so."""
    return extend(*tensors, **options)


@declare.backend(
    name="sglang.backend.decode_5d.graph",
    convention=CONVENTION,
    precision=PRECISION,
    supports=DECODE,
    unavailable=loading.missing,
    runs=("sglang init_forward_metadata_out_graph", *RUNS_DECODE[1:]),
)
@checked(CONVENTION)
def decode_graph(*tensors: Tensor, **options: Any) -> Tensor:
    """One new token of each request, as a captured graph takes it: with page tables of its own."""
    return _step(loading.portable(), True, True, *tensors, **options, replays=True)


@declare.backend(
    name="sglang.backend.verify_5d",
    convention=CONVENTION,
    precision=PRECISION,
    supports=replace(EXTEND_MORE, max_query_len=4, features=EXTEND_MORE.features - {"window", "slot_map"}),
    unavailable=loading.missing,
    runs=(*OWN, "sglang forward_extend", "portable unified_attention"),
)
@checked(CONVENTION)
def verify(*tensors: Tensor, **options: Any) -> Tensor:
    """A chain of drafted tokens of each request, as speculative decoding has them verified."""
    return _step(loading.portable(), False, True, *tensors, **options, verifies=True)


NARROW = {"head_dims": (128,), "v_head_dims": (64,)}
"""Values of fewer dimensions than keys: the pool's constructor takes them."""


@declare.backend(
    name="sglang.backend.extend_5d.narrow_values",
    convention=CONVENTION,
    precision=PRECISION,
    supports=replace(EXTEND_MORE, **NARROW),
    unavailable=loading.missing,
    runs=RUNS_EXTEND,
)
@checked(CONVENTION)
def extend_narrow(*tensors: Tensor, **options: Any) -> Tensor:
    """New tokens of each request, in a model whose values have fewer dimensions than its keys."""
    return extend(*tensors, **options)


@declare.backend(
    name="sglang.backend.decode_5d.narrow_values",
    convention=CONVENTION,
    precision=PRECISION,
    supports=replace(DECODE_MORE, **NARROW),
    unavailable=loading.missing,
    runs=RUNS_DECODE,
)
@checked(CONVENTION)
def decode_narrow(*tensors: Tensor, **options: Any) -> Tensor:
    """One new token of each request, in such a model."""
    return decode(*tensors, **options)


@declare.backend(
    name="sglang.backend.decode_5d.aiter",
    convention=CONVENTION,
    precision=replace(aiter_pa_decode.PERSISTENT, max_splits=MOST_SPLITS),
    supports=replace(DECODE, requires_finite_pool=aiter_pa_decode.SUPPORTS.requires_finite_pool),
    engines=(Engine.EMULATOR, Engine.HIP),
    unavailable=loading.missing_aiter,
    runs=(*OWN, "sglang forward_decode_vectorized_5d", "aiter pa_decode_gluon"),
    agrees_with=extend,
)
@checked(CONVENTION)
def decode_over_aiter(*tensors: Tensor, **options: Any) -> Tensor:
    """One new token of each request, through aiter's own decode."""
    return _step(loading.over_aiter(), True, True, *tensors, **options)


@declare.backend(
    name="sglang.backend.extend_5d.aiter",
    convention=CONVENTION,
    precision=aiter_prefill.PRECISION,
    supports=replace(EXTEND, requires_finite_pool=aiter_prefill.SUPPORTS.requires_finite_pool),
    engines=(Engine.HIP,),
    unavailable=aiter_prefill.missing,
    runs=(*RUNS_EXTEND[:-1], "aiter mha_batch_prefill_func"),
)
@checked(CONVENTION)
def extend_over_aiter(*tensors: Tensor, **options: Any) -> Tensor:
    """New tokens of each request, through aiter's own prefill."""
    return _step(loading.installed_aiter(), False, True, *tensors, **options)


@declare.backend(
    name="sglang.backend.extend_5d.fp8",
    convention=QUANTISED,
    precision=PRECISION,
    supports=_fp8(EXTEND),
    unavailable=loading.missing,
    runs=RUNS_EXTEND,
)
@checked(CONVENTION)
def extend_fp8(*tensors: Tensor, **options: Any) -> Tensor:
    """The same over a pool of fp8, with the layer's scales or the backend's."""
    return extend(*tensors, **options)


@declare.backend(
    name="sglang.backend.decode_5d.fp8",
    convention=QUANTISED,
    precision=PRECISION,
    supports=_fp8(DECODE),
    unavailable=loading.missing,
    runs=RUNS_DECODE,
    agrees_with=extend_fp8,
)
@checked(CONVENTION)
def decode_fp8(*tensors: Tensor, **options: Any) -> Tensor:
    """The same over a pool of fp8, with the layer's scales or the backend's."""
    return decode(*tensors, **options)


@declare.backend(
    name="sglang.backend.extend_5d.fp8.gfx942",
    convention=QUANTISED_FNUZ,
    precision=PRECISION,
    supports=_fp8(EXTEND, "e4m3fnuz"),
    unavailable=loading.missing,
    runs=RUNS_EXTEND,
)
@checked(CONVENTION)
def extend_fp8_gfx942(*tensors: Tensor, **options: Any) -> Tensor:
    """The same as on gfx942, whose fp8 is another."""
    return _step(loading.portable("gfx942"), False, True, *tensors, **options)


@declare.backend(
    name="sglang.backend.decode_5d.fp8.gfx942",
    convention=QUANTISED_FNUZ,
    precision=PRECISION,
    supports=_fp8(DECODE, "e4m3fnuz"),
    unavailable=loading.missing,
    runs=RUNS_DECODE,
    agrees_with=extend_fp8_gfx942,
)
@checked(CONVENTION)
def decode_fp8_gfx942(*tensors: Tensor, **options: Any) -> Tensor:
    """The same as on gfx942, whose fp8 is another."""
    return _step(loading.portable("gfx942"), True, True, *tensors, **options)


def _aiter_fp8(device: Device, kv_dtype: str) -> dict[str, Any]:
    """What is declared of aiter's decode over a pool of fp8, as on ``device``."""
    return {
        "precision": aiter_pa_decode.by_dtype(replace(aiter_pa_decode.PERSISTENT, max_splits=MOST_SPLITS), kv_dtype),
        "supports": replace(
            _fp8(DECODE, kv_dtype),
            requires_finite_pool=aiter_pa_decode.SUPPORTS.requires_finite_pool,
            archs=(device.arch or "",),
        ),
        "engines": (Engine.EMULATOR, Engine.HIP),
        "unavailable": lambda engine: other_arch(device, engine) or loading.missing_aiter(engine),
        "runs": (*OWN, "sglang forward_decode_vectorized_5d", "aiter pa_decode_gluon"),
    }


@declare.backend(
    name="sglang.backend.decode_5d.aiter.fp8",
    convention=QUANTISED,
    agrees_with=extend_fp8,
    **_aiter_fp8(MI350X, "e4m3fn"),
)
@checked(CONVENTION)
def decode_over_aiter_fp8(*tensors: Tensor, **options: Any) -> Tensor:
    """One new token of each request over a pool of fp8, through aiter's own decode."""
    return _step(loading.over_aiter(MI350X), True, True, *tensors, **options)


@declare.backend(
    name="sglang.backend.decode_5d.aiter.fp8.gfx942",
    convention=QUANTISED_FNUZ,
    agrees_with=extend_fp8_gfx942,
    **_aiter_fp8(MI300X, "e4m3fnuz"),
)
@checked(CONVENTION)
def decode_over_aiter_fp8_gfx942(*tensors: Tensor, **options: Any) -> Tensor:
    """The same as on gfx942, whose fp8 is another."""
    return _step(loading.over_aiter(MI300X), True, True, *tensors, **options)


def _extend_over_aiter_fp8(device: Device, kv_dtype: str) -> dict[str, Any]:
    return {
        "precision": aiter_prefill.PRECISION,
        "supports": replace(
            _fp8(EXTEND, kv_dtype),
            requires_finite_pool=aiter_prefill.SUPPORTS.requires_finite_pool,
            archs=(device.arch or "",),
        ),
        "engines": (Engine.HIP,),
        "unavailable": lambda engine: other_arch(device, engine) or aiter_prefill.missing(engine),
        "runs": (*RUNS_EXTEND[:-1], "aiter mha_batch_prefill_func"),
    }


@declare.backend(
    name="sglang.backend.extend_5d.aiter.fp8", convention=QUANTISED, **_extend_over_aiter_fp8(MI350X, "e4m3fn")
)
@checked(CONVENTION)
def extend_over_aiter_fp8(*tensors: Tensor, **options: Any) -> Tensor:
    """New tokens of each request over a pool of fp8, through aiter's own prefill."""
    return _step(loading.installed_aiter(), False, True, *tensors, **options)


@declare.backend(
    name="sglang.backend.extend_5d.aiter.fp8.gfx942",
    convention=QUANTISED_FNUZ,
    **_extend_over_aiter_fp8(MI300X, "e4m3fnuz"),
)
@checked(CONVENTION)
def extend_over_aiter_fp8_gfx942(*tensors: Tensor, **options: Any) -> Tensor:
    """The same on gfx942, whose fp8 is another."""
    return _step(loading.installed_aiter(), False, True, *tensors, **options)
