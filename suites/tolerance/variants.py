"""Correct float32 attention kernels of every legitimate arithmetic, fast at long contexts, on any device.

Logits do not depend on the order of keys, so they are formed at once; the online softmax then goes over tiles
in one batched step each, and only the chain of rescaled accumulators runs tile by tile. Written apart from the
oracle. Every choice is a field of `Choices`, and `Choices.precision` allows exactly what was chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from oracle import philox
from oracle.fp8 import FORMATS as FP8
from oracle.precision import Accumulation, KeyOrder, MatrixUnit, Precision, RankOwnership, Rounding
from oracle.problem import Descale, Problem
from oracle.rounding import round_to, widen

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16} | {f.name: f.dtype for f in FP8}
ULP = 2.0**-23
_LOG2E = math.log2(math.e)
_ROW_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits of one block of queries: a dozen float32 tensors of that many elements are held."""
_TILE_VALUES = 1 << 22
"""Elements of the tile products that are held at a time."""


@dataclass(frozen=True)
class Unit:
    """How a product is accumulated, and the model that allows it. fused: `block` products truncated (or floored)
    together `fraction` bits below the largest, then `kept` bits of the sum."""

    model: MatrixUnit
    block: int = 0
    fraction: int = 0
    kept: int = 0
    floor: bool = False


def _fused(block: int, fraction: int, kept: int, *, floor: bool = False) -> Unit:
    # CDNA3 rounds the sum to nearest, the others toward zero.
    unit = 2.0**-kept if floor else 2.0 ** (1 - kept)
    model = MatrixUnit(
        accumulation=Accumulation.FUSED,
        block=block,
        fraction_bits=fraction,
        unit_roundoff=unit,
        toward_zero=not floor,
    )
    return Unit(model, block, fraction, kept, floor)


UNITS = {
    "blas": Unit(MatrixUnit()),
    "chain": Unit(MatrixUnit(), block=1),
    "block": Unit(MatrixUnit(accumulation=Accumulation.BLOCK, block=16), block=16),
    "hopper": _fused(16, 25, 24),
    "ampere": _fused(8, 24, 24),
    "cdna3": _fused(8, 24, 24, floor=True),
    "hopper_fp8": _fused(32, 13, 14),
}
"""Parameters of matrix units as in microsoft/MMA-Sim (arXiv 2511.10909). Those of Hopper are what we measured on an
H200 (`suites.tolerance.matrix_units`); the others were never compared with hardware by us."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a correct kernel may decide. Splits and ranks own uneven shares, drawn from `seed`."""

    tile: int = 64
    order: str = "ascending"
    base_two: bool = False
    scale_query: bool = False
    fused_argument: bool = False
    """The scale is applied in the exponential's argument, fma(s, scale, -(m * scale)), where that can be."""
    reciprocal: bool = False
    unit: str = "blas"
    q_cast: str | None = None
    qk_product: str | None = None
    logit_dtype: str = "fp32"
    exp_noise: str = "none"
    p_dtype: str | None = None
    p_scale: float = 1.0
    p_truncated: bool = False
    sum_rounded: bool = False
    splits: int = 1
    partial_dtype: str = "fp32"
    merge: str = "maximum"
    ranks: int = 1
    cyclic: bool = False
    rank_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    sink: str = "merge"
    flush: bool = False
    out_dtype: str = "bf16"
    out_truncated: bool = False
    sigmoid_tanh: bool = False
    seed: int = 0

    def precision(self) -> Precision:
        """What this kernel rounds, and nothing else."""
        toward = {True: Rounding.TOWARD_ZERO, False: Rounding.NEAREST_EVEN}
        return Precision(
            source="suites/tolerance/variants.py",
            out_rounding=toward[self.out_truncated],
            q_cast=self.q_cast,
            kv_cast=None,
            qk=UNITS[self.unit].model,
            qk_product=self.qk_product,
            logit_dtype=self.logit_dtype,
            # 2 sigmoid(2x) - 1 cancels near 0, where its error is absolute: two ulps of a number near 1/2, doubled.
            tanh_error=4 * ULP if self.sigmoid_tanh else 2 * ULP,
            # One or two ulps of torch's, and one of noise.
            exp_error=(2.5 if self.exp_noise == "none" else 3.5) * ULP,
            p_dtype=self.p_dtype,
            p_scale=self.p_scale,
            p_rounding=toward[self.p_truncated],
            row_sum_of_rounded_p=self.sum_rounded,
            sink_first=None if self.sink == "initial" else False,
            pv=UNITS[self.unit].model,
            tile=self.tile,
            key_order=KeyOrder(self.order) if self.order != "random" else KeyOrder.ANY,
            max_splits=self.splits,
            partial_dtype=self.partial_dtype,
            ranks=self.ranks,
            rank_ownership=RankOwnership.CYCLIC if self.cyclic else RankOwnership.CONTIGUOUS,
            rank_dtype=self.rank_dtype,
            reduce_dtype=self.reduce_dtype,
            flush_subnormals=self.flush,
        )


@dataclass(frozen=True, eq=False)
class Result:
    """out [Tq, Hq, D_v] in its dtype, and in float32 before that rounding; lse float32 [Tq, Hq], sink excluded."""

    out: Tensor
    wide: Tensor
    lse: Tensor


def run(problem: Problem, choices: Choices) -> Result:
    """Attention as `choices` say, one request and one block of queries after the other."""
    shape = (problem.q.shape[0], problem.q_heads, problem.dim_v)
    wide = torch.zeros(shape, dtype=torch.float32, device=problem.device)
    lse = torch.full(shape[:2], -math.inf, dtype=torch.float32, device=problem.device)
    noise = _Noise(choices.seed, problem.device)
    for request in range(problem.requests):
        first, keys = problem.q_starts[request], max(1, problem.kv_lens[request])
        step = max(1, _ROW_LOGITS[problem.device.type] // (keys * problem.q_heads))
        for start in range(0, problem.q_lens[request], step):
            span = slice(start, min(start + step, problem.q_lens[request]))
            tokens = slice(first + span.start, first + span.stop)
            wide[tokens], lse[tokens] = _Block(problem, choices, request, span, noise).attend()
    rounded = round_to(wide.double(), DTYPES[choices.out_dtype])
    if choices.out_truncated:
        rounded = toward_zero(rounded, wide)
    return Result(rounded, wide, lse)


def cast(x: Tensor, name: str | None, *, truncate: bool = False) -> Tensor:
    """float32 x rounded to a dtype and back; beyond its range saturated."""
    if name is None or name == "fp32":
        return x
    limit = torch.finfo(DTYPES[name]).max
    nearest = round_to(x.clamp(-limit, limit).double(), DTYPES[name])
    return widen(toward_zero(nearest, x) if truncate else nearest).float()


def toward_zero(nearest: Tensor, x: Tensor) -> Tensor:
    """x rounded toward zero, given x rounded to nearest: that, or the value before it, one code below."""
    codes = nearest.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[nearest.element_size()])
    return (codes - (widen(nearest).abs() > x.double().abs()).to(codes.dtype)).view(nearest.dtype)


class _Noise:
    """Integers -1, 0 and 1 for the last bit of exponentials; every call has a stream of its own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device, self.calls = seed, device, 0

    def signs(self, shape: torch.Size) -> Tensor:
        self.calls += 1
        drawn = philox.bytes_(self.seed, self.calls, tuple(shape), self.device)
        return (drawn % 3).float() - 1

    def integers(self, count: int, low: int, high: int) -> list[int]:
        self.calls += 1
        return philox.uniform_int(self.seed, self.calls, (count,), low, high).tolist()

    def permutation(self, count: int) -> Tensor:
        self.calls += 1
        return philox.permutation(self.seed, self.calls, count).to(self.device)


State = tuple[Tensor, Tensor]
"""A normalised result [h, r, e] and its log-sum-exp [h, r] without the sink, in the kernel's base."""


class _Block:
    """Some queries of one request: h kv heads, r rows (queries times heads of the group), n keys; float32."""

    def __init__(self, problem: Problem, choices: Choices, request: int, span: slice, noise: _Noise) -> None:
        self.p, self.c, self.noise = problem, choices, noise
        start = problem.q_starts[request]
        queries = slice(start + span.start, start + span.stop)
        keys = slice(problem.kv_starts[request], problem.kv_starts[request + 1])
        self.group = problem.group
        self.q = cast(self.by_kv_head(widen(problem.q[queries]).float()), choices.q_cast)
        self.k = widen(problem.k[keys]).float().transpose(0, 1)
        self.q_scale = self.by_kv_head(_factor(problem.q_descale, problem.q, queries).unsqueeze(-1))
        self.k_scale = _factor(problem.k_descale, problem.k, keys).t().unsqueeze(1)
        v_scale = _factor(problem.v_descale, problem.v, keys).t().unsqueeze(-1)
        self.v = widen(problem.v[keys]).float().transpose(0, 1) * v_scale
        position = torch.arange(span.start, span.stop, device=problem.device).unsqueeze(1)
        position = position + (problem.contexts[request] - problem.q_lens[request])
        key = problem.positions()[keys].to(problem.device).unsqueeze(0)
        visible = torch.ones_like(key <= position)
        if problem.causal:
            visible &= key <= position
        if problem.window is not None:
            visible &= key > position - problem.window
        self.hidden = ~visible.repeat_interleave(self.group, 0)
        self.sink = None
        self.base = torch.tensor(_LOG2E if choices.base_two else 1.0, dtype=torch.float32, device=problem.device)
        if problem.sinks is not None:
            sinks = problem.sinks.float().to(problem.device).expand(span.stop - span.start, -1).unsqueeze(-1)
            self.sink = self.by_kv_head(sinks).squeeze(-1) * self.base
        early = self.sink is not None and choices.sink == "initial"
        fused = choices.fused_argument and problem.soft_cap is None and not choices.scale_query and not early
        self.scale = torch.tensor(problem.scale, dtype=torch.float32, device=problem.device) * self.base
        self.later = self.scale if fused else None
        """What logits are still to be multiplied by in the argument of the exponential."""

    def by_kv_head(self, x: Tensor) -> Tensor:
        """[t, h * group, d] as [h, t * group, d]."""
        return x.reshape(x.shape[0], -1, self.group, x.shape[2]).transpose(0, 1).flatten(1, 2)

    def by_token(self, x: Tensor) -> Tensor:
        """[h, t * group, e] as [t, h * group, e]."""
        return x.reshape(x.shape[0], -1, self.group, x.shape[2]).transpose(0, 1).flatten(1, 2)

    def attend(self) -> tuple[Tensor, Tensor]:
        """out [t, Hq, e] and the natural log-sum-exp [t, Hq]."""
        n = self.k.shape[1]
        if n == 0:
            out = self.q.new_zeros(*self.q.shape[:2], self.v.shape[2])
            lse = self.q.new_full(self.q.shape[:2], -math.inf)
        else:
            self.logits = self.all_logits()
            owned = self.owned(n)
            parts = [self.rank(keys, alone=len(owned) == 1) for keys in owned]
            out, lse = parts[0] if len(parts) == 1 else self.reduce(parts)
        dead = self.hidden.all(1)
        out, lse = out.masked_fill(dead.unsqueeze(-1), 0.0), (lse / self.base).masked_fill(dead, -math.inf)
        return self.by_token(out), self.by_token(lse.unsqueeze(-1)).squeeze(-1)

    # ------------------------------------------------------------- logits

    def all_logits(self) -> Tensor:
        """[h, r, n] in the kernel's base; unscaled where the scale comes later."""
        c, capped = self.c, self.p.soft_cap is not None
        factor = torch.tensor(self.p.scale, device=self.q.device) if capped else self.scale
        q = self.q * factor if c.scale_query else self.q
        s = self.products(q)
        done = c.scale_query or self.later is not None
        s *= self.q_scale * self.k_scale * (1.0 if done else factor)
        if capped:
            cap = torch.tensor(self.p.soft_cap, dtype=torch.float32, device=s.device)
            x = s / cap
            s = cap * (2 * torch.sigmoid(2 * x) - 1 if c.sigmoid_tanh else torch.tanh(x)) * self.base
        return cast(s, c.logit_dtype).masked_fill_(self.hidden, -math.inf)

    def products(self, q: Tensor) -> Tensor:
        unit, k = UNITS[self.c.unit], self.k
        if self.c.qk_product is None and not unit.block:
            return q @ k.transpose(1, 2)
        dims = range(0, q.shape[2], unit.block or 1)
        s = q.new_zeros(*q.shape[:2], k.shape[1])
        if self.c.qk_product is not None:
            for i in range(q.shape[2]):
                s += cast(q[..., i : i + 1] * k[..., i].unsqueeze(1), self.c.qk_product)
        elif unit.fraction:
            step = max(1, _TILE_VALUES // (q.shape[0] * q.shape[1] * (unit.block + 1)))
            for start in range(0, k.shape[1], step):
                part, keys = s[..., start : start + step], k[:, start : start + step].transpose(1, 2)
                for i in dims:
                    part = _fuse(q[..., i : i + unit.block], keys[:, i : i + unit.block], part, unit)
                s[..., start : start + step] = part
        else:
            for i in dims:
                s += q[..., i : i + unit.block] @ k[..., i : i + unit.block].transpose(1, 2)
        return s

    # ------------------------------------------------------- online softmax

    def exp(self, x: Tensor, lean: Tensor | None = None) -> Tensor:
        """The exponential in the kernel's base, at most 2.5 ulp off. lean: which way the worst case would err."""
        y = torch.exp2(x) if self.c.base_two else torch.exp(x)
        if self.c.exp_noise == "random":
            y *= self.noise.signs(y.shape).mul_(ULP).add_(1)
        elif self.c.exp_noise == "biased" and lean is not None:
            y *= lean * ULP + 1
        if self.c.exp_noise != "none":
            y = torch.where(x == 0, 1.0, y)
        return y.masked_fill_(y < 2.0**-126, 0.0) if self.c.flush else y

    def log(self, x: Tensor) -> Tensor:
        return torch.log2(x) if self.c.base_two else torch.log(x)

    def scaled(self, m: Tensor) -> Tensor:
        return m if self.later is None else m * self.later

    def argument(self, s: Tensor, m: Tensor) -> Tensor:
        """Scaled s - m: plainly, or as one fused multiply-add (float64 holds products of float32)."""
        if self.later is None:
            return s - m
        return (s.double() * self.later.double() - self.scaled(m).double()).float()

    def one_pass(self, keys: slice | Tensor, *, with_sink: bool) -> State:
        """Online softmax over some keys."""
        c, tile = self.c, self.c.tile
        s, v = self.logits[..., keys], self.v[:, keys]
        heads, rows, n = s.shape
        tiles = -(-n // tile)
        s = torch.nn.functional.pad(s, (0, tiles * tile - n), value=-math.inf).view(heads, rows, tiles, tile)
        v = torch.nn.functional.pad(v, (0, 0, 0, tiles * tile - n)).view(heads, tiles, tile, -1)
        if c.order == "random":
            order = self.noise.permutation(tiles)
            s, v = s[:, :, order], v[:, order]
        elif c.order == "descending":
            s, v = s.flip(2), v.flip(1)
        initial = s.new_full((heads, rows, 1), -math.inf)
        if with_sink and self.sink is not None and c.sink == "initial":
            initial = self.sink.unsqueeze(-1)
        m = torch.maximum(s.amax(-1).cummax(-1).values, initial)
        before = torch.cat([initial, m[..., :-1]], -1)
        shift = m.masked_fill(m == -math.inf, 0.0)
        keep = self.exp(self.scaled(before - shift))
        weight = self.exp(self.argument(s, shift.unsqueeze(-1)), torch.sign(v[..., 0]).unsqueeze(1))
        rounded = cast(weight * c.p_scale, c.p_dtype, truncate=c.p_truncated)
        sums = (rounded / c.p_scale if c.sum_rounded else weight).sum(-1)
        total, acc = self.accumulate(rounded, v, keep, sums)
        if c.p_scale != 1:
            acc = acc / c.p_scale
        last = self.scaled(shift[..., -1])
        lse = self.log(total) + last
        if with_sink and self.sink is not None:
            total = total + (torch.exp2 if c.base_two else torch.exp)(self.sink - last)
        total = total.masked_fill(total == 0, 1.0).unsqueeze(-1)
        return (acc * (1 / total) if c.reciprocal else acc / total), lse

    def accumulate(self, p: Tensor, v: Tensor, keep: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Row sums [h, r] and unnormalised results [h, r, e], the accumulator rescaled from tile to tile.

        p [h, r, tiles, tile], v [h, tiles, tile, e], keep and sums [h, r, tiles].
        """
        heads, rows, tiles, tile = p.shape
        unit = UNITS[self.c.unit]
        total, acc = sums.new_zeros(heads, rows), v.new_zeros(heads, rows, v.shape[3])
        step = max(1, _TILE_VALUES // max(1, heads * rows * v.shape[3]))
        for first in range(0, tiles, step):
            some = slice(first, min(first + step, tiles))
            p_tiles, v_tiles = p[:, :, some].transpose(1, 2), v[:, some]
            parts = None if unit.fraction else _tile_products(p_tiles, v_tiles, unit)
            for i in range(some.stop - some.start):
                factor = keep[..., first + i]
                total = torch.addcmul(sums[..., first + i], total, factor)
                if parts is not None:
                    acc = torch.addcmul(parts[:, i], acc, factor.unsqueeze(-1))
                    continue
                acc = acc * factor.unsqueeze(-1)
                for j in range(0, tile, unit.block):
                    keys = slice(j, j + unit.block)
                    acc = _fuse(p_tiles[:, i, :, keys], v_tiles[:, i, keys], acc, unit)
        return total, acc

    # -------------------------------------------------------------- merging

    def cuts(self, n: int, parts: int) -> list[slice]:
        """At most `parts` runs of keys, of uneven lengths, some possibly of none."""
        edges = [0, *sorted(self.noise.integers(parts - 1, 0, n + 1)), n] if parts > 1 else [0, n]
        return [slice(a, b) for a, b in pairwise(edges) if b > a]

    def owned(self, n: int) -> list[slice | Tensor]:
        """The keys of each rank that has any."""
        if not self.c.cyclic:
            return list(self.cuts(n, self.c.ranks))
        return [torch.arange(r, n, self.c.ranks, device=self.k.device) for r in range(min(self.c.ranks, n))]

    def rank(self, keys: slice | Tensor, *, alone: bool) -> State:
        """One rank's result: its splits merged."""
        index = keys if isinstance(keys, Tensor) else torch.arange(keys.start, keys.stop, device=self.k.device)
        runs = self.cuts(len(index), self.c.splits)
        if len(runs) == 1:
            return self.one_pass(keys, with_sink=alone)
        parts = [self.one_pass(index[run], with_sink=False) for run in runs]
        outs = torch.stack([cast(out, self.c.partial_dtype) for out, _ in parts])
        return self.merge(outs, torch.stack([lse for _, lse in parts]), with_sink=alone)

    def merge(self, outs: Tensor, lses: Tensor, *, with_sink: bool) -> State:
        """Partial states [N, h, r, e] and [N, h, r] as one."""
        sink = self.sink if with_sink else None
        top = self.top(lses, sink)
        weights = self.exp(lses - top)
        total = weights.sum(0)
        lse = self.log(total) + top
        if sink is not None:
            total = total + self.exp(sink - top)
        if self.c.merge == "absolute":
            whole = self.log(total) + top
            shares = self.exp(lses - whole.masked_fill(whole == -math.inf, 0.0))
            return (outs * shares.unsqueeze(-1)).sum(0), lse
        total = total.masked_fill(total == 0, 1.0)
        return (outs * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1), lse

    def reduce(self, parts: list[State]) -> State:
        """Ranks: each weighs its own result, and the shares are added in `reduce_dtype`."""
        lses = torch.stack([lse for _, lse in parts])
        top = self.top(lses, self.sink)
        total = self.exp(lses - top).sum(0)
        lse = self.log(total) + top
        if self.sink is not None:
            total = total + self.exp(self.sink - top)
        whole = self.log(total) + top
        whole = whole.masked_fill(whole == -math.inf, 0.0)
        out = torch.zeros_like(parts[0][0])
        for i, (partial, own) in enumerate(parts):
            share = cast(cast(partial, self.c.rank_dtype) * self.exp(own - whole).unsqueeze(-1), self.c.rank_dtype)
            out = share if i == 0 else cast(out + share, self.c.reduce_dtype)
        return out, lse

    @staticmethod
    def top(lses: Tensor, sink: Tensor | None) -> Tensor:
        """The largest of the log-sum-exps and the sink; 0 where all are -inf."""
        top = lses.amax(0) if sink is None else torch.maximum(lses.amax(0), sink)
        return top.masked_fill(top == -math.inf, 0.0)


def _tile_products(p: Tensor, v: Tensor, unit: Unit) -> Tensor:
    """p [h, tiles, r, tile] @ v [h, tiles, tile, e], each tile from zero, in the unit's order."""
    if not unit.block:
        return p @ v
    parts = p.new_zeros(*p.shape[:3], v.shape[3])
    for i in range(0, p.shape[3], unit.block):
        keys = slice(i, i + unit.block)
        parts += p[..., keys] * v[..., keys, :] if unit.block == 1 else p[..., keys] @ v[..., keys, :]
    return parts


def _fuse(a: Tensor, b: Tensor, start: Tensor, unit: Unit) -> Tensor:
    """a [h, r, m] @ b [h, m, e] added to start [h, r, e] by a unit that truncates every term alike."""
    products = a.double().unsqueeze(-2) * b.double().transpose(-1, -2).unsqueeze(-3)
    terms = torch.cat([products, start.double().unsqueeze(-1)], -1)
    exponent = torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent - 1 - unit.fraction
    step = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    scaled = terms / step
    total = ((scaled.floor_() if unit.floor else scaled.trunc_()).sum(-1, keepdim=True) * step).squeeze(-1)
    if unit.floor:
        return total.float()
    mantissa, power = torch.frexp(total)
    return torch.ldexp((mantissa * 2.0**unit.kept).trunc(), power - unit.kept).float()


def _factor(descale: Descale, operand: Tensor, tokens: slice) -> Tensor:
    """A descale as float32 [tokens, heads]."""
    factor = torch.as_tensor(1.0 if descale is None else descale, dtype=torch.float32, device=operand.device)
    return factor.expand(operand.shape[0], operand.shape[1])[tokens]
