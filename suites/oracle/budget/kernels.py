"""Small float32 attention kernels for the tests: a tiled softmax, written apart from the oracle.

Every legitimate choice of arithmetic is a field; `Choices.precision` allows exactly these choices.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from oracle.precision import Accumulation, KeyOrder, MatrixUnit, Precision, RankOwnership, Rounding
from oracle.problem import Problem

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
LOG2E = math.log2(math.e)
ULP = 2.0**-23

UNITS = {
    "blas": MatrixUnit(),
    "chain": MatrixUnit(),
    "reverse_chain": MatrixUnit(),
    "block": MatrixUnit(accumulation=Accumulation.BLOCK, block=16),
    "fused": MatrixUnit(
        accumulation=Accumulation.FUSED, block=16, fraction_bits=25, unit_roundoff=2.0**-23, toward_zero=True
    ),
    "short_fused": MatrixUnit(
        accumulation=Accumulation.FUSED, block=32, fraction_bits=13, unit_roundoff=2.0**-13, toward_zero=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What an honest kernel may decide. `cuts` are where splits begin; `rank_cuts` where ranks begin."""

    tile: int = 16
    order: str = "ascending"
    base_two: bool = False
    scale_query: bool = False
    fused_argument: bool = False
    """The scale is applied in the exponential's argument, fma(s, scale, -(m * scale)), where that can be."""
    reciprocal: bool = False
    unit: str = "blas"
    q_cast: str | None = None
    kv_cast: str | None = None
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
    """Ranks own every ranks-th key; else runs of keys."""
    rank_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    sink: str = "merge"
    flush: bool = False
    out_dtype: str = "bf16"
    out_truncated: bool = False
    tanh_noise: float = 0.0
    rescale: bool = True
    """False is a fault, not a choice; so is exp_noise="bf16"."""
    seed: int = 0

    def precision(self) -> Precision:
        """What this kernel rounds, and nothing else."""
        return Precision(
            source="the test's own kernel",
            out_rounding=Rounding.TOWARD_ZERO if self.out_truncated else Rounding.NEAREST_EVEN,
            q_cast=self.q_cast,
            kv_cast=self.kv_cast,
            qk=UNITS[self.unit],
            qk_product=self.qk_product,
            logit_dtype=self.logit_dtype,
            tanh_error=self.tanh_noise + 2 * ULP,
            p_dtype=self.p_dtype,
            p_scale=self.p_scale,
            p_rounding=Rounding.TOWARD_ZERO if self.p_truncated else Rounding.NEAREST_EVEN,
            row_sum_of_rounded_p=self.sum_rounded,
            pv=UNITS[self.unit],
            sink_first=None if self.sink == "initial" else False,
            tile=self.tile,
            key_order=KeyOrder.ASCENDING if self.order == "ascending" else KeyOrder.ANY,
            max_splits=self.splits,
            partial_dtype=self.partial_dtype,
            ranks=self.ranks,
            rank_ownership=RankOwnership.CYCLIC if self.cyclic else RankOwnership.CONTIGUOUS,
            rank_dtype=self.rank_dtype,
            reduce_dtype=self.reduce_dtype,
            flush_subnormals=self.flush,
        )


def cast(x: Tensor, name: str | None, *, truncate: bool = False) -> Tensor:
    """float32 x rounded to a dtype and back; beyond its range saturated."""
    if name is None or name == "fp32":
        return x
    dtype = DTYPES[name]
    limit = torch.finfo(dtype).max
    nearest = x.clamp(-limit, limit).to(dtype)
    if truncate:
        nearest = _step_toward_zero(nearest, x)
    return nearest.float()


def _step_toward_zero(nearest: Tensor, x: Tensor) -> Tensor:
    codes = nearest.view(torch.uint8 if nearest.element_size() == 1 else torch.int16)
    return (codes - (nearest.float().abs() > x.abs()).to(codes.dtype)).view(nearest.dtype)


def multiply(a: Tensor, b: Tensor, unit: str, start: Tensor | None = None) -> Tensor:
    """a [..., r, n] @ b [..., n, e] in float32, added to `start` as the unit does."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1]) if start is None else start
    n = a.shape[-1]
    if unit == "blas":
        return total + a @ b
    if unit in ("chain", "reverse_chain"):
        for i in range(n) if unit == "chain" else reversed(range(n)):
            total = total + a[..., i : i + 1] * b[..., i : i + 1, :]
        return total
    if unit == "block":
        for i in range(0, n, 16):
            total = total + a[..., i : i + 16] @ b[..., i : i + 16, :]
        return total
    block, fraction, kept = (16, 25, 24) if unit == "fused" else (32, 13, 14)
    wide = total.double()
    for i in range(0, n, block):
        left, right = a[..., i : i + block].double(), b[..., i : i + block, :].double()
        wide = _fused(left.unsqueeze(-1) * right.unsqueeze(-3), wide, fraction, kept)
    return wide.float()


def _fused(products: Tensor, start: Tensor, fraction: int, kept: int) -> Tensor:
    terms = torch.cat([products, start.unsqueeze(-2)], -2)
    exponent = torch.frexp(terms).exponent.masked_fill(terms == 0, -1000)
    step = torch.exp2((exponent.amax(-2, keepdim=True) - 1 - fraction).double())
    total = ((terms / step).trunc() * step).sum(-2)
    mantissa, power = torch.frexp(total)
    return torch.ldexp((mantissa * 2.0**kept).trunc(), power - kept)


@dataclass(frozen=True)
class Result:
    """out in its dtype and as it was before that rounding; lse float32. [Tq, Hq, D_v] and [Tq, Hq]."""

    out: Tensor
    exact_out: Tensor
    lse: Tensor


def run(problem: Problem, choices: Choices) -> Result:
    """Attention in float32, one request after the other, as `choices` say."""
    outs, lses = [], []
    for request in range(problem.requests):
        out, lse = _Call(problem, choices, request).attend()
        outs.append(out)
        lses.append(lse)
    wide = torch.cat(outs)
    rounded = cast(wide, choices.out_dtype, truncate=choices.out_truncated)
    return Result(rounded.to(DTYPES[choices.out_dtype]), wide, torch.cat(lses))


class _Call:
    """One request: q [H, t, d], k [H, n, d], v [H, n, e] in float32, heads repeated for the group."""

    def __init__(self, problem: Problem, choices: Choices, request: int) -> None:
        self.p, self.c = problem, choices
        self.generator = torch.Generator().manual_seed(choices.seed + request)
        queries = slice(problem.q_starts[request], problem.q_starts[request + 1])
        keys = slice(problem.kv_starts[request], problem.kv_starts[request + 1])
        self.q = cast(problem.q[queries].float(), choices.q_cast).transpose(0, 1)
        self.k = problem.k[keys].float().transpose(0, 1).repeat_interleave(problem.group, 0)
        self.v = problem.v[keys].float().transpose(0, 1).repeat_interleave(problem.group, 0)
        self.q_scale = _descale(problem.q_descale, problem.q, queries, 1)
        self.k_scale = _descale(problem.k_descale, problem.k, keys, problem.group).transpose(1, 2)
        self.v_scale = _descale(problem.v_descale, problem.v, keys, problem.group)
        if choices.kv_cast is not None:
            self.k = cast(self.k * self.k_scale.transpose(1, 2), choices.kv_cast)
            self.v = cast(self.v * self.v_scale, choices.kv_cast)
            self.k_scale, self.v_scale = torch.ones_like(self.k_scale), torch.ones_like(self.v_scale)
        length, n = problem.contexts[request], problem.kv_lens[request]
        position = torch.arange(length - problem.q_lens[request], length).unsqueeze(1)
        key = torch.arange(n).unsqueeze(0)
        self.visible = torch.ones(len(position), n, dtype=torch.bool)
        if problem.causal:
            self.visible &= key <= position
        if problem.window is not None:
            self.visible &= key > position - problem.window
        self.unit = torch.tensor(LOG2E if choices.base_two else 1.0, dtype=torch.float32)
        self.sink = None if problem.sinks is None else (problem.sinks.float() * self.unit).view(-1, 1)
        early_sink = self.sink is not None and choices.sink == "initial"
        fused = choices.fused_argument and problem.soft_cap is None and not choices.scale_query and not early_sink
        self.scale = torch.tensor(problem.scale, dtype=torch.float32) * self.unit
        # What is left to multiply logits by: everything, or nothing.
        self.later = self.scale if fused else None

    def logits(self, keys: slice) -> Tensor:
        c, k = self.c, self.k[:, keys]
        scale = torch.tensor(self.p.scale, dtype=torch.float32)
        capped = self.p.soft_cap is not None
        factor = scale if capped else scale * self.unit
        q = self.q * factor if c.scale_query else self.q
        if c.qk_product is not None:
            s = cast(q.unsqueeze(2) * k.unsqueeze(1), c.qk_product).sum(-1)
        else:
            s = multiply(q, k.transpose(1, 2), c.unit)
        done = c.scale_query or self.later is not None
        s = s * (self.q_scale * self.k_scale[..., keys] * (1.0 if done else factor))
        if capped:
            cap = torch.tensor(self.p.soft_cap, dtype=torch.float32)
            noise = (torch.rand(s.shape, generator=self.generator) * 2 - 1) * c.tanh_noise
            s = cap * (torch.tanh(s / cap) + noise) * self.unit
        return cast(s, c.logit_dtype).masked_fill(~self.visible[:, keys], -math.inf)

    def exp(self, x: Tensor, lean: Tensor | None = None) -> Tensor:
        """exp, at most 2.5 ulp off. lean: per element, the direction of the worst case."""
        y = torch.exp2(x) if self.c.base_two else torch.exp(x)
        if self.c.exp_noise == "random":
            y = y * (1 + torch.randint(-1, 2, y.shape, generator=self.generator) * ULP)
        if self.c.exp_noise == "biased" and lean is not None:
            y = y * (1 + lean * ULP)
        if self.c.exp_noise == "bf16":
            y = y.bfloat16().float()
        y = torch.where(x == 0, torch.ones_like(y), y)
        return torch.where(y < 2.0**-126, torch.zeros_like(y), y) if self.c.flush else y

    def log(self, x: Tensor) -> Tensor:
        return torch.log2(x) if self.c.base_two else torch.log(x)

    def attend(self) -> tuple[Tensor, Tensor]:
        n = self.k.shape[1]
        owned = [range(a, b) for a, b in _cuts(n, self.c.ranks, self.generator)]
        if self.c.cyclic and self.c.ranks > 1:
            owned = [range(i, n, self.c.ranks) for i in range(min(n, self.c.ranks))] or [range(0)]
        parts = [self.rank(keys, alone=len(owned) == 1) for keys in owned]
        out, lse = parts[0] if len(parts) == 1 else self.reduce(parts)
        dead = ~self.visible.any(1)
        out = out.masked_fill(dead.unsqueeze(-1), 0.0)
        return out.transpose(0, 1), (lse / self.unit).masked_fill(dead, -math.inf).transpose(0, 1)

    def rank(self, keys: range, *, alone: bool) -> tuple[Tensor, Tensor]:
        runs = [keys[a:b] for a, b in _cuts(len(keys), self.c.splits, self.generator)]
        if len(runs) == 1:
            return self.one_pass(runs[0], with_sink=alone)
        parts = [self.one_pass(run, with_sink=False) for run in runs]
        outs = torch.stack([cast(o, self.c.partial_dtype) for o, _ in parts])
        return self.merge(outs, torch.stack([lse for _, lse in parts]), with_sink=alone)

    def one_pass(self, run: range, *, with_sink: bool) -> tuple[Tensor, Tensor]:
        """Online softmax over some keys: normalised out [H, t, e], and the log-sum-exp without the sink."""
        c = self.c
        heads, rows = self.q.shape[:2]
        m = torch.full((heads, rows), -math.inf)
        if with_sink and self.sink is not None and c.sink == "initial":
            m = self.sink.expand(heads, rows)
        total, acc = torch.zeros(heads, rows), torch.zeros(heads, rows, self.v.shape[2])
        for keys in self.tiles(run):
            s = self.logits(keys)
            raised = torch.maximum(m, s.amax(-1))
            shift = raised.masked_fill(raised == -math.inf, 0.0)
            keep = self.exp(self.scaled(m - shift)) if c.rescale else torch.ones_like(m)
            lean = torch.sign(self.v[:, keys, 0]).unsqueeze(1)
            weight = self.exp(self.argument(s, shift.unsqueeze(-1)), lean)
            rounded = cast(weight * c.p_scale, c.p_dtype, truncate=c.p_truncated)
            summed = rounded / c.p_scale if c.sum_rounded else weight
            total = total * keep + summed.sum(-1)
            value = self.v[:, keys] * self.v_scale[:, keys]
            acc = multiply(rounded, value, c.unit, acc * keep.unsqueeze(-1))
            m = raised
        if c.p_dtype is not None or c.p_scale != 1:
            acc = acc / c.p_scale
        shift = self.scaled(m.masked_fill(m == -math.inf, 0.0))
        lse = self.log(total) + shift
        if with_sink and self.sink is not None:
            total = total + (torch.exp2 if c.base_two else torch.exp)(self.sink - shift)
        total = total.masked_fill(total == 0, 1.0).unsqueeze(-1)
        return (acc * (1 / total) if c.reciprocal else acc / total), lse

    def scaled(self, m: Tensor) -> Tensor:
        return m if self.later is None else m * self.later

    def argument(self, s: Tensor, m: Tensor) -> Tensor:
        """Scaled s - m: plainly, or as one fused multiply-add (float64 holds products of float32)."""
        if self.later is None:
            return s - m
        return (s.double() * self.later.double() - self.scaled(m).double()).float()

    def tiles(self, run: range) -> list[slice]:
        parts = [run[i : i + self.c.tile] for i in range(0, len(run), self.c.tile)]
        tiles = [slice(part.start, part.stop, part.step) for part in parts]
        if self.c.order == "descending":
            return tiles[::-1]
        if self.c.order == "random":
            order = torch.randperm(len(tiles), generator=self.generator).tolist()
            return [tiles[i] for i in order]
        return tiles

    def merge(self, outs: Tensor, lses: Tensor, *, with_sink: bool) -> tuple[Tensor, Tensor]:
        """Partial states [N, H, t, e] and [N, H, t] as one."""
        sink = self.sink if with_sink else None
        top = lses.amax(0)
        if sink is not None:
            top = torch.maximum(top, sink)
        top = top.masked_fill(top == -math.inf, 0.0)
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

    def reduce(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Ranks: each weighs its own result, and the shares are added in `reduce_dtype`."""
        lses = torch.stack([lse for _, lse in parts])
        top = lses.amax(0)
        if self.sink is not None:
            top = torch.maximum(top, self.sink)
        top = top.masked_fill(top == -math.inf, 0.0)
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


def _cuts(n: int, parts: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """At most `parts` runs of keys, of uneven lengths, some possibly of none."""
    inner = torch.randint(0, n + 1, (parts - 1,), generator=generator).sort().values.tolist()
    edges = [0, *inner, n]
    runs = [(a, b) for a, b in pairwise(edges) if b > a]
    return runs or [(0, n)]


def _descale(descale: float | Tensor | None, operand: Tensor, tokens: slice, repeat: int) -> Tensor:
    """A descale as float32 [heads, tokens, 1], heads repeated for the group."""
    factor = torch.as_tensor(1.0 if descale is None else descale, dtype=torch.float32)
    full = factor.expand(operand.shape[0], operand.shape[1])[tokens]
    return full.transpose(0, 1).repeat_interleave(repeat, 0).unsqueeze(-1)
