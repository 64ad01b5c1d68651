"""The second stage of sglang's Triton decode as a merge: the splits of a request's keys become its output.

A split is a state. The kernel knows an empty one by its place behind the last key, and never reads it: here every
split has keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oracle import Convention, declare
from suites.targets import sglang_attention, sglang_merge_state, sglang_wheel

CONVENTION = Convention(source="decode_attention.py, _fwd_kernel_stage2: natural log-sum-exps of the splits")
PRECISION = replace(
    sglang_merge_state.PRECISION,
    source="_fwd_kernel_stage2: float32 throughout, one running sum over the splits",
    cited=sglang_wheel.cited(
        sglang_attention.DECODE,
        ("667-738", "4ecf5d81f06fcc8aa36479541ff3857a1416e2d8def2c5fa818808148febaa75"),
        ("935-1018", "7a3b66ce3daabbb027efd860411cd9abe4b399b1f2cfc3ed5c6c01731eb9fa0a"),
    ),
)
SUPPORTS = replace(
    sglang_merge_state.SUPPORTS, dtypes=("fp32",), parts=(2, 1, 3, 4, 5, 8, 16), features=frozenset[str]()
)


@declare.lse_merge(
    name="sglang.merge_splits",
    convention=CONVENTION,
    precision=PRECISION,
    supports=SUPPORTS,
    unavailable=sglang_attention.no_decode,
)
def merge_splits(outs: Tensor, lses: Tensor) -> Tensor:
    """One request a row, whose keys just fill all splits."""
    splits, rows, heads, dim = outs.shape
    kernels = sglang_attention.decode_kernels()
    partial = outs.permute(1, 2, 0, 3).contiguous()
    sizes = lses.permute(1, 2, 0).contiguous()
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=outs.device)
    ends = torch.arange(rows + 1, dtype=torch.int32, device=outs.device) * (splits * kernels._MIN_BLOCK_KV)
    counts = torch.full((rows,), splits, dtype=torch.int32, device=outs.device)
    if rows:
        kernels._decode_softmax_reducev_fwd(partial, sizes, out, out, 1.0, out, ends, counts, splits)
    return out
