"""aiter's Gluon `pa_decode_gluon`: decode over a SHUFFLE cache, by each of its paths through kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz.buffers import DTYPES
from fuzz.call import Unsupported
from fuzz.engine import emulator
from fuzz.engine.emulator import dtypes
from fuzz.engine.emulator.facade import MI300X, MI350X, Device
from fuzz.engine.loader import KernelLoader
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, Descales, Fp8Flavour, Granularity, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine, IndexForm, KVLayout, VLayout
from oracle.precision import Citation
from suites.targets.checked import checked
from suites.targets.source_trees import AITER, FP8_DTYPE, amd_arch, amd_device, other_arch

MODULE = "aiter.ops.triton.gluon.pa_decode_gluon"
FILES = ("ops/triton/gluon/pa_decode_gluon.py",)
PARTITION = 256
"""Keys in one partition of a context, of the paths that are not persistent."""

SPLITS = 3
"""Partitions of the persistent path; with pages of 1024 it takes multiples of four."""


def _given(device: Device) -> dict[str, ModuleType]:
    """What the file imports: the architecture, its fp8, the table of types, and a launcher of the reduction."""
    arch = amd_arch(device)

    def reduce(*arguments: Any, **sizes: int) -> None:
        _reduce(_kernels(device), *arguments, **sizes)

    kinds = {"fp8": DTYPES[FP8_DTYPE[arch]], "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    utils = "aiter.ops.triton.utils"
    return {
        "aiter": emulator.stub("aiter", dtypes=emulator.stub("aiter.dtypes", **kinds)),
        f"{utils}._triton": emulator.stub("_triton", arch_info=emulator.stub("arch_info", get_arch=lambda: arch)),
        f"{utils}.types": emulator.stub("types", torch_to_triton_dtype=_types()),
        "csrc.cpp_itfs.pa.pa_ps": emulator.stub("pa_ps", launch_pa_decode_ps_reduce=reduce),
        "flydsl": ModuleType("flydsl"),
    }


def _types() -> dict[torch.dtype, Any]:
    if engines.current() is Engine.EMULATOR:
        return {dtype.memory: dtype for dtype in dtypes.FLOATS}
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _reduce(kernels: ModuleType, output: Tensor, exp_sums: Tensor, *rest: Any, **sizes: int) -> None:
    """The C++ launcher of the reduction over partitions, by a launch of the file's own Triton kernel for it.

    Of three builds of the reduction (C++, FlyDSL, Triton) only that one needs nothing else.
    """
    parts, dim = sizes["context_partition_num"], sizes["head_size"]
    rows = sizes["query_seq_len"] * sizes["query_group_size"]
    kernels.paged_attention_decode_ps_reduce_kernel[(output.shape[0], exp_sums.shape[1], rows)](
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
def _on_gfx942() -> ModuleType:
    return AITER.load(MODULE, _given(MI300X), amd_device(MI300X))


@KernelLoader
def _on_gfx950() -> ModuleType:
    return AITER.load(MODULE, _given(MI350X), amd_device(MI350X))


def _kernels(device: Device) -> ModuleType:
    return _on_gfx950() if device is MI350X else _on_gfx942()


def pa_decode_gluon(*tensors: Any, device: Device = MI300X, **options: Any) -> None:
    """aiter's own function, as on ``device``."""
    kernels = _kernels(device)
    with AITER.importing(_given(device)):
        kernels.pa_decode_gluon(*tensors, **options)


def get_recommended_splits(num_sequences: int, num_kv_heads: int) -> int:
    """aiter's own number of partitions for the persistent path, on an MI300X."""
    found: int = _kernels(MI300X).get_recommended_splits(num_sequences, num_kv_heads)
    return found


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
    descales=Descales(k=Granularity.TOKEN, v=Granularity.TOKEN, fp8_only=True),
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
    source="paged_attention_decode_sliding_window and _head_1: float32 products, weights cast to the compute type, "
    "denominators of unrounded weights",
    cited=(
        Citation(
            file="aiter/ops/triton/gluon/pa_decode_gluon.py",
            lines="252-985, 1026-2116, 2168-3114, 3150-3920, 3943-4277",
            sha256="cff95e80610211a87a0849c3ed666056cb6118ec73b10bbb0840a59ee2818743",
        ),
    ),
    kv_cast=None,
    qk_product=None,
    p_dtype="input",
    row_sum_of_rounded_p=False,
    tile=16,
)
PERSISTENT = replace(
    ONE_SHOT,
    source="paged_attention_decode_sliding_window, _head_1 and paged_attention_decode_ps_reduce_kernel: as the "
    "one-shot kernels, partial results in the dtype of the query",
    max_splits=4,
    partial_dtype="input",
)
PARTITIONED = replace(
    PERSISTENT,
    source="paged_attention_decode_v2_gluon_dot_kernel, _large_block_dot_kernel and paged_attention_decode_v2_reduce_"
    "kernel: as the one-shot kernels, partial results in the dtype of the query",
    max_splits=16,
)


def by_dtype(usual: Precision, fp8: str) -> dict[str, Precision]:
    """With an fp8 cache weights are cast after a factor: by path and descales 1, the format's largest number, or
    that times a descale over the largest in the partition. Below 1 it is said here, and no number that a format
    holds, so that no weight counts as exact."""
    return {**dict.fromkeys(SUPPORTS.dtypes, usual), fp8: replace(usual, p_scale=0.9)}


def _partitions(lengths: Tensor) -> int:
    """Two at least: one is the one-shot path."""
    return max(2, -(-int(lengths.max()) // PARTITION))


def _window(keys: int, page_size: int, longest: int, ps: bool) -> int:
    """``keys``, but no more than there are where the kernel would walk over all of them (pages of 16 and 64)."""
    return keys if ps or page_size > PARTITION else min(keys, max(longest, 2 * PARTITION))


def _per_token(factors: Tensor | None) -> Tensor | None:
    """Factors [1] as they are; those of tokens [pages, heads, page size] as the kernels want them, [..., 1]."""
    return factors if factors is None or factors.dim() == 1 else factors.unsqueeze(-1)


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
    soft_cap: None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    parts: Callable[[Tensor], int],
    ps: bool,
    device: Device,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(lengths) == 0:
        return out
    queries = q.shape[0] // len(lengths)
    if queries * q.shape[1] // k_cache.shape[1] > 64:
        raise Unsupported("queries times group size above 64")
    pa_decode_gluon(
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
        key_scale=_per_token(k_descale),
        value_scale=_per_token(v_descale),
        sinks=sinks,
        sliding_window=_window(window, k_cache.shape[3], int(lengths.max()), ps),
        ps=ps,
        device=device,
    )
    return out


@dataclass(frozen=True)
class _Path:
    """One path through the kernels: how many partitions of a batch's lengths, by which kernels."""

    name: str
    precision: Precision
    parts: Callable[[Tensor], int]
    ps: bool
    v_layout: VLayout = VLayout.V5D
    page_sizes: tuple[int, ...] = SUPPORTS.page_sizes
    other_parts: tuple[int, ...] = ()
    """Numbers of partitions that the caller may ask for as well."""

    def knobs(self) -> tuple[declare.Knob, ...]:
        """The number of partitions, where the caller chooses it."""
        other = declare.Knob(keyword="partitions", values=self.other_parts, precision="max_splits")
        return (other,) if self.other_parts else ()


ONE_SHOT_PATH = _Path("one_shot", ONE_SHOT, lambda lengths: 1, True)
PS = _Path("ps", PERSISTENT, lambda lengths: SPLITS, True, other_parts=(2, 5, 8))
NON_PS = _Path("non_ps", PARTITIONED, _partitions, False)
NON_PS_V4D = _Path("non_ps.v4d", PARTITIONED, _partitions, False, VLayout.V4D)
PAGE_1024 = _Path("page_1024", PERSISTENT, lambda lengths: 4, True, page_sizes=(1024,), other_parts=(8,))
PAGE_1024_NON_PS = _Path("page_1024.non_ps", PARTITIONED, _partitions, False, page_sizes=(1024,))


def _declared(path: _Path, device: Device) -> Callable[..., Tensor]:
    """A target for one path on one architecture."""
    gfx950 = device is MI350X
    fp8 = FP8_DTYPE[device.arch or ""]
    flavour = Fp8Flavour.FN if gfx950 else Fp8Flavour.FNUZ
    convention = replace(CONVENTION, v_layout=path.v_layout, fp8_flavour=flavour)
    attach = declare.paged_decode(
        name=f"aiter.pa_decode_gluon.{path.name}{'.gfx950' if gfx950 else ''}",
        convention=convention,
        precision=by_dtype(path.precision, fp8),
        supports=replace(SUPPORTS, page_sizes=path.page_sizes, kv_dtypes=(fp8,), archs=(device.arch or "",)),
        engines=(Engine.EMULATOR, Engine.HIP),
        unavailable=lambda engine: other_arch(device, engine) or AITER.missing(FILES, engine),
        knobs=path.knobs(),
        runs=("aiter pa_decode_gluon",),
    )

    def target(*tensors: Tensor, partitions: int | None = None, **options: Any) -> Tensor:
        parts = path.parts if partitions is None else lambda _: partitions
        return _run(*tensors, **options, parts=parts, ps=path.ps, device=device)

    return attach(checked(convention)(target))


one_shot = _declared(ONE_SHOT_PATH, MI300X)
ps = _declared(PS, MI300X)
non_ps = _declared(NON_PS, MI300X)
non_ps_v4d = _declared(NON_PS_V4D, MI300X)
page_1024 = _declared(PAGE_1024, MI300X)
page_1024_non_ps = _declared(PAGE_1024_NON_PS, MI300X)
one_shot_gfx950 = _declared(ONE_SHOT_PATH, MI350X)
ps_gfx950 = _declared(PS, MI350X)
non_ps_gfx950 = _declared(NON_PS, MI350X)
non_ps_v4d_gfx950 = _declared(NON_PS_V4D, MI350X)
page_1024_gfx950 = _declared(PAGE_1024, MI350X)
page_1024_non_ps_gfx950 = _declared(PAGE_1024_NON_PS, MI350X)
