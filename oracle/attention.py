"""The oracle: attention in float64, in blocks, as one definition says (`solve`).

    s   = scale * q_descale * k_descale * (q . k)         then  cap * tanh(s / cap)  if there is a soft cap
    out = sum_visible exp(s) * v_descale * v / (sum_visible exp(s) + exp(sink))
    lse = log sum_visible exp(s)                          natural base, sink excluded

How it is fast with nothing but eager PyTorch: the kv heads are the batch of a matrix product whose rows are
the queries of all heads that share one; the scale is the product's own factor; a column of ones behind V
makes the second product sum the weights as well; masks touch only the blocks on the diagonal and at the
window's edge. Where the logits cannot leave [-SAFE_LOGIT, SAFE_LOGIT] (Cauchy-Schwarz, or the cap) the
exponentials fit float64 as they are and no maximum is needed. Elsewhere a running maximum is kept.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oracle.masking import KeyBlock, KeyRanges, QueryBlock, key_order, key_ranges, plan_blocks
from oracle.merge import apply_sink
from oracle.problem import Descale, Problem

SAFE_LOGIT = 256.0
"""exp(+-256) is about 1e+-111. Values of |v| up to 1e154 are checked for; so sums stay far from overflow,
and products from underflow while |v| > 1e-180."""

_TAIL = 8
"""Columns behind V: one of ones, the rest zeros that keep rows aligned."""


@dataclass(frozen=True, eq=False)
class Solution:
    """out: float64 [Tq, Hq, D_v]. lse: float64 [Tq, Hq], natural base, sink excluded, -inf without keys."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Blocks:
    """Size of the working block: rows (queries times heads of a group), keys, and kv heads at a time.

    ones: the weights of a row are summed by a column of ones behind V, in the product; else in a pass of
    their own.
    """

    rows: int
    keys: int
    heads: int
    ones: bool = True

    @property
    def logits(self) -> int:
        return self.rows * self.keys * self.heads

    def fitted(self, rows: int) -> "Blocks":
        """The same block for a problem of fewer rows: more keys instead."""
        return self if rows >= self.rows else replace(self, rows=rows, keys=self.rows * self.keys // rows)


CPU_BLOCKS = Blocks(rows=256, keys=512, heads=4)
GPU_BLOCKS = Blocks(rows=1024, keys=4096, heads=8)


def solve(
    problem: Problem,
    *,
    device: torch.device | str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    block_heads: int | None = None,
) -> Solution:
    """Solve a problem in float64 on `device` (default: the problem's own).

    block_q, block_k, block_heads: rows, keys and kv heads of a block (defaults suit the device). Beyond
    float64 copies of the operands, memory grows with block_q * block_k * block_heads, never with queries
    times keys. Rows without a visible key, or whose visible logits are all -inf: out 0, lse -inf.
    Infinities and NaN of visible keys
    propagate as IEEE arithmetic says: a weight is zero only where its logit is -inf, a logit of +inf gives
    out NaN and lse +inf. Invisible keys reach nothing. Values whose sum over the keys overflows float64 may
    overflow here.
    """
    where = problem.device if device is None else torch.device(device)
    default = CPU_BLOCKS if where.type == "cpu" else GPU_BLOCKS
    blocks = replace(
        default,
        rows=block_q or default.rows,
        keys=block_k or default.keys,
        heads=block_heads or default.heads,
    )
    problem = _in_order(problem.to(where))
    out = torch.empty(problem.q.shape[0], problem.q_heads, problem.dim_v, dtype=torch.float64, device=problem.device)
    lse = out.new_full(out.shape[:2], -math.inf)
    for members in _batches(problem, blocks.logits):
        _solve_batch(problem, members, blocks, out, lse)
    if problem.sinks is not None:
        out = apply_sink(out, lse, problem.sinks)
    return Solution(out, lse)


def lse_with_sink(lse: Tensor, sinks: Tensor) -> Tensor:
    """The natural LSE [..., H] with the sinks [H] counted in: what a convention with `lse_includes_sink`
    returns.
    """
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
    for i in sorted((i for i, (q, _) in enumerate(sizes) if q), key=sizes.__getitem__):
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
    queries = _Rows.of(problem.q_starts, members, q_lens, problem.q)
    low, high = ranges.span()
    if low == high:
        queries.write(out, queries.rows(out).zero_())
        return
    ranges = ranges.shifted(low)
    keys = _Rows.of(problem.kv_starts, members, [high - low] * len(members), problem.k, skip=low)
    fitted = blocks.fitted(queries.count * problem.group)
    plan = plan_blocks(ranges, max(1, fitted.rows // problem.group), fitted.keys)
    batch_out, batch_lse = queries.rows(out), queries.rows(lse)
    # The heads of a batch of small requests go together; those of one request by and by, so that what is copied
    # for them stays in cache.
    at_once = problem.kv_heads if len(members) > 1 else fitted.heads
    for first in range(0, problem.kv_heads, at_once):
        heads = slice(first, min(first + at_once, problem.kv_heads))
        rows = slice(heads.start * problem.group, heads.stop * problem.group)
        work = _Work.of(problem, queries, keys, heads, ones=fitted.ones)
        work.run(ranges, plan, batch_out[:, :, rows], batch_lse[:, :, rows])
    queries.write(out, batch_out)
    queries.write(lse, batch_lse)


def _positions_of(problem: Problem, members: Sequence[int]) -> list[Tensor] | None:
    if problem.kv_positions is None:
        return None
    parts = torch.split(problem.positions(), list(problem.kv_lens))
    return [parts[i] for i in members]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Where the tokens of B requests lie among all of them, `count` of each, padded to the longest.

    place: a run of rows if B is 1, else an index [B * count], whose padding reads some other token.
    source, target: of B > 1 requests, the rows of [B * count] that are no padding, and where they belong.
    """

    requests: int
    count: int
    place: slice | Tensor
    source: Tensor | None = None
    target: Tensor | None = None

    @staticmethod
    def of(
        starts: Sequence[int], members: Sequence[int], lens: Sequence[int], tokens: Tensor, skip: int = 0
    ) -> "_Rows":
        """Rows of some requests: their first `lens` tokens after `skip`."""
        count, first = max(lens), [starts[i] + skip for i in members]
        if len(members) == 1:
            return _Rows(1, count, slice(first[0], first[0] + count))
        place = np.add.outer(first, np.arange(count)).ravel()
        source = np.flatnonzero(np.arange(count) < np.array(lens)[:, None])
        target = place[source]
        np.minimum(place, tokens.shape[0] - 1, out=place)
        return _Rows(len(members), count, *(torch.from_numpy(x).to(tokens.device) for x in (place, source, target)))

    def take(self, x: Tensor) -> Tensor:
        """[B, count, ...] of a tensor over all tokens. Nothing sees the padding."""
        if isinstance(self.place, slice):
            return x[self.place].unsqueeze(0)
        return x.index_select(0, self.place).view(self.requests, self.count, *x.shape[1:])

    def operand(self, x: Tensor, descale: Descale, heads: slice) -> Tensor:
        """`take` some heads of x, times a descale that is not one number."""
        taken = self.take(x[:, heads])
        if not isinstance(descale, Tensor) or descale.numel() == 1:
            return taken
        factor = self.take(descale.expand(x.shape[:2])[:, heads])
        return taken.double() * factor.double().unsqueeze(-1)

    def rows(self, target: Tensor) -> Tensor:
        """Memory [B, count, ...] for rows of `target`: the rows themselves where they are one run."""
        if isinstance(self.place, slice):
            return target[self.place].unsqueeze(0)
        return target.new_empty(self.requests, self.count, *target.shape[1:])

    def write(self, target: Tensor, rows: Tensor) -> None:
        """Put rows [B, count, ...] in their place, without the padding."""
        if self.source is not None and self.target is not None:
            target.index_copy_(0, self.target, rows.flatten(0, 1).index_select(0, self.source))


def _dense(x: Tensor) -> Tensor:
    """x in float64 and contiguous, in one pass; x itself if it is so."""
    if x.dtype == torch.float64 and x.is_contiguous():
        return x
    return torch.empty(x.shape, dtype=torch.float64, device=x.device).copy_(x)


def _number(descale: Descale) -> float:
    """A descale that is one number; 1 for those that `_Rows.operand` applies."""
    if isinstance(descale, Tensor):
        return float(descale) if descale.numel() == 1 else 1.0
    return 1.0 if descale is None else float(descale)


@dataclass(frozen=True, eq=False)
class _Sums:
    """What a block of R queries * heads of a group collects over its keys, for n of the N matrices. All
    float64.

    values [n, R, D_v (+ tail)]: sum of exp(s - top) v. weight [n, R]: sum of exp(s - top), a column of
    values or apart.
    top [n, R]: largest logit so far; None if the logits need no shift.
    flawed [n, R, 3 * D_v]: how many visible keys had each flaw (`_split_flaws`); None if none has.
    """

    values: Tensor
    weight: Tensor
    top: Tensor | None
    flawed: Tensor | None
    weight_apart: bool

    def write(self, out: Tensor, lse: Tensor, group: int) -> None:
        """Normalise into out [B, queries, heads * group, D_v] and lse [B, queries, heads * group]."""
        requests, queries, _, dim_v = out.shape
        shape = (requests, -1, queries, group)
        log = self.weight.log()
        log = log if self.top is None else log + _finite(self.top)
        lse.view(requests, queries, -1, group).copy_(log.view(shape).transpose(1, 2))
        # A row without weight has values 0 as well, and stays 0.
        weight = self.weight.masked_fill(self.weight == 0, 1.0).view(*shape, 1).transpose(1, 2)
        values = self.values[..., :dim_v].view(*shape, dim_v).transpose(1, 2)
        heads = out.view(requests, queries, -1, group, dim_v)
        torch.div(values, weight, out=heads)
        if self.flawed is not None:
            flawed = self.flawed.view(*shape, 3 * dim_v).transpose(1, 2) > 0
            for where, value in zip(flawed.chunk(3, -1), (math.inf, -math.inf, math.nan), strict=True):
                heads += torch.zeros_like(heads).masked_fill_(where, value)


@dataclass(frozen=True, eq=False)
class _Work:
    """One batch as N = requests * kv heads matrices of R = queries * group rows (query, head of the group).
    All float64.

    q [N, R, D_qk], k_t [N, D_qk, K], v [N, K, D_v (+ tail: ones, then zeros)]: finite.
    flaws [N, K, 3 * D_v]: ones where v was +inf, -inf, NaN (there v holds 0); None if nowhere.
    bounded: the logits cannot leave [-SAFE_LOGIT, SAFE_LOGIT].
    """

    q: Tensor
    k_t: Tensor
    v: Tensor
    flaws: Tensor | None
    bounded: bool
    requests: int
    group: int
    dim_v: int
    alpha: float
    cap: float | None

    @staticmethod
    def of(problem: Problem, queries: _Rows, keys: _Rows, heads: slice, *, ones: bool) -> "_Work":
        """The matrices of some kv heads."""
        requests, group, dim_v = keys.requests, problem.group, problem.dim_v
        rows = slice(heads.start * group, heads.stop * group)
        q = queries.operand(problem.q, problem.q_descale, rows)
        q = _dense(q.view(requests, queries.count, -1, group, problem.dim_qk).transpose(1, 2))
        k = _dense(keys.operand(problem.k, problem.k_descale, heads).transpose(1, 2))
        v = keys.operand(problem.v, problem.v_descale, heads).transpose(1, 2)
        alpha = problem.scale * _number(problem.q_descale) * _number(problem.k_descale)
        padded = k.new_empty(*v.shape[:3], dim_v + (_TAIL if ones else 0))
        padded[..., dim_v:] = 0.0
        padded[..., dim_v : dim_v + 1] = 1.0
        values = padded[..., :dim_v].copy_(v)
        if (factor := _number(problem.v_descale)) != 1.0:
            values.mul_(factor)
        norms = [torch.linalg.vector_norm(x, dim=-1).amax() for x in (q, k)]
        q_norm, k_norm, v_square = torch.stack([*norms, torch.dot(padded.view(-1), padded.view(-1))]).tolist()
        bound = abs(alpha) * q_norm * k_norm
        # Norms are finite only if every element is. A finite sum of squares keeps |v| below 1e154.
        safe = math.isfinite(bound + v_square) and min(bound, problem.soft_cap or bound) <= SAFE_LOGIT
        flaws = None if math.isfinite(v_square) else _split_flaws(values)
        return _Work(
            q=q.view(k.shape[0] * k.shape[1], -1, problem.dim_qk),
            k_t=k.flatten(0, 1).transpose(1, 2),
            v=padded.flatten(0, 1),
            flaws=None if flaws is None else flaws.flatten(0, 1),
            bounded=safe,
            requests=requests,
            group=group,
            dim_v=dim_v,
            alpha=alpha,
            cap=problem.soft_cap,
        )

    def run(self, ranges: KeyRanges, plan: Sequence[QueryBlock], out: Tensor, lse: Tensor) -> None:
        """Fill out [B, queries, heads * group, D_v] and lse [B, queries, heads * group], block by block."""
        count = self.q.shape[0]
        rows = max(block.stop - block.start for block in plan) * self.group
        widest = max(keys.stop - keys.start for block in plan for keys in block.keys)
        logits = self.q.new_empty(count * rows * widest)
        values = self.q.new_empty(count * rows * self.v.shape[2])
        lo, hi = (x.to(self.q.device).unsqueeze(-1) for x in (ranges.lo, ranges.hi))
        for block in plan:
            part = slice(block.start, block.stop)
            q = self.q[:, block.start * self.group : block.stop * self.group]
            sums = self._sums(q.shape[1], values)
            for keys in block.keys:
                visible = _visible(lo[:, part], hi[:, part], keys) if keys.masked else None
                self._add(sums, q, slice(keys.start, keys.stop), visible, logits)
            sums.write(out[:, part], lse[:, part], self.group)

    def _sums(self, rows: int, memory: Tensor) -> _Sums:
        heads = self.q.shape[0]
        values = memory[: heads * rows * self.v.shape[2]].view(heads, rows, -1).zero_()
        apart = values.shape[2] == self.dim_v
        return _Sums(
            values=values,
            weight=values.new_zeros(heads, rows) if apart else values[..., self.dim_v],
            weight_apart=apart,
            top=None if self.bounded else values.new_full((heads, rows), -math.inf),
            flawed=None if self.flaws is None else values.new_zeros(heads, rows, 3 * self.dim_v),
        )

    def _add(self, sums: _Sums, q: Tensor, keys: slice, visible: Tensor | None, memory: Tensor) -> None:
        """Add one block of keys. visible [B, queries, keys] says which pairs are (None: all)."""
        k_t, v = self.k_t[:, :, keys], self.v[:, keys]
        shape = (q.shape[0], q.shape[1], k_t.shape[2])
        s = memory[: math.prod(shape)].view(shape)
        if self.cap is None:
            s.baddbmm_(q, k_t, beta=0, alpha=self.alpha)
        else:
            s.baddbmm_(q, k_t, beta=0, alpha=self.alpha / self.cap).tanh_().mul_(self.cap)
        if sums.top is None:
            s.exp_()
            if visible is not None:  # All is finite, so a product hides; it is the faster way.
                self._by_pair(s, visible).mul_(visible[:, None, :, None].double())
        else:
            if visible is not None:
                self._by_pair(s, visible).masked_fill_(~visible[:, None, :, None], -math.inf)
            if self.flaws is not None and sums.flawed is not None:
                weight = torch.ones_like(s)
                if visible is not None:
                    self._by_pair(weight, visible).copy_(visible[:, None, :, None])
                _count_flaws(sums.flawed, s, weight, self.flaws[:, keys])
            _shift(s, sums, sums.top)
            s.exp_()
        sums.values.baddbmm_(s, v)
        if sums.weight_apart:
            sums.weight.add_(s.sum(-1))

    def _by_pair(self, s: Tensor, visible: Tensor) -> Tensor:
        """s [N, rows, keys] as [B, heads, queries, group, keys]."""
        return s.view(self.requests, -1, visible.shape[1], self.group, visible.shape[2])


def _visible(lo: Tensor, hi: Tensor, keys: KeyBlock) -> Tensor:
    """[B, queries, keys]: which pairs of a block are visible."""
    key = torch.arange(keys.start, keys.stop, device=lo.device)
    return (key >= lo) & (key < hi)


def _finite(top: Tensor) -> Tensor:
    """The shift of a row: its largest logit, or 0 where that is infinite or NaN, which then stays so."""
    return top.masked_fill(~top.isfinite(), 0.0)


def _shift(s: Tensor, sums: _Sums, top: Tensor) -> None:
    """Raise the row maxima `top` to those of s too, rescale the sums to them, and subtract them from s."""
    raised = torch.maximum(top, s.amax(-1))
    factor = (top - raised).exp_().masked_fill_(top == raised, 1.0)
    sums.values.mul_(factor.unsqueeze(-1))
    if sums.weight_apart:
        sums.weight.mul_(factor)
    top.copy_(raised)
    s.sub_(_finite(raised).unsqueeze(-1))


def _split_flaws(values: Tensor) -> Tensor | None:
    """Replace what is not finite by 0 and return where it was; None if all is finite after all (only very
    large).
    """
    if bool(values.isfinite().all()):
        return None
    flaws = torch.cat([values == math.inf, values == -math.inf, values.isnan()], -1)
    values.masked_fill_(~values.isfinite(), 0.0)
    return flaws.double()


def _count_flaws(flawed: Tensor, s: Tensor, visible: Tensor, flaws: Tensor) -> None:
    """Count flaws of visible keys per row. Where a weight is zero (logit -inf), an infinite value is a NaN:
    0 * inf.
    """
    dead = (s == -math.inf).double() * visible
    flawed.baddbmm_(visible - dead, flaws)
    any_flaw = sum(flaws.chunk(3, -1), start=torch.zeros(()).to(flaws))
    flawed.chunk(3, -1)[2].baddbmm_(dead, any_flaw)
