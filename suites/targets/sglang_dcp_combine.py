"""What a rank of sglang's decode context parallel makes of the states that an all-to-all brought.

An output lies with its log-sum-exp behind it, as one message: the kernel is given views of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle import Supports, declare
from oracle.convention import LseLayout
from oracle.kinds import Engine
from suites.targets import sglang_dcp_comm, sglang_dcp_modules

WORDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2}
"""Elements in the place of one float32 log-sum-exp."""


def received(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The views [N, T, H, D] and [N, T, H] of messages, as ``dcp_a2a_lse_reduce`` takes them."""
    words = WORDS[outs.dtype]
    messages = torch.empty(*outs.shape[:-1], outs.shape[-1] + words, dtype=outs.dtype, device=outs.device)
    messages[..., :-words] = outs
    sizes = messages.view(torch.float32)[..., -1]
    sizes.copy_(lses)
    return messages[..., :-words], sizes


def _unavailable(engine: Engine) -> str | None:
    return sglang_dcp_modules.missing(engine, "dcp_a2a_lse_reduce")


def _target(name: str, supports: Supports, packed: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    @declare.lse_merge(
        name=f"sglang.dcp.combine.{name}",
        convention=replace(sglang_dcp_comm.NATURAL, lse_layout=LseLayout.TOKEN_HEAD),
        precision=sglang_dcp_comm.COMBINED,
        supports=supports,
        unavailable=_unavailable,
    )
    def target(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        states = received(outs, lses) if packed else (outs, lses)
        out, lse = sglang_dcp_modules.kernels().dcp_lse_combine_triton(*states, return_lse=True)
        return out, lse

    return target


whole = _target("whole", sglang_dcp_comm.MERGES, packed=False)
"""Tensors of their own."""

packed = _target("packed", replace(sglang_dcp_comm.OVER_GLOO, features=frozenset()), packed=True)
"""Views of the messages."""
