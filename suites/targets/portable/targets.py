"""The portable kernels as targets: decode and extend over a SHUFFLE 5D pool, extend over contiguous keys."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fuzz.engine import loader
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, Descales, Fp8Flavour, Granularity, LseLayout, SinkUnits, Window
from oracle.convention import WindowMeaning as Meaning
from oracle.kinds import IndexForm, KVLayout
from suites.targets.checked import checked
from suites.targets.portable.attention import BLOCK_N, Keys, attention
from suites.targets.portable.attention import kernels as kernels  # the compile gate looks for it here

SPLITS = 3
"""Splits of decode: of a context of one tile, two are empty."""

LINEAR = Convention(
    source="suites/targets/portable/attention.py: docstring of attention",
    index_dtypes=("int32", "int64"),
    window=Window(meaning=Meaning.KEYS, off=(0,)),
    lse_layout=LseLayout.TOKEN_HEAD,
    sink=SinkUnits.NATURAL,
    soft_cap=True,
    default_scale=DefaultScale.REQUIRED,
    fp8_flavour=Fp8Flavour.ANY,
    descales=Descales(k=Granularity.HEAD, v=Granularity.HEAD),
)
SHUFFLE_5D = replace(LINEAR, kv_layout=KVLayout.SHUFFLE_5D, prefix_in_pool=True)
DECODE = replace(SHUFFLE_5D, prefix_in_pool=False, index_form=IndexForm.PAGE_TABLE)

PRECISION = Precision(
    source="suites/targets/portable/kernels.py, attend and combine: float32 throughout, inputs and output apart",
    kv_cast=None,
    qk_product=None,
    p_dtype=None,
    sink_first=False,
    row_sum_of_rounded_p=False,
    tanh_error=2.0**-20,
    tile=BLOCK_N,
)
FEATURES = frozenset({"window", "sinks", "soft_cap", "custom_scale", "non_causal", "chunked", "empty", "strided"})
SUPPORTS = Supports(
    dtypes=("bf16", "fp16", "fp32"),
    kv_dtypes=("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"),
    head_dims=(64, 128, 48),
    v_head_dims=(32,),
    page_sizes=(16, 64),
    num_kv_heads=(1, 2, 3),
    group_sizes=(1, 4, 3),
    features=FEATURES,
    batch_invariant=True,
)
Result = tuple[Tensor, Tensor]


@declare.varlen_extend(
    name="portable.linear.extend",
    convention=LINEAR,
    precision=PRECISION,
    supports=SUPPORTS,
    unavailable=loader.missing_compiler,
    runs=("portable attention",),
)
@checked(LINEAR)
def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int,
    sinks: Tensor | None,
    soft_cap: float | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    **_: None,
) -> Result:
    """Ragged queries over keys that lie one after the other."""
    lengths = kv_indptr[1:] - kv_indptr[:-1]
    return attention(
        q,
        q_indptr,
        lengths,
        [replace(_in_a_row(k, v, lengths, kv_indptr[:-1]), k_descale=k_descale, v_descale=v_descale)],
        scale=scale,
        causal=causal,
        window=window or None,
        sinks=sinks,
        soft_cap=soft_cap,
    )


@declare.varlen_extend(
    name="portable.shuffle_5d.extend",
    convention=SHUFFLE_5D,
    precision=replace(PRECISION, max_splits=2),
    # No query without a key: a new token is among its own keys.
    supports=replace(SUPPORTS, features=FEATURES - {"empty"}),
    unavailable=loader.missing_compiler,
    runs=("portable attention",),
)
@checked(SHUFFLE_5D)
def extend_after_prefix(
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
    **_: None,
) -> Result:
    """New tokens after a prefix in the pool: two parts of the keys, merged. Descales are the pool's."""
    before, new = kv_indptr[1:] - kv_indptr[:-1], q_indptr[1:] - q_indptr[:-1]
    prefix = Keys(
        k=k_cache,
        v=v_cache,
        index=slots,
        starts=kv_indptr[:-1],
        counts=before,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return attention(
        q,
        q_indptr,
        before + new,
        [prefix, replace(_in_a_row(k, v, new, q_indptr[:-1]), firsts=before)],
        scale=scale,
        causal=causal,
        window=window or None,
        sinks=sinks,
        soft_cap=soft_cap,
    )


@declare.paged_decode(
    name="portable.shuffle_5d.decode",
    convention=DECODE,
    precision=replace(PRECISION, max_splits=SPLITS),
    supports=replace(SUPPORTS, max_query_len=4, features=FEATURES - {"non_causal", "chunked"}),
    unavailable=loader.missing_compiler,
    runs=("portable attention",),
    agrees_with=extend_after_prefix,
    knobs=(
        declare.Knob(keyword="splits", values=(1, 2, 8), precision="max_splits"),
        declare.Knob(keyword="block", values=(16,), precision="tile"),
    ),
)
@checked(DECODE)
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None,
    soft_cap: float | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    splits: int = SPLITS,
    block: int = BLOCK_N,
) -> Result:
    """A few queries a request against a pool that holds their keys too."""
    requests = len(lengths)
    queries = q.shape[0] // requests if requests else 0
    return attention(
        q,
        torch.arange(requests + 1, dtype=torch.int32, device=q.device) * queries,
        lengths,
        [
            Keys(
                k=k_cache,
                v=v_cache,
                index=page_table,
                counts=lengths,
                k_descale=k_descale,
                v_descale=v_descale,
            )
        ],
        scale=scale,
        window=window or None,
        sinks=sinks,
        soft_cap=soft_cap,
        splits=splits,
        block=block,
    )


def _in_a_row(k: Tensor, v: Tensor, counts: Tensor, starts: Tensor) -> Keys:
    slots = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)
    return Keys(k=k, v=v, index=slots, starts=starts, counts=counts)
