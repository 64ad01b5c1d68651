"""Small problems of many families for the budget's tests, rebuilt from a seed by one version of torch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracle.problem import Problem
from suites.oracle.budget.kernels import DTYPES

FAMILIES = (
    "normal",
    "near_uniform",
    "duplicates",
    "huge_logits",
    "needle",
    "zero_values",
    "constant_values",
    "values_follow_logits",
    "deep_negative",
    "rising",
    "falling",
    "two_levels",
    "wide_values",
    "latent",
)


def picker(gen: torch.Generator) -> Callable[..., Any]:
    """A function that returns one of its arguments, all equally likely."""

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=gen))]

    return pick


def operands(
    family: str, t: int, n: int, heads: int, kv_heads: int, d: int, e: int, gen: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """q [t, heads, d], k [n, kv_heads, d], v [n, kv_heads, e] in float32."""
    q, k, v = (torch.randn(*shape, generator=gen) for shape in ((t, heads, d), (n, kv_heads, d), (n, kv_heads, e)))
    slope = torch.linspace(-1, 1, n).view(n, 1, 1) if n else torch.zeros(0, 1, 1)
    match family:
        case "near_uniform":
            q, v = q * 3e-4, 1 + 0.01 * v
        case "duplicates" if n > 3:
            k = k[: n // 3 + 1].repeat(3, 1, 1)[:n]
        case "huge_logits":
            q = q * 60
        case "needle" if n:
            k[n // 2] = q[:, 0].mean(0) * 8
        case "zero_values":
            v = torch.zeros_like(v)
        case "constant_values":
            v = torch.full_like(v, 1.7)
        case "values_follow_logits":
            k, v = k.abs(), k.abs().mean(-1, keepdim=True) * v.sign()
        case "deep_negative":
            q, k = q.abs() + 0.5, -(k.abs() + 0.5) * 40 / math.sqrt(d)
        case "rising":
            q, k = q.abs(), k * 0.05 + 4 * slope
        case "falling":
            q, k = q.abs(), k * 0.05 - 4 * slope
        case "two_levels":
            k = torch.where(torch.rand(n, kv_heads, 1, generator=gen) < 0.5, 0.0, -16.0).expand_as(k).clone()
            q, v = q.abs().round().clamp(min=1), v.sign()
        case "latent":
            # As in latent attention (MLA): the values are part of the keys.
            v = k[..., :e].clone()
        case "wide_values":
            v = v * torch.exp2(torch.randint(-14, 10, v.shape, generator=gen).float())
    return q, k, v


def problem(seed: int, *, largest: int = 160) -> tuple[Problem, str, str]:
    """Problem number `seed`, the dtype name of its query and its family."""
    gen = torch.Generator().manual_seed(seed)
    pick = picker(gen)
    family = FAMILIES[seed % len(FAMILIES)]
    dtype = pick("bf16", "bf16", "fp16", "fp32")
    kv_heads, group, d, e = pick(1, 2), pick(1, 3), pick(16, 24, 64), pick(8, 16)
    n = pick(1, 2, 7, 15, 16, 17, 33, 64, 100, largest)
    t = pick(1, 1, 3, 5)
    q_lens, kv_lens = ((t,), (n,)) if pick(True, True, False) else ((t, 2), (n, 5))
    total_q, total_k = sum(q_lens), sum(kv_lens)
    q, k, v = operands(family, total_q, total_k, kv_heads * group, kv_heads, d, e, gen)
    kv_dtype = pick(dtype, dtype, dtype, "e4m3fn")
    if kv_dtype == "e4m3fn":
        k, v = k.clamp(-448, 448), v.clamp(-448, 448)
    if dtype == "fp16":
        k, v = k.clamp(-6e4, 6e4), v.clamp(-6e4, 6e4)
    per_head = torch.rand(1, kv_heads, generator=gen) + 0.5
    per_token = torch.rand(total_k, kv_heads, generator=gen) + 0.5
    has_descales = kv_dtype == "e4m3fn"
    return (
        Problem(
            q=q.to(DTYPES[dtype]),
            k=k.to(DTYPES[kv_dtype]),
            v=v.to(DTYPES[kv_dtype]),
            q_lens=q_lens,
            kv_lens=kv_lens,
            scale=pick(1 / math.sqrt(d), 0.1, 1.0 / d),
            causal=pick(True, False),
            window=pick(None, None, 1, 13, 40),
            sinks=torch.randn(kv_heads * group, generator=gen) * pick(1, 6) if pick(True, False) else None,
            soft_cap=pick(None, None, 30.0, 2.0),
            q_descale=0.75 if has_descales else None,
            k_descale=pick(0.5, per_head, per_token) if has_descales else None,
            v_descale=pick(2.0, per_head, per_token) if has_descales else None,
        ),
        dtype,
        family,
    )
