"""aiter's ragged prefill, `mha_batch_prefill_func`: its own code, and its contract over our kernels.

aiter's own is compiled C++ (Composable Kernel). **Never executed by us.** What callers rely on (argument order,
defaults, the window as a pair, when scales count, bf16 for fp8) is tested over the portable kernels, which the backend
targets run where there is no aiter.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuzz.engine import loader
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine
from suites.targets.portable import aiter
from suites.targets.portable.attention import kernels as kernels  # the compile gate looks for it here
from suites.targets.portable.targets import PRECISION as PORTABLE

CONVENTION = Convention(
    source="aiter/ops/mha.py: mha_batch_prefill_func, 3D linear K and V (page_size=1), -1 means infinite window",
    index_dtypes=("int32",),
    window=Window(meaning=WindowMeaning.LEFT_RIGHT, off=(-1,)),
    sink=SinkUnits.NATURAL,
    soft_cap=True,
    default_scale=DefaultScale.RSQRT_HEAD_DIM,
)
PRECISION = Precision(source="aiter/ops/mha.py names no arithmetic: the loosest honest assumption")
SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    head_dims=(64, 128),
    page_sizes=(1,),
    num_kv_heads=(1, 2),
    group_sizes=(1, 4),
    features=frozenset({"window", "sinks", "soft_cap", "custom_scale", "non_causal", "chunked"}),
    # A caller's comment in sglang's aiter_backend.py: keys are read 128 at a time, past the end of the list.
    requires_finite_pool=True,
)


def missing(engine: Engine) -> str | None:
    """Why aiter's own prefill cannot be called here, in one line, or None."""
    if engine is not Engine.HIP:
        return "compiled C++ that only an AMD GPU runs"
    if importlib.util.find_spec("aiter") is None:
        return "no aiter: it comes with ROCm images, or is built from its source"
    return None


def _run(
    function: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    sinks: Tensor | None,
    soft_cap: float | None,
    **_: None,
) -> Tensor:
    longest = [max((p[1:] - p[:-1]).tolist(), default=0) for p in (q_indptr, kv_indptr)]
    return function(
        q,
        k,
        v,
        q_indptr,
        kv_indptr,
        torch.arange(k.shape[0], dtype=torch.int32, device=k.device),
        *longest,
        softmax_scale=scale,
        logits_soft_cap=soft_cap or 0.0,
        causal=causal,
        window_size=window,
        sink_ptr=sinks,
    )


@declare.varlen_extend(
    name="aiter.mha_batch_prefill_func",
    convention=CONVENTION,
    precision=PRECISION,
    supports=SUPPORTS,
    engines=(Engine.HIP,),
    unavailable=missing,
    runs=("aiter mha_batch_prefill_func",),
)
def prefill(*tensors: Tensor, **options: Any) -> Tensor:
    """aiter's own."""
    import aiter as theirs

    return _run(theirs.mha_batch_prefill_func, *tensors, **options)


@declare.varlen_extend(
    name="portable.aiter.mha_batch_prefill_func",
    convention=CONVENTION,
    precision=PORTABLE,
    supports=replace(SUPPORTS, requires_finite_pool=False),
    unavailable=loader.missing_compiler,
    runs=("portable mha_batch_prefill_func",),
)
def contract(*tensors: Tensor, **options: Any) -> Tensor:
    """Its contract over our kernels."""
    return _run(aiter.mha_batch_prefill_func, *tensors, **options)
