"""aiter's Gluon `pa_decode_gluon`: decode over a SHUFFLE cache, by each of its paths through kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz.call import Unsupported
from fuzz.engine import emulator
from fuzz.engine.emulator import dtypes
from fuzz.engine.emulator.facade import MI300X
from fuzz.engine.loader import KernelLoader
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine, IndexForm, KVLayout, VLayout
from suites.targets.source_trees import AITER, amd_arch, amd_device

MODULE = "aiter.ops.triton.gluon.pa_decode_gluon"
FILES = ("ops/triton/gluon/pa_decode_gluon.py",)
PARTITION = 256
"""Keys in one partition of a context, of the paths that are not persistent."""

SPLITS = 3
"""Partitions of the persistent path; with pages of 1024 it takes multiples of four."""

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


def _given() -> dict[str, ModuleType]:
    """What the file imports: the architecture, its fp8, the table of types, and a launcher of the reduction."""
    arch = amd_arch(MI300X)
    kinds = {"fp8": FP8[arch], "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    utils = "aiter.ops.triton.utils"
    return {
        "aiter": emulator.stub("aiter", dtypes=emulator.stub("aiter.dtypes", **kinds)),
        f"{utils}._triton": emulator.stub("_triton", arch_info=emulator.stub("arch_info", get_arch=lambda: arch)),
        f"{utils}.types": emulator.stub("types", torch_to_triton_dtype=_types()),
        "csrc.cpp_itfs.pa.pa_ps": emulator.stub("pa_ps", launch_pa_decode_ps_reduce=_reduce),
        "flydsl": ModuleType("flydsl"),
    }


def _types() -> dict[torch.dtype, Any]:
    if engines.current() is Engine.EMULATOR:
        return {dtype.memory: dtype for dtype in dtypes.FLOATS}
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _reduce(output: Tensor, exp_sums: Tensor, *rest: Any, **sizes: int) -> None:
    """The C++ launcher of the reduction over partitions, by a launch of the file's own Triton kernel for it.

    Of three builds of the reduction (C++, FlyDSL, Triton) only that one needs nothing else.
    """
    parts, dim = sizes["context_partition_num"], sizes["head_size"]
    rows = sizes["query_seq_len"] * sizes["query_group_size"]
    _kernels().paged_attention_decode_ps_reduce_kernel[(output.shape[0], exp_sums.shape[1], rows)](
        output,
        exp_sums,
        *rest,
        query_group_size=sizes["query_group_size"],
        head_size=dim,
        context_partition_num=parts,
        HEAD_SIZE_POW2=1 << (dim - 1).bit_length(),
        USE_SINKS=rest[2] is not None,
        MAX_CONTEXT_PARTITION_NUM=1 << (parts - 1).bit_length(),
    )


@KernelLoader
def _kernels() -> ModuleType:
    return AITER.load(MODULE, _given(), amd_device(MI300X))


def _unavailable(engine: Engine) -> str | None:
    return AITER.missing(FILES, engine)


CONVENTION = Convention(
    source="aiter/ops/triton/gluon/pa_decode_gluon.py: docstring of pa_decode_gluon; sliding_window 0 is off, and the "
    "kernel of the partitioned path starts at context_length - SLIDING_WINDOW for the last query, its own key counted",
    kv_layout=KVLayout.SHUFFLE_5D,
    v_layout=VLayout.V5D,
    index_form=IndexForm.PAGE_TABLE,
    index_dtypes=("int32",),
    window=Window(meaning=WindowMeaning.KEYS, off=(0,)),
    sink=SinkUnits.NATURAL,
    default_scale=DefaultScale.REQUIRED,
)
SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    head_dims=(64, 128),
    page_sizes=(16, 64),
    num_kv_heads=(1, 2, 3),
    group_sizes=(1, 4, 8, 16),
    max_query_len=4,
    features=frozenset({"window", "sinks", "custom_scale", "strided"}),
    # Whole partitions of keys and values are loaded without a mask; the weight of a key past the length is 0, and
    # 0 times a value that is not finite is NaN.
    requires_finite_pool=True,
)
ONE_SHOT = Precision(
    source="pa_decode_gluon.py, paged_attention_decode_sliding_window and _head_1: float32 products, weights cast to "
    "the compute type, denominators of unrounded weights",
    source_hash="cff95e80610211a87a0849c3ed666056cb6118ec73b10bbb0840a59ee2818743",
    qk_product=None,
    p_dtype="input",
    row_sum_of_rounded_p=False,
    tile=16,
)


def _splitting(most: int, kernels: str) -> dict[str, Precision]:
    source = f"pa_decode_gluon.py, {kernels}: as the one-shot kernels, partial results in the dtype of the query"
    return {d: replace(ONE_SHOT, source=source, max_splits=most, partial_dtype=d) for d in SUPPORTS.dtypes}


PERSISTENT = _splitting(4, "paged_attention_decode_sliding_window, _head_1 and paged_attention_decode_ps_reduce_kernel")
PARTITIONED = _splitting(16, "paged_attention_decode_v2_gluon_dot_kernel and paged_attention_decode_v2_reduce_kernel")


def _partitions(lengths: Tensor) -> int:
    """Two at least: one is the one-shot path."""
    return max(2, -(-int(lengths.max()) // PARTITION))


def _window(keys: int, page_size: int, longest: int, ps: bool) -> int:
    """``keys``, but no more than there are where the kernel would walk over all of them (pages of 16 and 64)."""
    return keys if ps or page_size > PARTITION else min(keys, max(longest, 2 * PARTITION))


def _run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None,
    parts: Callable[[Tensor], int],
    ps: bool,
    **_: None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(lengths) == 0:
        return out
    queries = q.shape[0] // len(lengths)
    if queries * q.shape[1] // k_cache.shape[1] > 64:
        raise Unsupported("queries times group size above 64")
    kernels = _kernels()
    with AITER.importing(_given()):
        kernels.pa_decode_gluon(
            out,
            q,
            k_cache,
            v_cache,
            lengths,
            page_table,
            scale,
            queries,
            parts(lengths),
            PARTITION,
            q.dtype,
            sinks=sinks,
            sliding_window=_window(window, k_cache.shape[3], int(lengths.max()), ps),
            ps=ps,
        )
    return out


def _declared(
    path: str,
    precision: Precision | dict[str, Precision],
    parts: Callable[[Tensor], int],
    ps: bool,
    *,
    v_layout: VLayout = VLayout.V5D,
    page_sizes: tuple[int, ...] = SUPPORTS.page_sizes,
) -> Callable[..., Tensor]:
    """A target for one path through the kernels."""
    attach = declare.paged_decode(
        name=f"aiter.pa_decode_gluon.{path}",
        convention=replace(CONVENTION, v_layout=v_layout),
        precision=precision,
        supports=replace(SUPPORTS, page_sizes=page_sizes),
        engines=(Engine.EMULATOR, Engine.HIP),
        unavailable=_unavailable,
    )

    def target(*tensors: Tensor, **options: Any) -> Tensor:
        return _run(*tensors, **options, parts=parts, ps=ps)

    target.__name__ = path
    return attach(target)


one_shot = _declared("one_shot", ONE_SHOT, lambda lengths: 1, True)
ps = _declared("ps", PERSISTENT, lambda lengths: SPLITS, True)
non_ps = _declared("non_ps", PARTITIONED, _partitions, False)
non_ps_v4d = _declared("non_ps.v4d", PARTITIONED, _partitions, False, v_layout=VLayout.V4D)
page_1024 = _declared("page_1024", PERSISTENT, lambda lengths: 4, True, page_sizes=(1024,))
page_1024_non_ps = _declared("page_1024.non_ps", PARTITIONED, _partitions, False, page_sizes=(1024,))
