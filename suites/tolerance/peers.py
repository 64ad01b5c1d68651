"""How the projects that write these kernels judge them, as data: their rules applied to the same outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from oracle.attention import Solution
from oracle.rounding import round_to, widen
from suites.tolerance.kernel import Operands, Result


@dataclass(frozen=True)
class Fixed:
    """abs(actual - expected) <= atol + rtol * abs(expected), but for a share of the elements. of: out or lse."""

    name: str
    rtol: float
    atol: float
    source: str
    share: float = 0.0
    of: str = "out"

    def rejects(self, result: Result, truth: Solution, baseline: float) -> bool:
        actual, expected = (result.out, truth.out) if self.of == "out" else (result.lse, truth.lse)
        actual = widen(actual)
        # Equal infinities are close: torch.isclose says so too.
        close = (actual == expected) | ((actual - expected).abs() <= self.atol + self.rtol * expected.abs())
        return float((~close).double().mean()) > self.share


@dataclass(frozen=True)
class TwiceTheBaseline:
    """The largest error at most `factor` times that of the same attention in the input dtype, plus `atol`."""

    name: str
    factor: float
    atol: float
    source: str

    def rejects(self, result: Result, truth: Solution, baseline: float) -> bool:
        return not largest_error(widen(result.out), truth) <= self.factor * baseline + self.atol


Rule = Fixed | TwiceTheBaseline

PEERS: tuple[Rule, ...] = (
    Fixed("aiter", 1e-2, 1e-2, "aiter/test_common.py, checkAllclose: tol_err_ratio 0.05", share=0.05),
    Fixed("vLLM", 1e-2, 1.5e-2, "tests/kernels/test_triton_unified_attention.py"),
    Fixed("FlashInfer", 1e-2, 1e-2, "tests of batch decode and prefill in bf16"),
    TwiceTheBaseline("FlashAttention 2x", 2.0, 1e-5, "tests/test_flash_attn.py"),
    Fixed("FlashInfer lse", 1e-3, 1e-3, "tests of the returned log-sum-exp", of="lse"),
)


def largest_error(actual: Tensor, truth: Solution) -> float:
    """NaN if something is NaN: no comparison with it holds."""
    return float((actual - truth.out).abs().max())


def baseline_error(requests: list[Operands], dtype: str, truth: Solution) -> float:
    """The largest error of attention in plain operations whose results are in `dtype`; the softmax in float32."""
    return largest_error(torch.cat([_plain(x, dtype) for x in requests]), truth)


def _plain(x: Operands, dtype: str) -> Tensor:
    """float64 [T, H, D_v] of one request; every row must see a key."""

    def rounded(t: Tensor) -> Tensor:
        return widen(round_to(t.double(), DTYPES[dtype])).float()

    k, v = (
        rounded(t * scale.view(-1, 1, 1)).repeat_interleave(x.group, 0)
        for t, scale in ((x.k, x.k_scale), (x.v, x.v_scale))
    )
    s = rounded(rounded(x.q * x.scale) @ k.transpose(1, 2))
    if x.soft_cap is not None:
        s = rounded(torch.tanh(s / x.soft_cap) * x.soft_cap)
    s = s.masked_fill(~x.visible, -torch.inf)
    if x.sinks is not None:
        s = torch.cat([s, x.sinks.view(-1, 1, 1).expand(-1, s.shape[1], 1)], -1)
    p = rounded(torch.softmax(s, -1)[..., : x.columns])
    # What nobody sees counts with weight 0, whatever it holds.
    v = v.masked_fill(~x.visible.any(1).unsqueeze(-1), 0.0)
    return rounded(p @ v).double().transpose(0, 1)
