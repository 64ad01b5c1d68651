"""aiter's Triton `unified_attention` as paged decode: any page table, one to four queries of each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuzz.engine import emulator
from fuzz.engine.emulator.facade import MI300X, MI350X, Device
from fuzz.engine.loader import KernelLoader
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, Descales, Fp8Flavour, Granularity, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine, IndexForm, KVLayout
from oracle.precision import Citation
from suites.targets.checked import checked
from suites.targets.source_trees import AITER, FP8_DTYPE, amd_arch, amd_device, other_arch

FILES = ("ops/triton/unified_attention.py", "ops/triton/_triton_kernels/unified_attention.py")
"""Where the launcher and the kernels live in the wheel 0.1.7."""


def _load(device: Device) -> ModuleType:
    name, arch = "aiter.ops.triton.utils._triton.arch_info", amd_arch(device)
    fp4 = arch == "gfx950"
    info = emulator.stub(name, get_arch=lambda: arch, is_fp4_avail=lambda: fp4, is_fp8_avail=lambda: True)
    return AITER.load("aiter.ops.triton.unified_attention", {name: info}, amd_device(device))


@KernelLoader
def _on_gfx942() -> ModuleType:
    return _load(MI300X)


@KernelLoader
def _on_gfx950() -> ModuleType:
    return _load(MI350X)


CONVENTION = Convention(
    source="aiter/ops/triton/unified_attention.py: SLIDING_WINDOW = 1 + window_size[0], 0 is off; its kernels' "
    "comments on shapes; flash-attention's meaning of (left, right) and -1",
    kv_layout=KVLayout.NHD,
    index_form=IndexForm.PAGE_TABLE,
    index_dtypes=("int32",),
    window=Window(meaning=WindowMeaning.LEFT_RIGHT, off=(-1,)),
    sink=SinkUnits.NATURAL,
    soft_cap=True,
    default_scale=DefaultScale.REQUIRED,
    descales=Descales(k=Granularity.TENSOR, v=Granularity.TENSOR, fp8_only=True),
)

CITED = (
    Citation(
        file="aiter/ops/triton/_triton_kernels/unified_attention.py",
        lines="54-376, 381-690, 693-784",
        sha256="1b7ef850807bba8d4d2831ddc4e05dbefb58797140a4d8b8928822c2a5abc801",
    ),
)
TILED = Precision(
    source="kernel_unified_attention_2d, _3d and reduce_segments: float32 products, weights cast to the dtype of the "
    "query, denominators of unrounded weights, tanh by exponentials, partial results in float32",
    cited=CITED,
    kv_cast=None,
    qk_product=None,
    p_dtype="input",
    row_sum_of_rounded_p=False,
    tanh_error=2.0**-20,
    tile=16,
    max_splits=128,
)
OF_FP8 = replace(
    TILED,
    source="the same kernels: as for other caches, but fp8 keys and values times their descales are cast "
    "to the dtype of the query",
    kv_cast="input",
)
SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    head_dims=(64, 128, 80),
    page_sizes=(16, 64),
    num_kv_heads=(1, 2, 3),
    group_sizes=(1, 4, 16),
    max_query_len=4,
    features=frozenset({"window", "sinks", "soft_cap", "custom_scale", "strided"}),
    # Where a tile is a page, tile_mask is all true in both kernels: keys past the length are loaded, their weight is
    # 0, and 0 times a value that is not finite is NaN.
    requires_finite_pool=True,
)
SEGMENTED = 1024
"""A longest context that makes the launcher split: it splits from 513 keys on, unless there is a window."""


def _run(
    kernels: KernelLoader,
    longest: int,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: tuple[int, int],
    sinks: Tensor | None,
    soft_cap: float | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    requests = len(lengths)
    if requests == 0:
        return out
    queries = q.shape[0] // requests
    starts = torch.arange(requests + 1, dtype=torch.int32, device=q.device) * queries
    kernels().unified_attention(
        q,
        k_cache,
        v_cache,
        out,
        starts,
        queries,
        lengths,
        longest or int(lengths.max()),
        scale,
        True,
        window,
        page_table,
        soft_cap or 0.0,
        None,
        k_descale,
        v_descale,
        sinks=sinks,
    )
    return out


def _declared(name: str, supports: Supports, longest: int, device: Device) -> Callable[..., Tensor]:
    """A target for one path through the kernels, on one architecture; ``longest``: the context that is announced."""
    gfx950 = device is MI350X
    fp8 = FP8_DTYPE[device.arch or ""]
    attach = declare.paged_decode(
        name=f"aiter.triton.unified_attention{name}{'.gfx950' if gfx950 else ''}",
        convention=replace(CONVENTION, fp8_flavour=Fp8Flavour.FN if gfx950 else Fp8Flavour.FNUZ),
        precision={"bf16": TILED, "fp16": TILED, fp8: OF_FP8},
        supports=replace(supports, archs=(device.arch or "",), kv_dtypes=(fp8,)),
        engines=(Engine.EMULATOR, Engine.HIP),
        unavailable=lambda engine: other_arch(device, engine) or AITER.missing(FILES, engine),
        runs=("aiter unified_attention",),
    )
    kernels = _on_gfx950 if gfx950 else _on_gfx942

    def target(*tensors: Tensor, **options: Any) -> Tensor:
        return _run(kernels, longest, *tensors, **options)

    return attach(checked(CONVENTION)(target))


NO_WINDOW = replace(SUPPORTS, features=SUPPORTS.features - {"window"})

# Contexts of up to 512 keys, and windows: the 2D kernel; others the 3D kernel. And as in a captured graph, whose
# longest context is announced as longer than any is: the 3D kernel.
unified_attention = _declared("", SUPPORTS, 0, MI300X)
unified_attention_gfx950 = _declared("", SUPPORTS, 0, MI350X)
unified_attention_segments = _declared(".segments", NO_WINDOW, SEGMENTED, MI300X)
unified_attention_segments_gfx950 = _declared(".segments", NO_WINDOW, SEGMENTED, MI350X)
