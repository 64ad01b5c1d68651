"""sglang's merge of two partial attention states."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
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
def kernels() -> ModuleType:
    return sglang_wheel.load(FILES, {})


def _unavailable(engine: Engine) -> str | None:
    return sglang_wheel.missing(FILES, engine)


CONVENTION = Convention(
    source="merge_state.py: natural log-sum-exps [T, H]; +inf, given by some kernels, reads as -inf",
    lse_layout=LseLayout.TOKEN_HEAD,
)
PRECISION = Precision(
    source="merge_state_kernel: float32 weights; the output has the states' dtype",
    cited=sglang_wheel.cited(FILES, ("9-63", HASH), ("9-63", HASH)),
)
SUPPORTS = Supports(
    dtypes=("fp32", "bf16", "fp16"),
    head_dims=(64,),
    v_head_dims=(128, 80, 16),
    num_kv_heads=(1, 2, 8),
    parts=(2,),
    features=frozenset({"empty"}),
)
MANY = replace(SUPPORTS, parts=(3, 2, 4, 5, 8))


def repeated(dtype: str, levels: int) -> Precision:
    """Of so many merges in a row, each of which takes the result of the one before, in ``dtype``."""
    return replace(
        PRECISION,
        source=f"{PRECISION.source}, which is the next merge's input: each error as often as there are merges",
        exp_error=levels * PRECISION.exp_error,
        exp_argument_roundings=levels * PRECISION.exp_argument_roundings,
        log_error=levels * PRECISION.log_error,
        rank_dtype=dtype,
        reduce_dtype=dtype,
    )


REPEATED = {dtype: repeated(dtype, max(MANY.parts) - 1) for dtype in SUPPORTS.dtypes}


@declare.lse_merge(
    name="sglang.merge_state",
    convention=CONVENTION,
    precision=PRECISION,
    supports=SUPPORTS,
    unavailable=_unavailable,
)
def merge_state(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Two states into one."""
    return _merge_two((outs[0], lses[0]), (outs[1], lses[1]))


@declare.lse_merge(
    name="sglang.merge_state.chain",
    convention=CONVENTION,
    precision=REPEATED,
    supports=MANY,
    unavailable=_unavailable,
)
def merge_state_chain(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The first two states into one, then that with the next."""
    return reduce(_merge_two, zip(outs, lses, strict=True))


@declare.lse_merge(
    name="sglang.merge_state.tree",
    convention=CONVENTION,
    precision=REPEATED,
    supports=MANY,
    unavailable=_unavailable,
)
def merge_state_tree(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours first, then their results."""
    states = list(zip(outs, lses, strict=True))
    while len(states) > 1:
        pairs = [_merge_two(a, b) for a, b in zip(states[::2], states[1::2], strict=False)]
        states = pairs + (states[-1:] if len(states) % 2 else [])
    return states[0]


def _merge_two(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = kernels().merge_state_triton(*a, *b)
    return out, lse
