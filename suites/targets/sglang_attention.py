"""sglang's Triton attention over a pool of slots: decode, plain and grouped, and extend."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz.engine.emulator.facade import MI300X, Device
from fuzz.engine.loader import KernelLoader, pretended
from oracle import Convention, Precision, Supports, declare
from oracle.convention import (
    DefaultScale,
    Descales,
    Fp8Flavour,
    Granularity,
    LseLayout,
    SinkUnits,
    Window,
    WindowMeaning,
)
from oracle.kinds import Engine, KVLayout
from oracle.precision import Accumulation, MatrixUnit
from suites.targets import sglang_wheel
from suites.targets.checked import checked
from suites.targets.source_trees import other_arch

FOLDERS = ("srt/layers/attention/triton_ops", "kernels/ops/attention")
"""Where the kernels live: up to 0.5.16, and later."""

DECODE = tuple(f"{folder}/decode_attention.py" for folder in FOLDERS)
EXTEND = tuple(f"{folder}/extend_attention.py" for folder in FOLDERS)

SPLITS = 8
"""Partial results a request may have; request i uses 1 + i % SPLITS of them."""

RUNS_DECODE, RUNS_EXTEND = ("sglang decode_attention_fwd",), ("sglang extend_attention_fwd",)
KNOBS = (declare.Knob(keyword="splits", values=(1, 3, 16), precision="max_splits"),)


Names = dict[str, dict[str, object]]


def about_the_machine(device: Device | None) -> Names:
    machine = pretended() or device
    arch = machine.arch if machine else None
    hip, gfx95 = engines.current() is Engine.HIP or arch is not None, (arch or "").startswith("gfx95")
    answers = {"is_cuda": lambda: not hip, "is_hip": lambda: hip, "is_gfx95_supported": lambda: gfx95}
    answers["is_gfx1250_supported"] = lambda: False
    return {"sglang.srt.utils": answers, "sglang.kernels.utils": answers, "sglang.srt.utils.common": answers}


def sibling(name: str, given: Names, device: Device | None) -> Names:
    """The names of a module that lies beside the kernels, loaded for real; nothing where this version has none."""
    files = tuple(f"{folder}/{name}.py" for folder in FOLDERS)
    if not sglang_wheel.has(files):
        return {}
    module = sglang_wheel.load(files, given, device)
    return {f"sglang.{folder.replace('/', '.')}.{name}": vars(module) for folder in FOLDERS}


def _load_decode(device: Device | None = None) -> ModuleType:
    given = about_the_machine(device)
    return sglang_wheel.load(DECODE, given | sibling("score_mod", given, device), device)


def _load_extend(device: Device | None = None) -> ModuleType:
    given = about_the_machine(device)
    given |= sibling("score_mod", given, device)
    for name in ("decode_attention", "prefill_attention"):
        given |= sibling(name, given, device)
    return sglang_wheel.load(EXTEND, given, device)


decode_kernels = KernelLoader(_load_decode)
extend_kernels = KernelLoader(_load_extend)
_decode_on_gfx942 = KernelLoader(partial(_load_decode, MI300X))
_extend_on_gfx942 = KernelLoader(partial(_load_extend, MI300X))


CONVENTION = Convention(
    source="sglang/srt/layers/attention/triton_backend.py, the caller: every key's slot, a window by leaving keys out",
    kv_layout=KVLayout.LINEAR,
    index_dtypes=("int32", "int64"),
    sink=SinkUnits.NATURAL,
    soft_cap=True,
    default_scale=DefaultScale.REQUIRED,
    fp8_flavour=Fp8Flavour.FN,
    descales=Descales(k=Granularity.TENSOR, v=Granularity.TENSOR),
)
FP8 = ("e4m3fn", "e5m2")
"""What a pool may hold beside the dtype of the query; on gfx942 it is e4m3fnuz."""

SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    kv_dtypes=FP8,
    head_dims=(64, 128, 80),
    v_head_dims=(48, 32),
    page_sizes=(1, 16),
    num_kv_heads=(1, 2, 3),
    group_sizes=(1,),
    max_query_len=1,
    features=frozenset({"sinks", "soft_cap", "custom_scale"}),
)
PLAIN = Precision(
    source="_fwd_kernel_stage1 and _fwd_kernel_stage2: products of query and key in their own "
    "dtype, weights and partial results in float32, tanh by a sigmoid",
    cited=sglang_wheel.cited(
        DECODE,
        ("96-259, 667-738", "4ecf5d81f06fcc8aa36479541ff3857a1416e2d8def2c5fa818808148febaa75"),
        ("235-427, 935-1018", "7a3b66ce3daabbb027efd860411cd9abe4b399b1f2cfc3ed5c6c01731eb9fa0a"),
    ),
    kv_cast=None,
    qk_product="input",
    p_dtype=None,
    row_sum_of_rounded_p=False,
    tanh_error=2.0**-20,
    # The sink joins the sum of the merged parts.
    sink_first=False,
    tile=8,
    max_splits=SPLITS,
)
GROUPED = replace(
    PLAIN,
    source="_fwd_grouped_kernel_stage1 and _fwd_kernel_stage2: float32 products, weights cast to "
    "the dtype of the values, partial results in float32, tanh by a sigmoid",
    cited=sglang_wheel.cited(
        DECODE,
        ("351-554, 667-738", "4ecf5d81f06fcc8aa36479541ff3857a1416e2d8def2c5fa818808148febaa75"),
        ("530-793, 935-1018", "7a3b66ce3daabbb027efd860411cd9abe4b399b1f2cfc3ed5c6c01731eb9fa0a"),
    ),
    qk_product=None,
    p_dtype="input",
)


HOPPER_FP8 = MatrixUnit(
    accumulation=Accumulation.FUSED, block=32, fraction_bits=13, unit_roundoff=2.0**-13, toward_zero=True
)
"""Products of fp8 on an H200, as `suites.tolerance.matrix_units` measures them."""


def with_fp8(usual: Precision, *pools: str) -> dict[str, Precision]:
    """With a pool of fp8 the query is cast to its dtype before the first product, weights before the second.

    Both products are then of fp8, which the units of Hopper add up in little more than a bf16.
    """
    units = {pool: {} if pool.endswith("fnuz") else {"qk": HOPPER_FP8, "pv": HOPPER_FP8} for pool in pools}
    of_fp8 = {pool: replace(usual, q_cast=pool, p_dtype=pool, **units[pool]) for pool in pools}
    return {**dict.fromkeys(SUPPORTS.dtypes, usual), **of_fp8}


def _run_decode(
    kernels: KernelLoader,
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
    splits: int = SPLITS,
) -> Tensor:
    batch, heads, dim_v = q.shape[0], q.shape[1], v_cache.shape[2]
    out = torch.empty(batch, heads, dim_v, dtype=q.dtype, device=q.device)
    logits = torch.empty(batch, heads, splits, dim_v, dtype=torch.float32, device=q.device)
    lses = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    used = torch.arange(batch, dtype=torch.int32, device=q.device) % splits + 1
    kernels().decode_attention_fwd(
        q,
        k_cache,
        v_cache,
        out,
        kv_indptr,
        slots,
        logits,
        lses,
        used,
        splits,
        scale,
        1.0 if k_descale is None else float(k_descale),
        1.0 if v_descale is None else float(v_descale),
        logit_cap=soft_cap or 0.0,
        sinks=sinks,
    )
    return out


def no_decode(engine: Engine) -> str | None:
    return sglang_wheel.missing(DECODE, engine)


@declare.paged_decode(
    name="sglang.triton.decode",
    convention=CONVENTION,
    precision=PLAIN,
    supports=SUPPORTS,
    unavailable=no_decode,
    runs=RUNS_DECODE,
    knobs=KNOBS,
)
@checked(CONVENTION)
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    *,
    splits: int = SPLITS,
    **options: Any,
) -> Tensor:
    """One key head for each query head."""
    return _run_decode(decode_kernels, q, k_cache, v_cache, kv_indptr, slots, splits=splits, **options)


@declare.paged_decode(
    name="sglang.triton.decode_grouped",
    convention=CONVENTION,
    precision=with_fp8(GROUPED, *FP8),
    supports=replace(SUPPORTS, group_sizes=(4, 2, 16)),
    unavailable=no_decode,
    runs=RUNS_DECODE,
    knobs=KNOBS,
)
@checked(CONVENTION)
def decode_grouped(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    *,
    splits: int = SPLITS,
    **options: Any,
) -> Tensor:
    """Several query heads to a key head."""
    return _run_decode(decode_kernels, q, k_cache, v_cache, kv_indptr, slots, splits=splits, **options)


@declare.paged_decode(
    name="sglang.triton.decode_grouped.gfx942",
    convention=replace(CONVENTION, fp8_flavour=Fp8Flavour.FNUZ),
    precision=with_fp8(GROUPED, "e4m3fnuz"),
    supports=replace(SUPPORTS, group_sizes=(4, 2, 16), kv_dtypes=("e4m3fnuz",), archs=("gfx942",)),
    engines=(Engine.EMULATOR, Engine.HIP),
    unavailable=lambda engine: other_arch(MI300X, engine) or no_decode(engine),
    runs=RUNS_DECODE,
    knobs=KNOBS,
)
@checked(CONVENTION)
def decode_grouped_gfx942(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    *,
    splits: int = SPLITS,
    **options: Any,
) -> Tensor:
    """The same on gfx942, whose fp8 is another."""
    return _run_decode(_decode_on_gfx942, q, k_cache, v_cache, kv_indptr, slots, splits=splits, **options)


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
    source="_fwd_kernel: float32 products, weights cast to the dtype of the values, tanh by a sigmoid; of an fp8 pool "
    "the prefix alone",
    cited=sglang_wheel.cited(
        EXTEND,
        ("241-619", "2f4a934625b38d2e797a92c5966270c4d36ebfce9dc0093fb83bf18b140e9f28"),
        ("375-913", "be3baffc80ef9fe484d0b896842522b02bf671785088e05a66ca4dcdb2e8a9b3"),
    ),
    tile=16,
    max_splits=1,
)


def _run_extend(
    kernels: KernelLoader,
    lse: Tensor | None,
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
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    q_descale: None,
) -> Tensor:
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    longest = int((q_indptr[1:] - q_indptr[:-1]).max()) if len(q_indptr) > 1 else 0
    kernels().extend_attention_fwd(
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


def no_extend(engine: Engine) -> str | None:
    return sglang_wheel.missing(EXTEND, engine)


@declare.varlen_extend(
    name="sglang.triton.extend",
    convention=EXTEND_CONVENTION,
    precision=with_fp8(EXTEND_PRECISION, *FP8),
    supports=EXTEND_SUPPORTS,
    unavailable=no_extend,
    runs=RUNS_EXTEND,
)
@checked(EXTEND_CONVENTION)
def extend(q: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    """New tokens after a prefix in the pool."""
    return _run_extend(extend_kernels, None, q, *tensors, **options)


@declare.varlen_extend(
    name="sglang.triton.extend_with_lse",
    convention=replace(EXTEND_CONVENTION, lse_layout=LseLayout.TOKEN_HEAD, sink=SinkUnits.UNSUPPORTED),
    precision=with_fp8(EXTEND_PRECISION, *FP8),
    supports=replace(EXTEND_SUPPORTS, features=EXTEND_SUPPORTS.features - {"sinks"}),
    unavailable=no_extend,
    runs=RUNS_EXTEND,
)
@checked(EXTEND_CONVENTION)
def extend_with_lse(q: Tensor, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The same with its log-sum-exp, which context parallelism merges by. Whether it counts a sink is written
    nowhere: no sinks here."""
    lse = torch.empty(q.shape[0], q.shape[1], dtype=torch.float32, device=q.device)
    return _run_extend(extend_kernels, lse, q, *tensors, **options), lse


@declare.varlen_extend(
    name="sglang.triton.extend.gfx942",
    convention=replace(EXTEND_CONVENTION, fp8_flavour=Fp8Flavour.FNUZ),
    precision=with_fp8(EXTEND_PRECISION, "e4m3fnuz"),
    supports=replace(EXTEND_SUPPORTS, kv_dtypes=("e4m3fnuz",), archs=("gfx942",)),
    engines=(Engine.EMULATOR, Engine.HIP),
    unavailable=lambda engine: other_arch(MI300X, engine) or no_extend(engine),
    runs=RUNS_EXTEND,
)
@checked(EXTEND_CONVENTION)
def extend_gfx942(q: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    """The same on gfx942, whose fp8 is another."""
    return _run_extend(_extend_on_gfx942, None, q, *tensors, **options)
