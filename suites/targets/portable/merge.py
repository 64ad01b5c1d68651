"""The portable kernels' merge of splits, alone: any states become one."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle import Convention, Precision, Supports, declare
from oracle.convention import LseLayout
from suites.targets.portable.attention import kernels, tile_of

SUPPORTS = Supports(
    dtypes=("fp32",),
    head_dims=(64,),
    v_head_dims=(128, 48),
    num_kv_heads=(1, 3, 8),
    parts=(2, 1, 3, 4, 5, 8, 16),
    features=frozenset({"empty"}),
)


@declare.lse_merge(
    name="portable.merge",
    convention=Convention(
        source="suites/targets/portable/kernels.py, combine: largest logits and sums of weights of each split",
        lse_layout=LseLayout.TOKEN_HEAD,
    ),
    precision=Precision(source="suites/targets/portable/kernels.py, combine: float32 throughout"),
    supports=SUPPORTS,
)
def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """A state counts as a split whose largest logit is its log-sum-exp, and whose weights add up to one, or to none."""
    splits, rows, heads, dim = outs.shape
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=outs.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=outs.device)
    tops = lses.permute(1, 2, 0).contiguous()
    none = torch.full((heads,), -torch.inf, dtype=torch.float32, device=outs.device)
    kernels().combine[(rows, heads)](
        tops,
        (tops > -torch.inf).float(),
        outs.permute(1, 2, 0, 3).contiguous(),
        none,
        out,
        lse,
        *out.stride()[:2],
        splits,
        heads,
        DV=dim,
        BLOCK_S=1 << (splits - 1).bit_length(),
        BLOCK_DV=tile_of(dim),
    )
    return out, lse
