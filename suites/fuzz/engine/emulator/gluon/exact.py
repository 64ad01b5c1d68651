"""Attention of one query token in float64, and what rounding may add: the reference of production kernels' tests."""

import torch
from torch import Tensor

# Half a unit in the last place of 1, and half the least positive number.
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4, torch.float8_e4m3fnuz: 2.0**-4}
LEAST = {torch.float16: 2.0**-25, torch.bfloat16: 0.0, torch.float8_e4m3fn: 2.0**-10, torch.float8_e4m3fnuz: 2.0**-11}


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output [Hq, D] and natural log-sum-exp [Hq], sink excluded, of q [Hq, D] over visible k, v [n, Hkv, D].

    Without a visible key the output is zero and the log-sum-exp minus infinity.
    """
    group = q.shape[0] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("hd,nhd->hn", q.double(), keys) * scale
    lse = torch.logsumexp(logits, 1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double())
    weights = torch.exp(logits - total[:, None]).nan_to_num(0.0)
    return torch.einsum("hn,nhd->hd", weights, values), lse


def window_of(position: int, window: int | None) -> slice:
    """Keys that a causal query at `position` sees: the last `window` ones, itself included (None: all)."""
    end = max(0, position + 1)
    return slice(0 if window is None else max(0, end - window), end)


def allowance(v: Tensor, weights: torch.dtype, out: torch.dtype) -> float:
    """A bound on the error of an output: weights rounded to `weights` twice (themselves, and their scale), each of
    them at most 1 against a sum of at least 1, and the output rounded to `out`; float32 sums are far below that.
    """
    largest = float(v.double().abs().amax()) if v.numel() else 0.0
    return largest * (3 * UNIT[weights] + len(v) * LEAST[weights] + UNIT[out] + 2.0**-16) + 1e-6
