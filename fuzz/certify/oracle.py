"""The oracle against references that share no code with it, and come with a plain installation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import logsumexp, softmax
from torch import Tensor

from fuzz.certify.problems import Example, examples
from fuzz.certify.trial import Check, Trial, judge
from oracle import philox
from oracle.attention import Solution, solve
from oracle.bits import bits
from oracle.fp8 import FORMATS, Fp8Format, decode
from oracle.kinds import KVLayout, Role, VLayout
from oracle.layout import CacheGeometry, pack, unpack
from oracle.merge import merge_states
from oracle.problem import Problem
from oracle.rounding import round_to

Tensors = Mapping[str, Tensor]
TOLERANCE = 1e-13
"""Relative to the largest value: some hundred float64 roundings, where sums have a few dozen terms."""


def certify_oracle() -> list[Check]:
    """Check mathematics, formats, layouts and the generator of values."""
    found = [judge(f"scipy: {e.name}", "oracle", partial(_against, e, _by_scipy, "scipy")) for e in examples()]
    found += [
        judge(f"torch sdpa: {e.name}", "oracle", partial(_against, e, _by_sdpa, "float64 SDPA"))
        for e in examples()
        if e.problem.soft_cap is None
    ]
    found.append(judge("split and merge", "oracle", _split_and_merge))
    found += [judge(f"fp8 codes: {fmt.name}", "oracle", partial(_codes, fmt)) for fmt in FORMATS]
    for dtype in (torch.bfloat16, torch.float16):
        found.append(judge(f"rounding: {short(dtype)}", "oracle", partial(_midpoints, dtype)))
    found += [judge(f"layout: {name}", "oracle", partial(_layout, name)) for name in _ELEMENT]
    found.append(judge("philox", "oracle", _philox))
    return found


def short(dtype: torch.dtype) -> str:
    """The name of a dtype without its module's."""
    return str(dtype).removeprefix("torch.")


def solutions_differ(got: Solution, want: Solution) -> str | None:
    """How two solutions differ by more than ``TOLERANCE``, or None. LSE is compared where it is finite."""
    for name, a, b in (("out", got.out, want.out), ("lse", got.lse, want.lse)):
        a, b = a.cpu(), b.cpu()
        same = (a == b) | (a.isnan() & b.isnan())
        error = (a - b).abs().masked_fill(same, 0.0).amax()
        unit = b.masked_fill(~b.isfinite(), 0.0).abs().amax().clamp(min=1.0)
        if not bool(error <= TOLERANCE * unit):
            return f"{name} differs by {float(error):.2g}"
    return None


def _against(example: Example, reference: Callable[[Problem], Solution], name: str) -> Trial[Problem]:
    want = reference(example.problem)

    def fault(problem: Problem) -> str | None:
        # Small blocks, so that a few keys already are several of them.
        small = solutions_differ(solve(problem, block_q=4, block_k=3, block_heads=1), want)
        return small or solutions_differ(solve(problem), want)

    return Trial(fault, {f"what {name} gives": example.problem}, example.misread)


def _requests(problem: Problem) -> list[tuple[slice, slice, np.ndarray]]:
    """Rows, keys and visibility [queries, keys] of each request, from the definition alone."""
    found = []
    q_start = k_start = 0
    for q_len, kv_len in zip(problem.q_lens, problem.kv_lens, strict=True):
        position = np.arange(kv_len - q_len, kv_len)[:, None]
        key = np.arange(kv_len)[None, :]
        visible = key <= position if problem.causal else np.ones((q_len, kv_len), dtype=bool)
        if problem.window is not None:
            visible = visible & (key > position - problem.window)
        found.append((slice(q_start, q_start + q_len), slice(k_start, k_start + kv_len), visible))
        q_start, k_start = q_start + q_len, k_start + kv_len
    return found


def _by_scipy(problem: Problem) -> Solution:
    q, k, v = (x.numpy() for x in (problem.q, problem.k, problem.v))
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.zeros(q.shape[:2])
    for rows, keys, visible in _requests(problem):
        for head in range(problem.q_heads):
            logits = problem.scale * q[rows, head] @ k[keys, head // problem.group].T
            if problem.soft_cap is not None:
                logits = problem.soft_cap * np.tanh(logits / problem.soft_cap)
            logits = np.where(visible, logits, -np.inf)
            lse[rows, head] = logsumexp(logits, axis=1)
            if problem.sinks is not None:
                sink = np.full((len(logits), 1), float(problem.sinks[head]))
                logits = np.concatenate([logits, sink], axis=1)
            weights = softmax(logits, axis=1)[:, : visible.shape[1]]
            out[rows, head] = weights @ v[keys, head // problem.group]
    return Solution(torch.from_numpy(out), torch.from_numpy(lse))


def _by_sdpa(problem: Problem) -> Solution:
    """torch's own attention. It returns no LSE: a second call whose sink is 0 and whose values are 1 shows it.

    With a sink logit of 0 and v = 1, out = S / (S + 1) where S is the sum of the exponentials.
    """
    out = _sdpa(problem, problem.v, problem.sinks)
    zero = torch.zeros(problem.q_heads, dtype=torch.float64)
    shift = _row_maxima(problem)
    share = _sdpa(problem, torch.ones_like(problem.v), zero, shift)[..., 0]
    return Solution(out, torch.log(share / (1 - share)) + shift)


def _row_maxima(problem: Problem) -> Tensor:
    """Largest visible logit of each row [Tq, Hq]: a sink there leaves S / (S + 1) far from 1."""
    top = torch.empty(problem.q.shape[:2], dtype=torch.float64)
    for rows, keys, visible in _requests(problem):
        k = problem.k[keys].repeat_interleave(problem.group, 1)
        logits = problem.scale * torch.einsum("qhd,khd->qhk", problem.q[rows], k)
        top[rows] = logits.masked_fill(~torch.from_numpy(visible)[:, None], -torch.inf).amax(-1)
    return top


def _sdpa(problem: Problem, v: Tensor, sinks: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """Attention with a sink as one more key, of zeros, with the sink's logit as its bias and a value of zeros."""
    out = torch.empty(*problem.q.shape[:2], v.shape[2], dtype=torch.float64)
    for rows, keys, visible in _requests(problem):
        q = problem.q[rows].transpose(0, 1)
        k, x = (t[keys].repeat_interleave(problem.group, 1).transpose(0, 1) for t in (problem.k, v))
        bias = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~torch.from_numpy(visible), -torch.inf)
        bias = bias.expand(problem.q_heads, -1, -1)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, q.shape[1], 1)
            if shift is not None:
                sink = sink + shift[rows].T.unsqueeze(-1)
            k, x, bias = F.pad(k, (0, 0, 0, 1)), F.pad(x, (0, 0, 0, 1)), torch.cat([bias, sink], -1)
        result = F.scaled_dot_product_attention(q[None], k[None], x[None], attn_mask=bias[None], scale=problem.scale)
        out[rows] = result[0].transpose(0, 1)
    return out


def _split_and_merge() -> Trial[Solution]:
    problem = next(e.problem for e in examples() if e.name == "chunked causal")
    whole = solve(problem)
    part = torch.arange(problem.k.shape[0]) % 3
    states = [solve(problem.subset(part == i)) for i in range(3)]

    def merged(states: list[Solution], unit: float = 1.0) -> Solution:
        outs, lses = torch.stack([s.out for s in states]), torch.stack([s.lse * unit for s in states])
        out, lse = merge_states(outs, lses)
        return Solution(out, lse / unit)

    return Trial(
        partial(solutions_differ, want=whole),
        {"three splits": merged(states)},
        {"a missing split": merged(states[:2]), "base-2 LSE read as natural": merged(states, unit=1 / np.log(2.0))},
    )


def _codes(fmt: Fp8Format) -> Trial[Tensor]:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    ours = decode(codes, fmt)

    def fault(other: Tensor) -> str | None:
        return bits_differ(ours, other)

    others = {f"{f.name}'s": codes.view(f.dtype).double() for f in FORMATS if f is not fmt}
    return Trial(fault, {"torch's 256 values": codes.view(fmt.dtype).double()}, others)


def bits_differ(got: Tensor, want: Tensor) -> str | None:
    """How many elements differ in value or in the sign of a zero, or None; any NaN is like any other."""
    got, want = got.cpu(), want.cpu()
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    wrong = bits(got) != bits(want)
    if got.is_floating_point():
        wrong &= ~(got.double().isnan() & want.double().isnan())
    count = int(wrong.sum())
    return f"{count} of {got.numel()} values differ" if count else None


def tensors_differ(got: Tensors, want: Tensors) -> str | None:
    """The first difference between tensors of the same names, or None."""
    faults = ((name, bits_differ(got[name], tensor)) for name, tensor in want.items())
    return next((f"{name}: {fault}" for name, fault in faults if fault is not None), None)


@dataclass(frozen=True)
class _Rounded:
    """What became of the points just below, at, and just above each midpoint of neighbouring values."""

    below: Tensor
    at: Tensor
    above: Tensor


def _midpoints(dtype: torch.dtype) -> Trial[_Rounded]:
    """Every pair of finite neighbours: the codes themselves say what is nearest and which one is even."""
    largest = int(bits(torch.tensor(torch.finfo(dtype).max, dtype=dtype)))
    codes = torch.arange(largest, dtype=torch.int16)
    low, high = (c.view(dtype).double() for c in (codes, codes + 1))
    middle = (low + high) / 2
    infinity = torch.full_like(middle, torch.inf)
    points = (middle.nextafter(-infinity), middle, middle.nextafter(infinity))

    def fault(got: _Rounded) -> str | None:
        wanted = (codes, codes + (codes & 1), codes + 1)
        pairs = zip((got.below, got.at, got.above), wanted, strict=True)
        faults = [bits_differ(bits(x), want) for x, want in pairs]
        return next((f for f in faults if f is not None), None)

    def rounded(through: Callable[[Tensor], Tensor]) -> _Rounded:
        return _Rounded(*(through(x) for x in points))

    away = {
        "two roundings": rounded(lambda x: x.float().to(dtype)),
        "ties away from zero": replace(rounded(partial(round_to, dtype=dtype)), at=round_to(points[2], dtype)),
    }
    return Trial(fault, {"every midpoint and its neighbours": rounded(partial(round_to, dtype=dtype))}, away)


# Where element [slot, head, dim] lies, written again from the layouts' descriptions: page, row, head, dim, x.
_ELEMENT: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, ...]]] = {
    "nhd": lambda b, o, h, d, x: (b, o, h, d),
    "hnd": lambda b, o, h, d, x: (b, h, o, d),
    "shuffle_5d keys": lambda b, o, h, d, x: (b, h, d // x, o, d % x),
    "shuffle_5d values, 5d": lambda b, o, h, d, x: (b, h, o // x, d, o % x),
    "shuffle_5d values, 4d": lambda b, o, h, d, x: (b, h, d, o),
}


def _layout(name: str) -> Trial[Tensor]:
    layout, _, role = name.partition(" ")
    geometry = CacheGeometry(
        layout=KVLayout(layout),
        role=Role.V if "values" in role else Role.K,
        num_blocks=3,
        heads=2,
        page_size=16,
        dim=24,
        dtype=torch.int16,
        v_layout=VLayout.V4D if role.endswith("4d") else VLayout.V5D,
    )
    shape = (geometry.num_slots, geometry.heads, geometry.dim)
    linear = torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.int16).view(shape)
    slot, head, dim = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    where = _ELEMENT[name](slot // 16, slot % 16, head, dim, 8)

    def fault(cache: Tensor) -> str | None:
        return bits_differ(cache[where], linear) or bits_differ(unpack(cache, geometry), linear)

    packed = pack(linear, geometry)
    wrong = {"rows shifted by one": pack(linear.roll(1, 0), geometry), "heads swapped": pack(linear.flip(1), geometry)}
    return Trial(fault, {"the packed cache": packed}, wrong)


# Random123's known answer for a counter and a key of zeros, and a digest of our values.
_PHILOX = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
_NORMAL = "d02dbdc363852c24224320531b704895ab7d502aecf0c13cbf974fda79d5bb06"


def _philox() -> Trial[tuple[Tensor, Tensor]]:
    def fault(answer: tuple[Tensor, Tensor]) -> str | None:
        words, values = answer
        if tuple(words.tolist()) != _PHILOX:
            return f"first block is {' '.join(f'{word:08x}' for word in words.tolist())}"
        digest = hashlib.sha256(bits(values).numpy().tobytes()).hexdigest()
        return None if digest == _NORMAL else f"normal values have digest {digest}"

    words, values = philox.raw(0, 0, 4), philox.normal(1, 2, 1 << 12)
    flipped = values.clone()
    bits(flipped)[7] ^= 1
    return Trial(
        fault,
        {"the published block and the committed values": (words, values)},
        {"another seed's block": (philox.raw(1, 0, 4), values), "a value off by one bit": (words, flipped)},
    )
