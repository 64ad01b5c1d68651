"""Adapters of ``planted_kernels``, as a package that is installed: each imports it when it is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, LseLayout, Window, WindowMeaning
from oracle.kinds import KVLayout
from oracle.precision import EXACT_COPY

POOL = Convention(source="planted_kernels", kv_layout=KVLayout.NHD, index_dtypes=("int32", "int64"))
COPIES = Supports(dtypes=("bf16",), head_dims=(32,), num_kv_heads=(1, 2))
FLOAT64 = Precision(source="planted_kernels: float64 inside", qk_product=None, p_dtype=None)
ATTENTION = Convention(
    source="planted_kernels",
    kv_layout=KVLayout.NHD,
    window=Window(meaning=WindowMeaning.KEYS, off=(0,)),
    default_scale=DefaultScale.RSQRT_HEAD_DIM,
)
ATTENDS = Supports(dtypes=("fp32",), head_dims=(32,), num_kv_heads=(1, 2), group_sizes=(1, 2))


def _kernels() -> Any:
    from planted import kernels

    return kernels


@declare.kv_gather(name="package.gather", convention=POOL, precision=EXACT_COPY, supports=COPIES)
def gather(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    rows = k_cache.shape[1]
    return _kernels().gather_rows(k_cache, slots, rows_a_page=rows), _kernels().gather_rows(v_cache, slots)


@declare.kv_gather(name="package.changes", convention=POOL, precision=EXACT_COPY, supports=COPIES)
def changes(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    key = _kernels().sorted_rows(k_cache, slots.clone())
    return key, _kernels().sorted_rows(v_cache, slots)


@declare.kv_gather(name="package.refuses", convention=POOL, precision=EXACT_COPY, supports=COPIES)
def refuses(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    pools = [_kernels().refuse(cache).flatten(0, 1) for cache in (k_cache, v_cache)]
    return pools[0][slots.long()], pools[1][slots.long()]


@declare.kv_write(name="package.write", convention=POOL, precision=EXACT_COPY, supports=COPIES)
def write(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, slot_map: None) -> None:
    _kernels().store_rows(key, k_cache, slots)
    _kernels().store_rows(value, v_cache, slots)


@declare.lse_merge(
    name="package.merge",
    convention=Convention(source="planted_kernels", lse_layout=LseLayout.TOKEN_HEAD),
    precision=FLOAT64,
    supports=Supports(dtypes=("fp32",), head_dims=(32,), parts=(2,), features=frozenset({"empty"})),
)
def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    merger = _kernels().Merger(floor=-1e30)
    result: tuple[Tensor, Tensor] = merger.merge(outs[0], lses[0], outs[1], lses[1])
    return result


@declare.varlen_extend(
    name="package.extend",
    convention=ATTENTION,
    precision=FLOAT64,
    supports=Supports(
        dtypes=("fp32",),
        head_dims=(32,),
        num_kv_heads=(1, 2),
        group_sizes=(1, 2),
        features=frozenset({"window", "chunked"}),
    ),
)
def extend(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, kv_indptr: Tensor, *, window: int, **_: Any) -> Tensor:
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    rows, keys = q_indptr.tolist(), kv_indptr.tolist()
    starts = [(r, s - r, k0, k1 - k0) for r, s, k0, k1 in zip(rows, rows[1:], keys, keys[1:], strict=False)]
    _kernels().attend_into(out, q, k, v, starts, window)
    return out


@declare.paged_decode(name="package.decode", convention=ATTENTION, precision=FLOAT64, supports=ATTENDS)
def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor, slots: Tensor, **_: Any) -> Tensor:
    out = torch.empty_like(q)
    _kernels().attend_last(out, q, k_cache, v_cache, kv_indptr, slots)
    return out
