"""The oracle: attention in float64, in blocks, as one definition says (`solve`).

    s   = scale * q_descale * k_descale * (q . k)         then  cap * tanh(s / cap)  if there is a soft cap
    out = sum_visible exp(s) * v_descale * v / (sum_visible exp(s) + exp(sink))
    lse = log sum_visible exp(s)                          natural base, sink excluded

How it is fast with nothing but eager PyTorch: the kv heads are the batch of a matrix product whose rows are the queries
of all heads that share one; the scale is the product's own factor; a column of ones behind V makes the second product
sum the weights as well; masks touch only the blocks on the diagonal and at the window's edge. Where the logits cannot
leave [-SAFE_LOGIT, SAFE_LOGIT] (Cauchy-Schwarz, or the cap) the exponentials fit float64 as they are and no maximum is
needed. Elsewhere a running maximum is kept.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.masking import KeyBlock, KeyRanges, QueryBlock, key_order, key_ranges, plan_blocks
from oracle.merge import apply_sink
from oracle.problem import Descale, Problem

SAFE_LOGIT = 256.0
"""exp(+-256) is about 1e+-111. Values of |v| up to 1e154 are checked for; so sums stay far from overflow, and products
from underflow while |v| > 1e-180."""

_TAIL = 8
"""Columns behind V: one of ones, the rest padding that keeps rows aligned and is never multiplied."""


@dataclass(frozen=True, eq=False)
class Solution:
    """out: float64 [Tq, Hq, D_v]. lse: float64 [Tq, Hq], natural base, sink excluded; -inf where no key has weight."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Blocks:
    """Size of the working block: rows (queries times heads of a group), keys, and kv heads at a time."""

    rows: int
    keys: int
    heads: int

    @property
    def logits(self) -> int:
        return self.rows * self.keys * self.heads

    def fitted(self, rows: int) -> "Blocks":
        """The same block for a problem of fewer rows: more keys instead."""
        return self if rows >= self.rows else replace(self, rows=rows, keys=self.rows * self.keys // rows)


CPU_BLOCKS = Blocks(rows=128, keys=512, heads=8)
GPU_BLOCKS = Blocks(rows=512, keys=1024, heads=8)


def solve(
    problem: Problem,
    *,
    device: torch.device | str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    block_heads: int | None = None,
) -> Solution:
    """Solve a problem in float64 on `device` (default: the problem's own).

    block_q, block_k, block_heads: rows, keys and kv heads of a block (defaults suit the device). Beyond float64 copies of
    the operands, memory grows with block_q * block_k * block_heads, never with queries times keys.
    Rows without a visible key, or whose visible logits are all -inf: out 0, lse -inf. Infinities and NaN of visible keys
    propagate as IEEE arithmetic says: a weight is zero only where its logit is -inf, a logit of +inf gives out NaN and
    lse +inf. Invisible keys reach nothing.
    """
    where = problem.device if device is None else torch.device(device)
    default = CPU_BLOCKS if where.type == "cpu" else GPU_BLOCKS
    blocks = Blocks(block_q or default.rows, block_k or default.keys, block_heads or default.heads)
    problem = _in_order(problem)
    out = torch.zeros(problem.q.shape[0], problem.q_heads, problem.dim_v, dtype=torch.float64, device=where)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64, device=where)
    for members in _batches(problem, blocks.logits):
        _solve_batch(problem, members, blocks, out, lse)
    if problem.sinks is not None:
        out = apply_sink(out, lse, problem.sinks)
    return Solution(out, lse)


def lse_with_sink(lse: Tensor, sinks: Tensor) -> Tensor:
    """The natural LSE [..., H] with the sinks [H] counted in: what a convention with `lse_includes_sink` returns."""
    return torch.logaddexp(lse.double(), sinks.to(device=lse.device, dtype=torch.float64))


def _in_order(problem: Problem) -> Problem:
    """The problem with the keys of every request in order of position."""
    if problem.kv_positions is None:
        return problem
    positions = problem.positions()
    order = key_order(positions, problem.kv_lens)
    return problem if order is None else problem.take_keys(order, problem.kv_lens)


def _batches(problem: Problem, limit: int) -> Iterator[list[int]]:
    """Requests to solve together, padded to the longest: small ones of similar size; a large one comes alone.

    A batch holds at most `limit` logits, and at most twice those needed unless there are few.
    """
    sizes = list(zip(problem.q_lens, problem.kv_lens, strict=True))
    batch: list[int] = []
    useful = most_q = most_k = 0
    for i in sorted((i for i, (q, k) in enumerate(sizes) if q and k), key=sizes.__getitem__):
        q, k = sizes[i]
        cost = (len(batch) + 1) * max(most_q, q) * max(most_k, k) * problem.q_heads
        needed = q * k * problem.q_heads
        if batch and cost > min(limit, max(2 * (useful + needed), 1 << 16)):
            yield batch
            batch, useful, most_q, most_k = [], 0, 0, 0
        batch.append(i)
        useful, most_q, most_k = useful + needed, max(most_q, q), max(most_k, k)
    if batch:
        yield batch


def _solve_batch(problem: Problem, members: Sequence[int], blocks: Blocks, out: Tensor, lse: Tensor) -> None:
    """Solve some requests and write their rows of out and lse."""
    q_lens = [problem.q_lens[i] for i in members]
    ranges = key_ranges(
        q_lens,
        [problem.kv_lens[i] for i in members],
        [problem.contexts[i] for i in members],
        causal=problem.causal,
        window=problem.window,
        positions=_positions_of(problem, members),
    )
    low, high = ranges.span()
    if low == high:
        return
    ranges = ranges.shifted(low)
    queries = _Rows.of([problem.q_starts[i] for i in members], max(q_lens), out.device)
    keys = _Rows.of([problem.kv_starts[i] + low for i in members], high - low, out.device)
    work = _Work.of(problem, queries, keys, len(members))
    fitted = blocks.fitted(queries.count * problem.group)
    work.run(ranges, plan_blocks(ranges, max(1, fitted.rows // problem.group), fitted.keys), fitted)
    shape = (len(members), problem.kv_heads, queries.count, problem.group)
    queries.write(out, work.out().view(*shape, problem.dim_v).transpose(1, 2), q_lens)
    queries.write(lse, work.lse().view(shape).transpose(1, 2), q_lens)


def _positions_of(problem: Problem, members: Sequence[int]) -> list[Tensor] | None:
    if problem.kv_positions is None:
        return None
    parts = problem.positions().split(list(problem.kv_lens))
    return [parts[i] for i in members]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Where the tokens of a batch lie among the concatenated ones: `count` each (requests padded to the longest)."""

    count: int
    device: torch.device
    index: slice | Tensor

    @staticmethod
    def of(starts: Sequence[int], count: int, device: torch.device) -> "_Rows":
        if len(starts) == 1:
            return _Rows(count, device, slice(starts[0], starts[0] + count))
        return _Rows(count, device, (torch.tensor(starts).unsqueeze(1) + torch.arange(count)).to(device))

    def take(self, x: Tensor) -> Tensor:
        """[B, count, ...] in float64 of a tensor over all tokens. Padding reads some token: nothing sees it."""
        if isinstance(self.index, slice):
            return x[self.index].unsqueeze(0).to(self.device, torch.float64)
        return x[self.index.to(x.device).clamp(max=x.shape[0] - 1)].to(self.device, torch.float64)

    def operand(self, x: Tensor, descale: Descale) -> Tensor:
        """`take`, times a descale that is not one number."""
        taken = self.take(x)
        if not isinstance(descale, Tensor) or descale.numel() == 1:
            return taken
        if descale.shape[0] == x.shape[0]:
            return taken * self.take(descale).unsqueeze(-1)
        return taken * descale.to(self.device, torch.float64).unsqueeze(-1)

    def write(self, target: Tensor, x: Tensor, lens: Sequence[int]) -> None:
        """Put x [B, count, Hkv, G, ...] without its padding into target [T, Hkv * G, ...]."""
        if isinstance(self.index, slice):
            target[self.index].view(x.shape[1:]).copy_(x[0])
            return
        real = (torch.arange(self.count) < torch.tensor(lens).unsqueeze(1)).to(self.device)
        target[self.index[real]] = x[real].flatten(1, 2)


def _number(descale: Descale) -> float:
    """A descale that is one number; 1 for those that `_Rows.operand` applies."""
    if isinstance(descale, Tensor):
        return float(descale) if descale.numel() == 1 else 1.0
    return 1.0 if descale is None else float(descale)


@dataclass(frozen=True, eq=False)
class _Work:
    """One batch as matrices, and the sums that it collects. All float64.

    N = requests * kv heads matrices; R = queries * group rows each, in order (query, head of the group).
    q [N, R, D_qk], k_t [N, D_qk, K], v [N, K, D_v + 1]: finite, its last column ones.
    flaws [N, K, 3 * D_v]: ones where v was +inf, -inf, NaN (there v holds 0); None if nowhere.
    sums [N, R, D_v + 1]: sum of exp(s - top) v, and of exp(s - top).
    top [N, R]: largest logit so far; None if the logits need no shift.
    flawed [N, R, 3 * D_v]: how many keys with weight had each flaw; None if there is none.
    """

    q: Tensor
    k_t: Tensor
    v: Tensor
    flaws: Tensor | None
    sums: Tensor
    top: Tensor | None
    flawed: Tensor | None
    requests: int
    group: int
    alpha: float
    cap: float | None

    @staticmethod
    def of(problem: Problem, queries: _Rows, keys: _Rows, requests: int) -> "_Work":
        kv_heads, group, dim_v = problem.kv_heads, problem.group, problem.dim_v
        q = queries.operand(problem.q, problem.q_descale)
        k = keys.operand(problem.k, problem.k_descale)
        v = keys.operand(problem.v, problem.v_descale)
        alpha = problem.scale * _number(problem.q_descale) * _number(problem.k_descale)
        longest = [torch.linalg.vector_norm(x, dim=-1).amax() for x in (q, k)]
        padded = v.new_empty(requests * kv_heads, keys.count, dim_v + _TAIL)[..., : dim_v + 1]
        values = padded[..., :dim_v]
        padded[..., dim_v].fill_(1.0)
        values.unflatten(0, (requests, kv_heads)).copy_(v.transpose(1, 2))
        if (factor := _number(problem.v_descale)) != 1.0:
            values.mul_(factor)
        q_norm, k_norm, v_norm = torch.stack([*longest, torch.linalg.vector_norm(values)]).tolist()
        bound = min(abs(alpha) * q_norm * k_norm, problem.soft_cap or math.inf)
        # The norm of all values is finite only if each is, and below 1e154.
        safe = bound <= SAFE_LOGIT and math.isfinite(v_norm)
        flaws = None if math.isfinite(v_norm) else _split_flaws(values)
        rows = queries.count * group
        sums = q.new_zeros(requests * kv_heads, rows, dim_v + _TAIL)[..., : dim_v + 1]
        grouped = q.unflatten(2, (kv_heads, group)).transpose(1, 2)
        return _Work(
            q=grouped.reshape(requests * kv_heads, rows, problem.dim_qk),
            k_t=k.transpose(1, 2).flatten(0, 1).transpose(1, 2),
            v=padded,
            flaws=flaws,
            sums=sums,
            top=None if safe else sums.new_full(sums.shape[:2], -math.inf),
            flawed=None if flaws is None else sums.new_zeros(*sums.shape[:2], 3 * dim_v),
            requests=requests,
            group=group,
            alpha=alpha,
            cap=problem.soft_cap,
        )

    def run(self, ranges: KeyRanges, plan: Sequence[QueryBlock], blocks: Blocks) -> None:
        """Add every block of the plan to the sums."""
        count = self.q.shape[0]
        at_once = count if self.requests > 1 else min(blocks.heads, count)
        widest = max(keys.stop - keys.start for block in plan for keys in block.keys)
        deepest = max(block.stop - block.start for block in plan) * self.group
        pool = self.q.new_empty(at_once * deepest * widest)
        lo, hi = ranges.lo.to(self.q.device).unsqueeze(-1), ranges.hi.to(self.q.device).unsqueeze(-1)
        for block in plan:
            rows = slice(block.start * self.group, block.stop * self.group)
            for keys in block.keys:
                hidden = None
                if keys.masked:
                    key = torch.arange(keys.start, keys.stop, device=lo.device)
                    part = slice(block.start, block.stop)
                    hidden = (key < lo[:, part]) | (key >= hi[:, part])
                for first in range(0, count, at_once):
                    self._add(slice(first, first + at_once), rows, keys, hidden, pool)

    def _add(self, heads: slice, rows: slice, keys: KeyBlock, hidden: Tensor | None, pool: Tensor) -> None:
        """Add one block: hidden [B, queries, keys] marks the pairs that are not visible (None: all are)."""
        columns = slice(keys.start, keys.stop)
        q, k_t, v = self.q[heads, rows], self.k_t[heads, :, columns], self.v[heads, columns]
        shape = (q.shape[0], q.shape[1], k_t.shape[2])
        s = pool[: math.prod(shape)].view(shape)
        if self.cap is None:
            s.baddbmm_(q, k_t, beta=0, alpha=self.alpha)
        else:
            s.baddbmm_(q, k_t, beta=0, alpha=self.alpha / self.cap).tanh_().mul_(self.cap)
        if self.top is None:
            self._hide(s.exp_(), hidden, 0.0)
        else:
            self._hide(s, hidden, -math.inf)
            if self.flaws is not None and self.flawed is not None:
                visible = torch.ones_like(s)
                self._hide(visible, hidden, 0.0)
                _count_flaws(self.flawed[heads, rows], s, visible, self.flaws[heads, columns])
            _shift(s, self.top[heads, rows], self.sums[heads, rows])
            s.exp_()
        self.sums[heads, rows].baddbmm_(s, v)

    def _hide(self, s: Tensor, hidden: Tensor | None, value: float) -> None:
        if hidden is not None:
            by_request = s.view(self.requests, -1, hidden.shape[1], self.group, hidden.shape[2])
            by_request.masked_fill_(hidden[:, None, :, None], value)

    def out(self) -> Tensor:
        """Normalised outputs [N, R, D_v]. Call once, last but for `lse`."""
        values, weight = self.sums[..., :-1], self.sums[..., -1:]
        out = values.div_(weight).masked_fill_(weight == 0, 0.0)
        if self.flawed is not None:
            up, down, nan = (self.flawed > 0).chunk(3, -1)
            for where, value in ((up, math.inf), (down, -math.inf), (nan, math.nan)):
                out += torch.zeros_like(out).masked_fill_(where, value)
        return out

    def lse(self) -> Tensor:
        """Natural log-sum-exp [N, R]."""
        lse = self.sums[..., -1].log()
        return lse if self.top is None else lse + _finite(self.top)


def _finite(top: Tensor) -> Tensor:
    """The shift of a row: its largest logit, or 0 where that is infinite or NaN, so that infinities stay what they are."""
    return top.masked_fill(~top.isfinite(), 0.0)


def _shift(s: Tensor, top: Tensor, sums: Tensor) -> None:
    """Raise the row maxima `top` to those of s as well, rescale the sums to them, and subtract them from s."""
    raised = torch.maximum(top, s.amax(-1))
    sums.mul_((top - raised).exp_().masked_fill_(top == raised, 1.0).unsqueeze(-1))
    top.copy_(raised)
    s.sub_(_finite(raised).unsqueeze(-1))


def _split_flaws(values: Tensor) -> Tensor | None:
    """Replace what is not finite by 0 and return where it was; None if all is finite after all (only very large)."""
    if bool(values.isfinite().all()):
        return None
    flaws = torch.cat([values == math.inf, values == -math.inf, values.isnan()], -1)
    values.masked_fill_(~values.isfinite(), 0.0)
    return flaws.double()


def _count_flaws(flawed: Tensor, s: Tensor, visible: Tensor, flaws: Tensor) -> None:
    """Count flaws of visible keys per row. Where a weight is zero (logit -inf), an infinite value is a NaN: 0 * inf."""
    dead = (s == -math.inf).double() * visible
    flawed.baddbmm_(visible - dead, flaws)
    any_flaw = sum(flaws.chunk(3, -1), start=torch.zeros(()).to(flaws))
    flawed.chunk(3, -1)[2].baddbmm_(dead, any_flaw)
