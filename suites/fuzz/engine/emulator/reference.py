"""Attention in float64, one query at a time: the reference of the kernel tests, kept apart from the oracle."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """What a kernel is asked for. `window`: keys that a query sees, itself included; 0 for all of them."""

    scale: float
    causal: bool = True
    window: int = 0
    cap: float = 0.0
    sinks: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, position: int, rules: Rules) -> tuple[Tensor, Tensor]:
    """Output [H, D_v] and log-sum-exp [H] (natural, without sink) of one query [H, D] over keys [L, H_kv, D].

    `position`: of the query among the keys. No visible key: 0 and -inf.
    """
    heads, groups = q.shape[0], q.shape[0] // k.shape[1]
    out = torch.zeros(heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((heads,), -math.inf, dtype=torch.float64)
    low = max(0, position - rules.window + 1) if rules.window else 0
    high = min(len(k), position + 1) if rules.causal else len(k)
    for head in range(heads if high > low else 0):
        keys, values = k[low:high, head // groups].double(), v[low:high, head // groups].double()
        logits = keys @ q[head].double() * rules.scale
        if rules.cap:
            logits = rules.cap * torch.tanh(logits / rules.cap)
        lse[head] = torch.logsumexp(logits, 0)
        total = lse[head] if rules.sinks is None else torch.logaddexp(lse[head], rules.sinks[head].double())
        out[head] = torch.exp(logits - total) @ values
    return out, lse


def batch(
    q: Tensor, keys: list[Tensor], values: list[Tensor], lengths: list[int], rules: Rules
) -> tuple[Tensor, Tensor]:
    """`attend` for a ragged batch: q [sum of lengths, H, D], the last `lengths[i]` positions of request i."""
    outs, row = [], 0
    for k, v, count in zip(keys, values, lengths, strict=True):
        for i in range(count):
            outs.append(attend(q[row], k, v, len(k) - count + i, rules))
            row += 1
    return torch.stack([out for out, _ in outs]), torch.stack([lse for _, lse in outs])
