"""Merging partial attention states: splits of the keys, prefix and new part, ranks.

A state is (out, lse): the normalised output over some keys and the log of their summed weight, sink
excluded. The empty state is (0, -inf) and is the identity; sinks enter once, after the last merge.
"""

import math

import torch
from torch import Tensor

from oracle.kinds import LseBase


def merge_states(outs: Tensor, lses: Tensor, base: LseBase = LseBase.NATURAL) -> tuple[Tensor, Tensor]:
    """Merge N partial states into one, in float64: out [..., H, D], lse [..., H] in the base given.

    outs [N, ..., H, D] and lses [N, ..., H] are any floating dtypes. A state with lse = -inf contributes
    nothing, whatever its output holds, NaN included. No state with weight gives (0, -inf). lse = +inf or
    NaN makes the row NaN. Raises ValueError if the shapes do not belong together.
    """
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"lses: allowed is {list(outs.shape[:-1])}, outs without its last axis; got {list(lses.shape)}"
        )
    if not outs.shape[0]:
        raise ValueError("outs: allowed is at least one state, got 0")
    lses = lses.double()
    exp, log = (torch.exp2, torch.log2) if base is LseBase.TWO else (torch.exp, torch.log)
    top = lses.amax(0)
    shift = top.masked_fill(~top.isfinite(), 0.0)
    weights = exp(lses - shift)
    total = weights.sum(0)
    share = (weights / total).masked_fill_(lses == -math.inf, 0.0)
    parts = outs.double().masked_fill((lses == -math.inf).unsqueeze(-1), 0.0)
    return (parts * share.unsqueeze(-1)).sum(0), log(total) + shift


def apply_sink(out: Tensor, lse: Tensor, sinks: Tensor, base: LseBase = LseBase.NATURAL) -> Tensor:
    """Output [..., H, D] once the sinks [H], logits in natural units, are in the denominator. lse [..., H]
    excludes them.

    out * exp(lse) / (exp(lse) + exp(sink)), written as a sigmoid so that neither exponential overflows.
    """
    natural = lse.double() * math.log(2.0) if base is LseBase.TWO else lse.double()
    return out.double() * torch.sigmoid(natural - sinks.to(natural)).unsqueeze(-1)
