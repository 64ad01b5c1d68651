"""The Gluon attention kernels of tokenspeed-kernel-amd for gfx950: decode, extend over pages, and prefill."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from fuzz.engine.emulator.facade import MI350X
from fuzz.engine.loader import KernelLoader
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, EmptyLse, LseLayout, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine, IndexForm, KVLayout
from oracle.precision import Citation
from suites.targets.checked import checked
from suites.targets.source_trees import TOKENSPEED

FOLDER = "ops/gfx950/attention/mha"


def _load(name: str) -> ModuleType:
    return TOKENSPEED.load(f"{TOKENSPEED.package}.{FOLDER.replace('/', '.')}.{name}", {}, MI350X)


@KernelLoader
def _decode() -> ModuleType:
    return _load("decode")


@KernelLoader
def _extend() -> ModuleType:
    return _load("extend")


@KernelLoader
def _prefill() -> ModuleType:
    return _load("prefill")


def _no_decode(engine: Engine) -> str | None:
    return TOKENSPEED.missing((f"{FOLDER}/decode.py",), engine)


def _no_extend(engine: Engine) -> str | None:
    return TOKENSPEED.missing((f"{FOLDER}/extend.py",), engine)


def _no_prefill(engine: Engine) -> str | None:
    return TOKENSPEED.missing((f"{FOLDER}/prefill.py",), engine)


def _cited(name: str, lines: str, sha256: str) -> tuple[Citation, ...]:
    return (Citation(file=f"{TOKENSPEED.package}/{FOLDER}/{name}", lines=lines, sha256=sha256),)


CONVENTION = Convention(
    source="tokenspeed_kernel_amd/ops/gfx950/attention/mha/decode.py, extend.py and prefill.py: window_left counts "
    "keys to the left, below 0 is off; softmax_scale None is 1 / sqrt(head dim); a sink joins the sum of exponentials",
    kv_layout=KVLayout.NHD,
    index_form=IndexForm.PAGE_TABLE,
    index_dtypes=("int32",),
    window=Window(meaning=WindowMeaning.LEFT, off=(-1,)),
    sink=SinkUnits.NATURAL,
    default_scale=DefaultScale.RSQRT_HEAD_DIM,
)
PAGED = Supports(
    # An fp8 query reads an fp8 cache. The launchers take descales and leave them out of account: none are given.
    dtypes=("bf16", "fp16", "e4m3fn", "e5m2"),
    head_dims=(64, 128),
    page_sizes=(64,),
    num_kv_heads=(1, 2, 3),
    group_sizes=(1, 4, 3, 16),
    max_query_len=4,
    features=frozenset({"window", "sinks", "custom_scale", "strided", "empty"}),
    # Whole pages are loaded: the weight of a key past the length is 0, and 0 times a value that is not finite is NaN.
    requires_finite_pool=True,
    archs=("gfx950",),
    compiler="tokenspeed_triton",
)
DECODE_PRECISION = Precision(
    source="gluon_mha_decode_gfx950, _sliding_ and _reduce_: float32 products, weights cast to the dtype of "
    "the query, denominators of unrounded weights, partial results in float32",
    cited=_cited("decode.py", "273-779", "ddec4155458eeab9809fbcbec3eb7dc3e09842db1dda8dd00de64e81d3cbd4ad"),
    kv_cast=None,
    qk_product=None,
    p_dtype="input",
    row_sum_of_rounded_p=False,
    tile=64,
    max_splits=16,
)


def _empty(q: Tensor) -> Tensor:
    """An output for no request: over an fp8 query it is bfloat16."""
    return torch.empty(q.shape, dtype=torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype, device=q.device)


@declare.paged_decode(
    name="tokenspeed.gfx950.decode",
    convention=CONVENTION,
    precision=DECODE_PRECISION,
    supports=PAGED,
    engines=(Engine.EMULATOR, Engine.HIP),
    unavailable=_no_decode,
)
@checked(CONVENTION)
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None,
    window: int,
    sinks: Tensor | None,
    **_: None,
) -> Tensor:
    """The last queries of every request, as many of each, against the pool."""
    if len(lengths) == 0:
        return _empty(q)
    out: Tensor = _decode().launch_gluon_mha_decode_gfx950(
        q,
        k_cache,
        v_cache,
        page_table,
        lengths,
        max(1, int(lengths.max())),
        q.shape[0] // len(lengths),
        window,
        sinks=sinks,
        softmax_scale=scale,
    )
    return out


@declare.paged_decode(
    name="tokenspeed.gfx950.extend",
    convention=replace(
        CONVENTION,
        lse_layout=LseLayout.TOKEN_HEAD,
        lse_includes_sink=True,
        # With a sink it is the sink's own, which no fixed value says.
        empty_lse=EmptyLse.UNDEFINED,
    ),
    precision=replace(
        DECODE_PRECISION,
        source="float32 products, weights cast to the dtype of the query, denominators of unrounded weights",
        cited=_cited("extend.py", "300-950", "1805e6841b8ada0ad323db164350f2b3dd45e2658b66a7929034cd648cec2631"),
        max_splits=1,
    ),
    supports=replace(PAGED, group_sizes=(1, 4, 3), max_query_len=40),
    engines=(Engine.EMULATOR, Engine.HIP),
    unavailable=_no_extend,
)
@checked(CONVENTION)
def extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None,
    window: int,
    sinks: Tensor | None,
    **_: None,
) -> tuple[Tensor, Tensor]:
    """New tokens of every request, as many of each, which the pool holds already."""
    requests = len(lengths)
    if requests == 0:
        return _empty(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    queries = q.shape[0] // requests
    starts = torch.arange(requests + 1, dtype=torch.int32, device=q.device) * queries
    key_starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    out, lse = _extend().launch_gluon_mha_extend_gfx950(
        q,
        starts,
        key_starts,
        k_cache,
        v_cache,
        page_table,
        lengths,
        is_causal=True,
        window_left=window,
        sinks=sinks,
        return_lse=True,
        max_seqlen_q=queries,
        max_seqlen_k=max(1, int(lengths.max())),
        softmax_scale=scale,
    )
    return out, lse


@declare.varlen_extend(
    name="tokenspeed.gfx950.prefill",
    convention=replace(
        CONVENTION,
        kv_layout=KVLayout.LINEAR,
        index_form=IndexForm.SLOT_LIST,
        lse_layout=LseLayout.TOKEN_HEAD,
        lse_includes_sink=True,
    ),
    precision=replace(
        DECODE_PRECISION,
        source="float32 products, weights cast to the dtype of the query, denominators of unrounded weights",
        cited=_cited("prefill.py", "330-1160", "bd03c7fbf66f2d70dc4dfa1b0b68263206b68f1132bd933cd75ab455a17e872c"),
        max_splits=1,
    ),
    supports=replace(
        PAGED,
        group_sizes=(1, 4, 3),
        max_query_len=None,
        features=frozenset({"window", "sinks", "custom_scale", "strided"}),
        requires_finite_pool=False,
    ),
    engines=(Engine.EMULATOR, Engine.HIP),
    unavailable=_no_prefill,
)
@checked(CONVENTION)
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    *,
    scale: float | None,
    window: int,
    sinks: Tensor | None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Whole requests, each token a query."""
    starts = q_indptr.tolist()
    if len(starts) == 1:
        return _empty(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    longest = int((q_indptr[1:] - q_indptr[:-1]).max())
    # The kernel is unrolled over all of a window: no more of it than there are keys.
    window = min(window, longest)
    out, lse = _prefill().launch_gluon_mha_prefill_gfx950(
        q, k, v, q_indptr, starts, longest, window, sinks=sinks, return_lse=True, softmax_scale=scale
    )
    return out, lse
