"""sglang's merge of two partial attention states."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from fuzz.engine.loader import KernelLoader
from oracle import Convention, Precision, Supports, declare
from oracle.convention import LseLayout
from oracle.kinds import Engine
from suites.targets import sglang_wheel

FILES = ("srt/layers/attention/triton_ops/merge_state.py", "kernels/ops/attention/merge_state.py")

HASH = "bfd9c3d356b97939e4c19c4cc0446daeb45f0b9aece86c6460ea44ae400f7182"
"""Of the file, which is the same in every version read."""


@KernelLoader
def _kernels() -> ModuleType:
    return sglang_wheel.load(FILES, {})


def _unavailable(engine: Engine) -> str | None:
    return sglang_wheel.missing(FILES, engine)


@declare.lse_merge(
    name="sglang.merge_state",
    convention=Convention(
        source="merge_state.py: natural log-sum-exps [T, H]; +inf, given by some kernels, reads as -inf",
        lse_layout=LseLayout.TOKEN_HEAD,
    ),
    precision=Precision(
        source="merge_state_kernel: float32 weights; the output has the states' dtype",
        cited=sglang_wheel.cited(FILES, ("9-63", HASH), ("9-63", HASH)),
    ),
    supports=Supports(
        dtypes=("fp32", "bf16", "fp16"),
        head_dims=(64,),
        v_head_dims=(128, 80, 16),
        num_kv_heads=(1, 2, 8),
        parts=(2,),
        features=frozenset({"empty"}),
    ),
    unavailable=_unavailable,
)
def merge_state(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Two states into one."""
    out, lse = _kernels().merge_state_triton(outs[0], lses[0], outs[1], lses[1])
    return out, lse
