"""aiter's Triton `unified_attention` as paged decode: any page table, one to four queries of each request."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from fuzz.engine import emulator
from fuzz.engine.emulator.facade import MI300X
from fuzz.engine.loader import KernelLoader
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine, IndexForm, KVLayout
from suites.targets.source_trees import AITER, amd_arch, amd_device

FILES = ("ops/triton/unified_attention.py", "ops/triton/_triton_kernels/unified_attention.py")
"""Where the launcher and the kernels live in the wheel 0.1.7."""


@KernelLoader
def _kernels() -> ModuleType:
    name, arch = "aiter.ops.triton.utils._triton.arch_info", amd_arch(MI300X)
    fp4 = arch == "gfx950"
    info = emulator.stub(name, get_arch=lambda: arch, is_fp4_avail=lambda: fp4, is_fp8_avail=lambda: True)
    return AITER.load("aiter.ops.triton.unified_attention", {name: info}, amd_device(MI300X))


def _unavailable(engine: Engine) -> str | None:
    return AITER.missing(FILES, engine)


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
)


TILED = Precision(
    source="_triton_kernels/unified_attention.py, kernel_unified_attention_2d: float32 products, weights cast to the "
    "dtype of the values, denominators of unrounded weights, tanh by exponentials",
    source_hash="1b7ef850807bba8d4d2831ddc4e05dbefb58797140a4d8b8928822c2a5abc801",
    qk_product=None,
    p_dtype="input",
    row_sum_of_rounded_p=False,
    tanh_error=2.0**-20,
    tile=16,
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
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: tuple[int, int],
    sinks: Tensor | None,
    soft_cap: float | None,
    longest: int,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    requests = len(lengths)
    if requests == 0:
        return out
    queries = q.shape[0] // requests
    starts = torch.arange(requests + 1, dtype=torch.int32, device=q.device) * queries
    _kernels().unified_attention(
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
        None,
        None,
        sinks=sinks,
    )
    return out


@declare.paged_decode(
    name="aiter.triton.unified_attention",
    convention=CONVENTION,
    precision=TILED,
    supports=SUPPORTS,
    engines=(Engine.EMULATOR, Engine.HIP),
    unavailable=_unavailable,
)
def unified_attention(
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
    **_: None,
) -> Tensor:
    """The last queries of every request against the pool: the 2D kernel, as contexts are no longer than 512."""
    return _run(q, k_cache, v_cache, page_table, lengths, scale, window, sinks, soft_cap, 0)


@declare.paged_decode(
    name="aiter.triton.unified_attention.segments",
    convention=CONVENTION,
    precision=replace(
        TILED,
        source="_triton_kernels/unified_attention.py, kernel_unified_attention_3d and reduce_segments: as the 2D "
        "kernel, partial results in float32",
        max_splits=128,
    ),
    supports=replace(SUPPORTS, features=SUPPORTS.features - {"window"}),
    engines=(Engine.EMULATOR, Engine.HIP),
    unavailable=_unavailable,
)
def unified_attention_segments(
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
    **_: None,
) -> Tensor:
    """The same as in a captured graph, whose longest context is announced as longer than any is: the 3D kernel."""
    return _run(q, k_cache, v_cache, page_table, lengths, scale, window, sinks, soft_cap, SEGMENTED)
