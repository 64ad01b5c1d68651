"""The merge paths of sglang's decode context parallel communication, each over all of its ranks.

Every rank holds a partial attention output [B, H, D] and its log-sum-exps [B, H]; afterwards it has the merged output
of its own share of the heads. One rank merges nothing: it gets its input back, and is no case here. The functions are
sglang's; the group that they speak to is ours (``ranks``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fuzz.versions import installed
from oracle import Convention, Precision, Supports, declare
from oracle.kinds import Engine, LseBase
from oracle.precision import Citation
from suites.targets import ranks, sglang_dcp, sglang_dcp_modules, sglang_wheel

_comm = sglang_dcp_modules.comm
_kernels = sglang_dcp_modules.kernels

NATURAL = Convention(source="docstrings of cp_lse_ag_out_rs_mha and dcp_a2a_lse_reduce: natural log-sum-exps [B, H]")
BASE_TWO = replace(
    NATURAL,
    source="docstrings of cp_lse_ag_out_rs_mla and dcp_a2a_lse_reduce: base-2 log-sum-exps [B, H]",
    lse_base=LseBase.TWO,
)
MERGES = Supports(
    dtypes=("bf16", "fp16", "fp32"),
    head_dims=(64,),
    v_head_dims=(128, 512),
    num_kv_heads=(8, 12),
    parts=(2, 4, 8, 3, 5, 6, 7),
    features=frozenset({"empty"}),
)
"""512 is the width of the values of latent attention (MLA), of which every head has the same."""

OVER_GLOO = replace(MERGES, dtypes=("bf16",), v_head_dims=(), num_kv_heads=(8,), parts=(2, 3, 4))
"""A case costs as many processes as there are ranks."""

CLEANS_UP = frozenset({"empty", "empty_nan"})
"""cp_lse_ag_out_rs_mha replaces NaN in partial outputs; the other paths are given finite ones by their callers."""

_HASHES = (
    "663810ba2ae401d5002ac5e4f83474f90ad1ead2a19a69c1b85a65d9e69d7d99",
    "5829d14f32c1cc35b81ab48042245c58385d15ded54ba50f8f01a87e54de521b",
)
_KERNELS_HASH = "d5f7e41a50db03899a2d4e573670f4c5c99ba9806e88429c6c8dfba924193e19"


def _cited(*lines: str) -> tuple[Citation, ...]:
    """Lines of comm.py in 0.5.15 and in 0.5.23; or in the latter alone."""
    versions = tuple(zip(lines, _HASHES[-len(lines) :], strict=True))
    return sglang_wheel.cited(sglang_dcp_modules.COMM * len(lines), *versions)


CORRECTED = replace(
    sglang_dcp.IN_FLOAT32,
    source=f"{sglang_dcp.IN_FLOAT32.source}; cp_lse_ag_out_rs_mla: float32 sums, then the outputs' own dtype",
    cited=_cited("104-132", "85-123") + sglang_dcp.IN_FLOAT32.cited,
)
COMBINED = Precision(
    source="_dcp_lse_combine_kernel: partial outputs are weighted and added up in float32",
    cited=_cited("474-537") + sglang_wheel.cited(sglang_dcp_modules.KERNELS[1:], ("436-480, 534-673", _KERNELS_HASH)),
)
REDUCED = Precision(
    source="cp_lse_ag_out_rs_mha: partial outputs are weighted and added up in float32", cited=_cited("75-101", "56-82")
)
REDUCED_LATER = {
    dtype: replace(
        REDUCED,
        source="cp_lse_ag_out_rs_mha: partial outputs are weighted in place and added up in their own dtype",
        rank_dtype=dtype,
        reduce_dtype=dtype,
    )
    for dtype in MERGES.dtypes
}
ALL_REDUCED = REDUCED_LATER if sglang_dcp_modules.later() else REDUCED
"""Versions up to 0.5.16 weight out of place, in float32."""


Merge = Callable[[Tensor, Tensor, ranks.Group], Tensor]
"""What one rank does with its output and log-sum-exps."""


def _unavailable(function: str, engine: Engine) -> str | None:
    return sglang_dcp_modules.missing(engine, function)


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


def merged(run: ranks.Run, merge: Merge, outs: Tensor, lses: Tensor) -> Tensor:
    """The whole output, put together from what each rank has of it: [T, H, D]."""
    count, rows, heads, dim = outs.shape
    if rows == 0:
        return torch.empty(0, heads, dim, dtype=outs.dtype, device=outs.device)
    whole = shares(run, merge, _shared_among(count, outs), _shared_among(count, lses)).flatten(0, 1)
    return whole[: rows * heads].unflatten(0, (rows, heads)).contiguous()


def shares(run: ranks.Run, merge: Merge, outs: Tensor, lses: Tensor) -> Tensor:
    """What the ranks give, one behind the other: [T, H, D], if they share H evenly."""
    work: list[ranks.Rank] = [partial(_rank, merge, out, lse) for out, lse in zip(outs, lses, strict=True)]
    return torch.cat(run(work), 1)


def _rank(merge: Merge, out: Tensor, lse: Tensor, group: ranks.Group) -> Tensor:
    # Copies: what a rank makes of its own partial output is its own affair.
    return merge(out.clone(), lse.clone(), group)


def _reduce_scatter(natural: bool, out: Tensor, lse: Tensor, group: ranks.Group) -> Tensor:
    options = {"is_lse_base_on_e": True} if natural else {}
    merged: Tensor = _comm().cp_lse_ag_out_rs_mla(out, lse, group, **options)
    # [H, B, D] if there was anything to merge: the caller, forward_mla.py, turns it.
    return merged if group.world_size == 1 else merged.transpose(0, 1)


def _all_reduce(out: Tensor, lse: Tensor, group: ranks.Group) -> Tensor:
    merged: Tensor = _comm().cp_lse_ag_out_rs_mha(out, lse, group)
    return merged


def _all_to_all(natural: bool, out: Tensor, lse: Tensor, group: ranks.Group) -> Tensor:
    merged: Tensor = _comm().dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=natural)
    return merged


def _natural_unavailable(engine: Engine) -> str | None:
    if (reason := _unavailable("cp_lse_ag_out_rs_mla", engine)) is not None or sglang_dcp_modules.later():
        return reason
    return f"cp_lse_ag_out_rs_mla of sglang {installed('sglang')} knows base-2 log-sum-exps alone"


def _target(
    path: str,
    merge: Merge,
    convention: Convention,
    precision: Precision | dict[str, Precision],
    unavailable: Callable[[Engine], str | None],
    *,
    features: frozenset[str] = MERGES.features,
    run: ranks.Run = ranks.stepped,
) -> Callable[..., Tensor]:
    """The path with all ranks in this process, or each in a process of its own over gloo."""
    here = run is ranks.stepped

    @declare.lse_merge(
        name=f"sglang.dcp.comm.{path}",
        convention=convention,
        precision=precision,
        supports=replace(MERGES if here else OVER_GLOO, features=features),
        engines=tuple(Engine) if here else (Engine.EMULATOR,),
        unavailable=unavailable,
    )
    def target(outs: Tensor, lses: Tensor) -> Tensor:
        return merged(run, merge, outs, lses)

    return target


# Log-sum-exps gathered, outputs corrected by a kernel, then added up and scattered.
_CORRECTING = (partial(_reduce_scatter, False), BASE_TWO, CORRECTED, partial(_unavailable, "cp_lse_ag_out_rs_mla"))
reduce_scatter = _target("reduce_scatter", *_CORRECTING)
reduce_scatter_over_gloo = _target("reduce_scatter.gloo", *_CORRECTING, run=ranks.over_gloo)
natural_reduce_scatter = _target(
    "reduce_scatter_natural", partial(_reduce_scatter, True), NATURAL, CORRECTED, _natural_unavailable
)

# Log-sum-exps gathered, outputs corrected by torch, then added up; each rank keeps its heads.
_REDUCING = (_all_reduce, NATURAL, ALL_REDUCED, partial(_unavailable, "cp_lse_ag_out_rs_mha"))
all_reduce = _target("all_reduce", *_REDUCING, features=CLEANS_UP)
all_reduce_over_gloo = _target("all_reduce.gloo", *_REDUCING, features=CLEANS_UP, run=ranks.over_gloo)

# Outputs and log-sum-exps packed and exchanged, then combined by a kernel.
_COMBINING = (partial(_all_to_all, True), NATURAL, COMBINED, partial(_unavailable, "dcp_a2a_lse_reduce"))
all_to_all = _target("all_to_all", *_COMBINING)
all_to_all_over_gloo = _target("all_to_all.gloo", *_COMBINING, run=ranks.over_gloo)
base_two_all_to_all = _target("all_to_all_base_2", partial(_all_to_all, False), BASE_TWO, COMBINED, _COMBINING[-1])

PATHS: dict[Callable[..., Tensor], Merge] = {
    reduce_scatter: partial(_reduce_scatter, False),
    natural_reduce_scatter: partial(_reduce_scatter, True),
    all_reduce: _all_reduce,
    all_to_all: partial(_all_to_all, True),
    base_two_all_to_all: partial(_all_to_all, False),
}
"""What one rank does, by target: to be run by other groups than the target's own."""
