"""The merge of sglang's FlashInfer backend: of the new tokens' own state with that of their prefix.

Both states come from FlashInfer, whose log-sum-exps are in base 2, and FlashInfer's own kernel merges them. It has a
thread for every few elements of all heads of a token: where these are too many for one block, the backend takes
another kernel. FlashInfer's does not run here; a target is that backend's function where it does not take it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import Tensor

from fuzz.engine.loader import KernelLoader
from oracle import Convention, Supports, declare
from oracle.convention import LseLayout
from oracle.kinds import Engine, LseBase
from suites.targets import sglang_dcp_backend, sglang_merge_state, sglang_wheel

FILES = ("srt/layers/attention/flashinfer_backend.py",)

CONVENTION = Convention(
    source="flashinfer/include/flashinfer/attention/cascade.cuh, MergeStateKernel: exp2 and log2 of the log-sum-exps "
    "[T, H], as its attention kernels give them",
    lse_base=LseBase.TWO,
    lse_layout=LseLayout.TOKEN_HEAD,
)
PRECISION = replace(
    sglang_merge_state.PRECISION, source="what the backend asks of either kernel: float32 weights, the states' dtype"
)
SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    head_dims=(64,),
    v_head_dims=(128,),
    # One block of FlashInfer's kernel takes 128 heads of 64 and 64 heads of 128 elements.
    num_kv_heads=(132,),
    parts=(2,),
)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a decorator that logs calls."""
    return function


@KernelLoader
def _module() -> ModuleType:
    given: dict[str, dict[str, Any]] = {
        "sglang.srt.utils": {"is_flashinfer_available": lambda: True},
        "sglang.srt.environ": {"envs": sglang_dcp_backend.environment(SGLANG_ENABLE_TORCH_COMPILE=False)},
        "flashinfer": {},
    }
    for name in ("sglang.kernel_api_logging", "sglang.kernels.kernel_api_logging"):
        given[name] = {"debug_kernel_api": _as_it_is}
    for name in ("sglang.srt.layers.attention.triton_ops", "sglang.kernels.ops.attention"):
        given[f"{name}.merge_state"] = vars(sglang_merge_state.kernels())
    return sglang_wheel.load(FILES, given)


def _unavailable(engine: Engine) -> str | None:
    return sglang_wheel.missing(FILES, engine) or sglang_wheel.missing(sglang_merge_state.FILES, engine)


@declare.lse_merge(
    name="sglang.merge_state.flashinfer",
    convention=CONVENTION,
    precision=PRECISION,
    supports=SUPPORTS,
    unavailable=_unavailable,
)
def safe_merge_state(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Two states into one, with more heads than a block of FlashInfer's kernel has room for."""
    out, lse = _module()._safe_merge_state(outs[0], lses[0], outs[1], lses[1])
    return out, lse
