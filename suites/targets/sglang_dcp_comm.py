"""The merge paths of sglang's decode context parallel communication, each over all of its ranks.

Every rank holds a partial attention output [B, H, D] and its log-sum-exps [B, H]; afterwards it has the merged output
of its own share of the heads. One rank merges nothing: it gets its input back, and is no case here. The functions are
sglang's; the group that they speak to is ours (``ranks``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.loader import KernelLoader
from oracle import Convention, Precision, Supports, declare
from oracle.kinds import Engine, LseBase
from suites.targets import ranks, sglang_dcp, sglang_wheel

FILES = ("srt/layers/dcp/comm.py",)
_KERNEL_MODULES = ("sglang.srt.layers.dcp.kernels", "sglang.kernels.ops.attention.dcp_kernels")
_SYMMETRIC_MEMORY = "sglang.srt.distributed.device_communicators.pynccl_allocator"

BASE_TWO = Convention(source="docstring of cp_lse_ag_out_rs_mla: base-2 log-sum-exps [B, H]", lse_base=LseBase.TWO)
NATURAL = Convention(source="docstrings of cp_lse_ag_out_rs_mha and dcp_a2a_lse_reduce: natural log-sum-exps [B, H]")
MERGES = Supports(
    dtypes=("bf16", "fp16", "fp32"),
    head_dims=(64,),
    v_head_dims=(128, 512),
    num_kv_heads=(8, 12),
    parts=(2, 4, 8, 3, 5, 6, 7),
    features=frozenset({"empty"}),
)
OVER_GLOO = replace(MERGES, parts=(2, 3, 4))
CLEANS_UP = frozenset({"empty", "empty_nan"})
"""cp_lse_ag_out_rs_mha replaces NaN in partial outputs; the other paths are given finite ones by their callers."""
IN_FLOAT32 = Precision(source="comm.py: partial outputs are weighted and added up in float32")
IN_OWN_DTYPE = {
    dtype: Precision(
        source="comm.py of 0.5.23, cp_lse_ag_out_rs_mha: partial outputs are weighted in place and added up in their "
        "own dtype; 0.5.15 does both in float32",
        rank_dtype=dtype,
        reduce_dtype=dtype,
    )
    for dtype in MERGES.dtypes
}


@KernelLoader
def _comm() -> ModuleType:
    kernels = vars(sglang_wheel.load(sglang_dcp.FILES, {}))
    given: dict[str, dict[str, Any]] = dict.fromkeys(_KERNEL_MODULES, kernels)
    given[_SYMMETRIC_MEMORY] = {"use_symmetric_memory": lambda group: nullcontext()}
    given["sglang.srt.utils"] = {"is_hip": lambda: False, "is_cuda": lambda: True}
    return sglang_wheel.load(FILES, given)


def _unavailable(function: str, engine: Engine) -> str | None:
    return sglang_wheel.missing(FILES, engine) or sglang_wheel.lacks(FILES, function)


def _shared_among(ranks_: int, x: Tensor) -> Tensor:
    """[N, T, H, ...] with a number of heads that the ranks can share: rows and heads are regrouped, the last repeated.

    A merge knows no neighbours, so that any arrangement of the same rows asks the same question.
    """
    if x.shape[2] % ranks_ == 0:
        return x
    flat = x.flatten(1, 2)
    short = -flat.shape[1] % ranks_
    flat = torch.cat([flat, flat[:, -1:].expand(-1, short, *flat.shape[2:])], 1)
    return flat.unflatten(1, (-1, ranks_))


def _merged(run: Callable[[list[ranks.Rank]], list[Tensor]], merge: Any, outs: Tensor, lses: Tensor) -> Tensor:
    """The whole output, put together from what each rank has of it: [T, H, D]."""
    count, rows, heads, dim = outs.shape
    if rows == 0:
        return torch.empty(0, heads, dim, dtype=outs.dtype, device=outs.device)
    shared, shared_lses = _shared_among(count, outs), _shared_among(count, lses)
    work = [partial(_rank, merge, shared[rank], shared_lses[rank]) for rank in range(count)]
    whole = torch.cat(run(work), 1).flatten(0, 1)
    return whole[: rows * heads].unflatten(0, (rows, heads)).contiguous()


def _rank(merge: Any, out: Tensor, lse: Tensor, group: ranks.Group) -> Tensor:
    # Copies: what a rank makes of its own partial output is its own affair.
    result: Tensor = merge(out.clone(), lse.clone(), group)
    return result


def _reduce_scatter(out: Tensor, lse: Tensor, group: ranks.Group) -> Any:
    # [H, B, D]: the caller, forward_mla.py, turns it.
    return _comm().cp_lse_ag_out_rs_mla(out, lse, group).transpose(0, 1)


def _all_reduce(out: Tensor, lse: Tensor, group: ranks.Group) -> Any:
    return _comm().cp_lse_ag_out_rs_mha(out, lse, group)


def _all_to_all(out: Tensor, lse: Tensor, group: ranks.Group) -> Any:
    return _comm().dcp_a2a_lse_reduce(out, lse, group)


@declare.lse_merge(
    name="sglang.dcp.comm.reduce_scatter",
    convention=BASE_TWO,
    precision=IN_FLOAT32,
    supports=MERGES,
    unavailable=partial(_unavailable, "cp_lse_ag_out_rs_mla"),
)
def reduce_scatter(outs: Tensor, lses: Tensor) -> Tensor:
    """Log-sum-exps gathered, outputs corrected by a kernel, then added up and scattered."""
    return _merged(ranks.stepped, _reduce_scatter, outs, lses)


@declare.lse_merge(
    name="sglang.dcp.comm.reduce_scatter.gloo",
    convention=BASE_TWO,
    precision=IN_FLOAT32,
    supports=OVER_GLOO,
    engines=(Engine.EMULATOR,),
    unavailable=partial(_unavailable, "cp_lse_ag_out_rs_mla"),
)
def reduce_scatter_over_gloo(outs: Tensor, lses: Tensor) -> Tensor:
    """The same in processes of their own, over gloo."""
    return _merged(ranks.over_gloo, _reduce_scatter, outs, lses)


@declare.lse_merge(
    name="sglang.dcp.comm.all_reduce",
    convention=NATURAL,
    precision=IN_OWN_DTYPE,
    supports=replace(MERGES, features=CLEANS_UP),
    unavailable=partial(_unavailable, "cp_lse_ag_out_rs_mha"),
)
def all_reduce(outs: Tensor, lses: Tensor) -> Tensor:
    """Log-sum-exps gathered, outputs corrected by torch, then added up; each rank keeps its heads."""
    return _merged(ranks.stepped, _all_reduce, outs, lses)


@declare.lse_merge(
    name="sglang.dcp.comm.all_reduce.gloo",
    convention=NATURAL,
    precision=IN_OWN_DTYPE,
    supports=OVER_GLOO,
    engines=(Engine.EMULATOR,),
    unavailable=partial(_unavailable, "cp_lse_ag_out_rs_mha"),
)
def all_reduce_over_gloo(outs: Tensor, lses: Tensor) -> Tensor:
    """The same in processes of their own, over gloo."""
    return _merged(ranks.over_gloo, _all_reduce, outs, lses)


@declare.lse_merge(
    name="sglang.dcp.comm.all_to_all",
    convention=NATURAL,
    precision=IN_FLOAT32,
    supports=MERGES,
    unavailable=partial(_unavailable, "dcp_a2a_lse_reduce"),
)
def all_to_all(outs: Tensor, lses: Tensor) -> Tensor:
    """Outputs and log-sum-exps packed and exchanged, then combined by a kernel."""
    return _merged(ranks.stepped, _all_to_all, outs, lses)


@declare.lse_merge(
    name="sglang.dcp.comm.all_to_all.gloo",
    convention=NATURAL,
    precision=IN_FLOAT32,
    supports=OVER_GLOO,
    engines=(Engine.EMULATOR,),
    unavailable=partial(_unavailable, "dcp_a2a_lse_reduce"),
)
def all_to_all_over_gloo(outs: Tensor, lses: Tensor) -> Tensor:
    """The same in processes of their own, over gloo."""
    return _merged(ranks.over_gloo, _all_to_all, outs, lses)
