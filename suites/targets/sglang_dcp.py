"""sglang's kernels for decode context parallel: index lists and the correction of partial outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle import Convention, Precision, Supports, declare
from oracle.convention import LseLayout
from oracle.kinds import Engine, IndexTask, KVLayout, LseBase
from oracle.precision import EXACT_COPY
from suites.targets import sglang_dcp_modules, sglang_wheel

FILES = sglang_dcp_modules.KERNELS
_kernels = sglang_dcp_modules.kernels

INDICES = Convention(
    source="sglang/srt/layers/dcp/planner.py and triton_backend.py: int32 lists, slots widened by the number of ranks",
    index_dtypes=("int32",),
    kv_layout=KVLayout.LINEAR,
)
RANKS = (1, 2, 4, 8, 3, 5)
LISTS = Supports(
    dtypes=("bf16",), head_dims=(64,), num_kv_heads=(1,), group_sizes=(1,), page_sizes=(1, 16, 64), parts=RANKS
)

MERGE = Convention(
    source="docstring of correct_attn_out: base-2 log-sum-exps [N, B, H]; NaN and +inf read as -inf",
    lse_base=LseBase.TWO,
    lse_layout=LseLayout.TOKEN_HEAD,
)
MERGES = Supports(
    dtypes=("fp32", "bf16", "fp16"),
    head_dims=(64,),
    v_head_dims=(128, 16),
    num_kv_heads=(1, 2, 8),
    parts=RANKS,
    features=frozenset({"empty"}),
)
IN_FLOAT32 = Precision(
    source="_correct_attn_cp_out_kernel: float32 throughout; outputs are written in their own dtype",
    cited=sglang_wheel.cited(
        FILES,
        ("154-258", "aa1c025225f55923e8a2effaa9da51444f4d3408d3f546d38ee8c22e1a25fad3"),
        ("238-343", "d5f7e41a50db03899a2d4e573670f4c5c99ba9806e88429c6c8dfba924193e19"),
    ),
)


def _unavailable(engine: Engine) -> str | None:
    return sglang_wheel.missing(FILES, engine)


@declare.index_build(
    name="sglang.dcp.kv_indices",
    task=IndexTask.RANK_SLOTS,
    convention=INDICES,
    precision=EXACT_COPY,
    supports=LISTS,
    unavailable=_unavailable,
    runs=("sglang create_triton_kv_indices_for_dcp_triton",),
)
def kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    local_lens: Tensor,
    indptr: Tensor,
    starts: Tensor | None,
    *,
    parts: int,
    rank: int,
    total: int,
) -> Tensor:
    """One rank's rows, from the table of widened slots."""
    out = torch.empty(total, dtype=torch.int32, device=req_to_token.device)
    _kernels().create_triton_kv_indices_for_dcp_triton[(len(local_lens),)](
        req_to_token, req_pool_indices, local_lens, indptr, starts, out, req_to_token.stride(0), parts, rank
    )
    return out


@declare.index_build(
    name="sglang.dcp.gathered_indices",
    task=IndexTask.GATHERED,
    convention=INDICES,
    precision=EXACT_COPY,
    supports=LISTS,
    unavailable=_unavailable,
    runs=("sglang create_dcp_kv_indices",),
)
def gathered_indices(
    indptr: Tensor,
    query_lens: Tensor,
    query_starts: Tensor,
    prefix_lens: Tensor,
    prefix_starts: Tensor,
    *,
    parts: int,
    total: int,
) -> Tensor:
    """Where prefix and new tokens lie in the buffer gathered from all ranks."""
    out = torch.empty(total, dtype=torch.int32, device=indptr.device)
    _kernels().create_dcp_kv_indices[(len(query_lens),)](
        indptr, query_lens, query_starts, prefix_lens, prefix_starts, out, int(prefix_lens.sum()), parts
    )
    return out


BLOCK = 512


@declare.index_build(
    name="sglang.dcp.local_indices",
    task=IndexTask.LOCAL,
    convention=INDICES,
    precision=EXACT_COPY,
    supports=LISTS,
    unavailable=_unavailable,
    runs=("sglang update_kv_lens_and_indices",),
)
def local_indices(
    lens: Tensor,
    kv_starts: Tensor,
    slots: Tensor,
    local_lens: Tensor,
    local_starts: Tensor,
    *,
    parts: int,
    rank: int,
    total: int,
) -> Tensor:
    """One rank's share of a flat list of widened slots. Later versions list them as they are: callers collapse them."""
    out = torch.empty(total, dtype=torch.int32, device=slots.device)
    blocks = -(-int(local_lens.max()) // BLOCK) if len(lens) else 0
    _kernels().update_kv_lens_and_indices[(len(lens), blocks)](
        lens, kv_starts, slots, local_lens, local_starts, out, rank, parts, BLOCK
    )
    return out // parts if sglang_dcp_modules.later() else out


_context: Any = None


def forget() -> None:
    global _context
    _context = None


def _corrected(outs: Tensor, lses: Tensor, context: Any) -> tuple[Tensor, Tensor]:
    """Correct each rank's output and add them up, as the reduce-scatter does, in float32."""
    ranks, rows, heads, dim = outs.shape
    total = torch.zeros(heads, rows, dim, dtype=torch.float32, device=outs.device)
    lse = lses[0]
    for rank in range(ranks):
        corrected = torch.empty(heads, rows, dim, dtype=torch.float32, device=outs.device)
        corrected, lse = _kernels().correct_attn_out(outs[rank], lses, rank, context, corrected)
        total += corrected
    return total.transpose(0, 1).contiguous(), lse.contiguous()


@declare.lse_merge(
    name="sglang.dcp.correct_attn_out",
    convention=MERGE,
    precision=IN_FLOAT32,
    supports=MERGES,
    unavailable=_unavailable,
    runs=("sglang correct_attn_out",),
)
def correct_attn_out(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The ranks' outputs corrected and summed, each call with a context of its own."""
    return _corrected(outs, lses, None)


@declare.lse_merge(
    name="sglang.dcp.correct_attn_out.shared_context",
    convention=MERGE,
    precision=IN_FLOAT32,
    supports=replace(MERGES, parts=(1, 2, 4, 8), features=frozenset({"empty", "stateful"})),
    unavailable=_unavailable,
    runs=("sglang correct_attn_out with a CPTritonContext",),
    reset=forget,
)
def correct_attn_out_shared(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The same with one context object for every call, as sglang's communication layer keeps it."""
    global _context
    if _context is None:
        _context = _kernels().CPTritonContext()
    return _corrected(outs, lses, _context)
