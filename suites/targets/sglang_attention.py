"""sglang's Triton attention over a pool of slots: decode, plain and grouped, and extend."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz.engine.loader import KernelLoader, pretended
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, Descales, Granularity, LseLayout, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine, KVLayout
from suites.targets import sglang_wheel

FOLDERS = ("srt/layers/attention/triton_ops", "kernels/ops/attention")
"""Where the kernels live: up to 0.5.16, and later."""

DECODE = tuple(f"{folder}/decode_attention.py" for folder in FOLDERS)
EXTEND = tuple(f"{folder}/extend_attention.py" for folder in FOLDERS)

SPLITS = 8
"""Partial results a request may have; request i uses 1 + i % SPLITS of them."""


def _about_the_machine() -> dict[str, dict[str, object]]:
    arch = machine.arch if (machine := pretended()) else None
    hip, gfx95 = engines.current() is Engine.HIP or arch is not None, (arch or "").startswith("gfx95")
    answers = {"is_cuda": lambda: not hip, "is_hip": lambda: hip, "is_gfx95_supported": lambda: gfx95}
    return {"sglang.srt.utils": answers, "sglang.kernels.utils": answers, "sglang.srt.utils.common": answers}


def _sibling(name: str, given: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The names of a module that lies beside the kernels, loaded for real; nothing where this version has none."""
    files = tuple(f"{folder}/{name}.py" for folder in FOLDERS)
    if not sglang_wheel.has(files):
        return {}
    module = sglang_wheel.load(files, given)
    return {f"sglang.{folder.replace('/', '.')}.{name}": vars(module) for folder in FOLDERS}


@KernelLoader
def _decode() -> ModuleType:
    given = _about_the_machine()
    return sglang_wheel.load(DECODE, given | _sibling("score_mod", given))


@KernelLoader
def _extend() -> ModuleType:
    given = _about_the_machine()
    given |= _sibling("score_mod", given)
    for name in ("decode_attention", "prefill_attention"):
        given |= _sibling(name, given)
    return sglang_wheel.load(EXTEND, given)


CONVENTION = Convention(
    source="sglang/srt/layers/attention/triton_backend.py, the caller: every key's slot, a window by leaving keys out",
    kv_layout=KVLayout.LINEAR,
    index_dtypes=("int32", "int64"),
    sink=SinkUnits.NATURAL,
    soft_cap=True,
    default_scale=DefaultScale.REQUIRED,
    descales=Descales(k=Granularity.TENSOR, v=Granularity.TENSOR),
)
SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    head_dims=(64, 128, 80),
    v_head_dims=(32,),
    page_sizes=(1, 16),
    num_kv_heads=(1, 2, 3),
    group_sizes=(1,),
    max_query_len=1,
    features=frozenset({"sinks", "soft_cap", "custom_scale"}),
)
PLAIN = Precision(
    source="decode_attention.py, _fwd_kernel_stage1 and _fwd_kernel_stage2: products of query and key in their own "
    "dtype, weights and partial results in float32, tanh by a sigmoid",
    qk_product="input",
    p_dtype=None,
    row_sum_of_rounded_p=False,
    tanh_error=2.0**-20,
    tile=8,
    max_splits=SPLITS,
)
GROUPED = replace(
    PLAIN,
    source="decode_attention.py, _fwd_grouped_kernel_stage1 and _fwd_kernel_stage2: float32 products, weights cast to "
    "the dtype of the values, partial results in float32, tanh by a sigmoid",
    qk_product=None,
    p_dtype="input",
)


def _run_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    *,
    scale: float,
    sinks: Tensor | None,
    soft_cap: float | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    window: None,
) -> Tensor:
    batch, heads, dim_v = q.shape[0], q.shape[1], v_cache.shape[2]
    out = torch.empty(batch, heads, dim_v, dtype=q.dtype, device=q.device)
    logits = torch.empty(batch, heads, SPLITS, dim_v, dtype=torch.float32, device=q.device)
    lses = torch.empty(batch, heads, SPLITS, dtype=torch.float32, device=q.device)
    splits = torch.arange(batch, dtype=torch.int32, device=q.device) % SPLITS + 1
    _decode().decode_attention_fwd(
        q,
        k_cache,
        v_cache,
        out,
        kv_indptr,
        slots,
        logits,
        lses,
        splits,
        SPLITS,
        scale,
        1.0 if k_descale is None else float(k_descale),
        1.0 if v_descale is None else float(v_descale),
        logit_cap=soft_cap or 0.0,
        sinks=sinks,
    )
    return out


def _no_decode(engine: Engine) -> str | None:
    return sglang_wheel.missing(DECODE, engine)


@declare.paged_decode(
    name="sglang.triton.decode", convention=CONVENTION, precision=PLAIN, supports=SUPPORTS, unavailable=_no_decode
)
def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor, slots: Tensor, **options: Any) -> Tensor:
    """One key head for each query head."""
    return _run_decode(q, k_cache, v_cache, kv_indptr, slots, **options)


@declare.paged_decode(
    name="sglang.triton.decode_grouped",
    convention=CONVENTION,
    precision=GROUPED,
    supports=replace(SUPPORTS, group_sizes=(4, 2, 16)),
    unavailable=_no_decode,
)
def decode_grouped(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor, slots: Tensor, **options: Any
) -> Tensor:
    """Several query heads to a key head."""
    return _run_decode(q, k_cache, v_cache, kv_indptr, slots, **options)


EXTEND_CONVENTION = replace(
    CONVENTION,
    source="sglang/srt/layers/attention/triton_backend.py, the caller, and sglang's model code: "
    "layer.sliding_window_size is W - 1, -1 is off",
    prefix_in_pool=True,
    window=Window(meaning=WindowMeaning.LEFT, off=(-1,)),
)
EXTEND_SUPPORTS = replace(
    SUPPORTS,
    group_sizes=(1, 4),
    max_query_len=None,
    features=frozenset({"sinks", "soft_cap", "custom_scale", "window", "chunked", "non_causal"}),
)
EXTEND_PRECISION = replace(
    GROUPED,
    source="extend_attention.py, _fwd_kernel: float32 products, weights cast to the dtype of the values, "
    "tanh by a sigmoid",
    tile=16,
    max_splits=1,
)


def _run_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    causal: bool,
    scale: float,
    window: int,
    sinks: Tensor | None,
    soft_cap: float | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    lse: Tensor | None,
) -> Tensor:
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    longest = int((q_indptr[1:] - q_indptr[:-1]).max()) if len(q_indptr) > 1 else 0
    _extend().extend_attention_fwd(
        q,
        k,
        v,
        out,
        k_cache,
        v_cache,
        q_indptr,
        kv_indptr,
        slots,
        None,
        causal,
        None,
        longest,
        1.0 if k_descale is None else float(k_descale),
        1.0 if v_descale is None else float(v_descale),
        sm_scale=scale,
        logit_cap=soft_cap or 0.0,
        sliding_window_size=window,
        sinks=sinks,
        lse_extend=lse,
    )
    return out


def _no_extend(engine: Engine) -> str | None:
    return sglang_wheel.missing(EXTEND, engine)


@declare.varlen_extend(
    name="sglang.triton.extend",
    convention=replace(EXTEND_CONVENTION, descales=Descales()),
    precision=EXTEND_PRECISION,
    supports=EXTEND_SUPPORTS,
    unavailable=_no_extend,
)
def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int,
    sinks: Tensor | None,
    soft_cap: float | None,
    **_: None,
) -> Tensor:
    """New tokens after a prefix in the pool."""
    return _run_extend(
        q, k, v, k_cache, v_cache, q_indptr, kv_indptr, slots, causal, scale, window, sinks, soft_cap, None, None, None
    )


@declare.varlen_extend(
    name="sglang.triton.extend_with_lse",
    convention=replace(
        EXTEND_CONVENTION, descales=Descales(), lse_layout=LseLayout.TOKEN_HEAD, sink=SinkUnits.UNSUPPORTED
    ),
    precision=EXTEND_PRECISION,
    supports=replace(EXTEND_SUPPORTS, features=EXTEND_SUPPORTS.features - {"sinks"}),
    unavailable=_no_extend,
)
def extend_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int,
    soft_cap: float | None,
    **_: None,
) -> tuple[Tensor, Tensor]:
    """The same with its log-sum-exp, which context parallelism merges by. Whether it counts a sink is written
    nowhere: no sinks here."""
    lse = torch.empty(q.shape[0], q.shape[1], dtype=torch.float32, device=q.device)
    out = _run_extend(
        q, k, v, k_cache, v_cache, q_indptr, kv_indptr, slots, causal, scale, window, None, soft_cap, None, None, lse
    )
    return out, lse
