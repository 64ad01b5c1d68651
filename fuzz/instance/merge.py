"""Partial attention states to merge, and the calls that come before."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fuzz.buffers import Poison
from fuzz.case import Case, States
from fuzz.instance.model import Instance
from fuzz.instance.operands import operand
from fuzz.probes import Stream, values
from oracle import philox

LSE_SPREAD = 4.0
"""Log-sum-exps are normal values times this: weights from almost nothing to almost all."""


def build_merge(case: Case, poison: Poison, device: str) -> Instance:
    """``outs`` [N, T, H, D] in the case's dtype, ``lses`` [N, T, H] float32 in the base that the target uses.

    An empty state has a log-sum-exp of -inf and an output, finite or NaN, that must not matter.
    """
    rows, heads = sum(case.context_lens), case.num_kv_heads
    outs = values(case, Stream.V, (case.parts, rows, heads, case.v_head_dim), case.dtype)
    lses = philox.normal(case.seed, Stream.K, (case.parts, rows, heads)) * LSE_SPREAD
    empty = _empty(case, lses.shape)
    lses = lses.masked_fill(empty, -torch.inf)
    if case.states is States.EMPTY_NAN:
        outs = outs.masked_fill(empty.unsqueeze(-1), torch.nan)
    buffers = {
        "outs": operand("outs", outs, case, poison, device),
        "lses": operand("lses", lses, replace(case, strided=False), poison, device),
    }
    return Instance(case, device, buffers)


def _empty(case: Case, shape: torch.Size) -> Tensor:
    if case.states is States.FULL:
        return torch.zeros(shape, dtype=torch.bool)
    some = philox.uniform_int(case.seed, Stream.SKIP, tuple(shape), 0, 3) == 0
    if case.states is not States.ALL_EMPTY:
        # Whole rows without any key are a class of their own.
        some[0] &= ~some.all(0)
        return some
    whole = philox.uniform_int(case.seed, Stream.HOLES, tuple(shape[1:]), 0, 2) == 0
    return some | whole


def earlier_cases(case: Case) -> list[Case]:
    """The calls that come before: other rows, heads, dims and dtypes, and another number of states."""
    found = []
    for call in range(case.earlier_calls):
        picks = philox.uniform_int(case.seed, Stream.EARLIER + call, (5,), 0, 4).tolist()
        dtype = ("fp32", "bf16", "fp16", "fp32")[picks[4]]
        found.append(
            replace(
                case,
                earlier_calls=0,
                states=States.FULL,
                context_lens=(1 + picks[0],),
                num_kv_heads=(1, 2, 4, 8)[picks[1]],
                v_head_dim=(16, 32, 64, 128)[picks[2]],
                parts=(1, 2, 4, 8)[picks[3]],
                dtype=dtype,
                kv_dtype=dtype,
            )
        )
    return found
