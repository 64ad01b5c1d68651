"""One decode step of sglang's Triton backend over several ranks: index lists, attention and the merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.facade import MI300X
from oracle import Precision, Supports, declare
from oracle.convention import Descales, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine
from oracle.precision import RankOwnership
from suites.targets import ranks, sglang_attention, sglang_dcp_backend, sglang_dcp_modules, sglang_wheel
from suites.targets.sglang_dcp_backend import Mode, Step, widened_table
from suites.targets.source_trees import other_arch

STEP = (
    ("1714-1757", "c09161c77e4586064c0d70c5dda4f943378510a4facb187590ac31e17b0e6e73"),
    ("2422-2472", "2e095cfafcd30ad0e720fd1ecd70c92f1a83f47a86a28da0ab739ab5717100aa"),
)
"""The part of ``forward_decode`` for several ranks, by version."""

CONVENTION = replace(
    sglang_attention.CONVENTION,
    index_dtypes=("int32",),
    source="sglang/srt/layers/attention/triton_backend.py, forward_decode: what the model asks of a step, ranks or not",
)


def _step(
    count: int,
    run: ranks.Run,
    mode: Mode,
    lean: bool,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    *,
    window: int | None,
    **options: Any,
) -> Tensor:
    """All ranks' share of the heads, put together: [Tq, H, D_v]. The drafts to verify are a request's last keys."""
    lengths = kv_indptr.diff()
    if not len(lengths):
        return torch.empty(0, q.shape[1], v_cache.shape[2], dtype=q.dtype, device=q.device)
    new = k = v = None
    prefixes = lengths
    if mode is Mode.VERIFY:
        queries = len(q) // len(lengths)
        prefixes = lengths - queries
        new = torch.cat([own[-queries:] for own in slots.split(lengths.tolist())])
        k, v = k_cache[new], v_cache[new]
    step = Step(
        count=count,
        mode=mode,
        q=q,
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        lengths=prefixes,
        query_lens=torch.full_like(lengths, len(q) // len(lengths)),
        table=widened_table(lengths, slots, count),
        radius=-1 if window is None else window,
        options=options,
        lean=lean,
    )
    return sglang_dcp_backend.run(step, run)


SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    kv_dtypes=("e4m3fn",),
    head_dims=(64, 80),
    page_sizes=(1, 16),
    num_kv_heads=(1, 3),
    group_sizes=(4, 2),
    max_query_len=1,
    features=frozenset({"sinks", "soft_cap"}),
)
LATENT = replace(
    SUPPORTS,
    dtypes=("bf16",),
    kv_dtypes=(),
    head_dims=(576,),
    v_head_dims=(512,),
    page_sizes=(16,),
    num_kv_heads=(1,),
    group_sizes=(12,),
    features=frozenset(),
)
"""Latent attention (MLA): one key head of 512 dims and 64 of position, whose first 512 are its values."""


def over_ranks(
    count: int,
    name: str,
    supports: Supports,
    run: ranks.Run = ranks.stepped,
    *,
    mode: Mode = Mode.DECODE,
    lean: bool = False,
    **convention: Any,
) -> Callable[..., Tensor]:
    """The target for ``count`` ranks; ``convention``: where it differs from the usual one."""
    usual = CONVENTION if supports.kv_dtypes else replace(CONVENTION, descales=Descales())

    @declare.paged_decode(
        name=f"sglang.dcp.decode.{name}",
        convention=replace(usual, **convention),
        precision=sglang_attention.with_fp8(_precision(count, supports), *supports.kv_dtypes),
        supports=supports,
        unavailable=_lean_unavailable if lean else sglang_dcp_backend.missing,
        engines=tuple(Engine) if run is ranks.stepped else (Engine.EMULATOR,),
    )
    def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor, slots: Tensor, **options: Any) -> Tensor:
        return _step(count, run, mode, lean, q, k_cache, v_cache, kv_indptr, slots, **options)

    return decode


def _lean_unavailable(engine: Engine) -> str | None:
    if not sglang_dcp_modules.later():
        return "the work-centric (lean) decode kernel came after sglang 0.5.16"
    return other_arch(MI300X, engine) or sglang_dcp_backend.missing(engine)


def _precision(count: int, supports: Supports) -> Precision:
    """Partial outputs of a rank are float32, and so are their weighting and their sum."""
    usual = sglang_attention.PLAIN if supports.group_sizes == (1,) else sglang_attention.GROUPED
    return replace(
        usual,
        source=f"{usual.source}; forward_decode: each rank's output and log-sum-exp in float32",
        cited=usual.cited + sglang_wheel.cited(sglang_dcp_backend.FILES * 2, *STEP),
        ranks=count,
        rank_ownership=RankOwnership.CYCLIC,
    )


# A step costs as many attention kernels as there are ranks: these two are tried with everything, other numbers of ranks
# and real processes in tests.
two_ranks = over_ranks(2, "2_ranks", SUPPORTS)
three_ranks_latent = over_ranks(3, "3_ranks_latent", LATENT)

FEW = Supports(
    dtypes=("bf16",), head_dims=(64,), page_sizes=(16,), num_kv_heads=(1,), group_sizes=(4,), max_query_len=1
)
"""For steps that come out wrong whatever they are asked."""

NO_SINKS = SinkUnits.UNSUPPORTED
window = over_ranks(
    2,
    "window.2_ranks",
    replace(FEW, features=frozenset({"window"})),
    sink=NO_SINKS,
    window=Window(meaning=WindowMeaning.LEFT, off=(-1,)),
)
verify = over_ranks(2, "verify.2_ranks", replace(FEW, max_query_len=4), mode=Mode.VERIFY, sink=NO_SINKS)
lean = over_ranks(2, "lean.2_ranks", replace(FEW, archs=("gfx942",)), lean=True, sink=NO_SINKS)
