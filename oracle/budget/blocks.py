"""Problems cut into blocks of rows: requests batched, heads of a group together, a few million logits at a time.

A row is one query of one head. Sums over the keys of positive numbers need few digits, as bounds are rounded outward:
on the CPU they are matrix products in float32, of values scaled so that neither they nor their squares overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.masking import key_order, key_ranges
from oracle.problem import Descale, Problem

_CPU_LOGITS = 1 << 18
_GPU_LOGITS = 1 << 24
FLOOR = 2.0**-126
"""Numbers below are lost in sums in float32."""
_MANY = 1024
_TERMS = 512
"""Keys whose products are added in float32."""


@dataclass(frozen=True, eq=False)
class Rows:
    """m matrices (requests times kv heads) of r rows (queries times heads of the group) over n keys.

    Float64 but for k_size. q [m, r, d], k [m, n, d]: as the caller gave them; q_factor [m, r, 1] (the scale included)
    and k_factor [m, 1, n | 1] (None: 1) scale them. k_stored, v_stored: the dtypes that hold the keys and values as
    they are used; None where a descale comes in. k_size [m, n, d]: |k| / k_unit in the dtype of sums. values: of the
    keys. hidden: bool [m, r, n], True where a key is not visible; None: all are. count [m, r, 1], on the CPU, as masks
    are made there: how many keys are visible.
    out [m, r, e]: the exact results, 0 where they are not finite.
    reach [m, r, e]: largest |v| over the visible keys. sinks [m, r, 1] or None.
    """

    q: Tensor
    k: Tensor
    k_size: Tensor
    k_unit: float
    k_stored: torch.dtype | None
    values: Values
    v_stored: torch.dtype | None
    q_factor: Tensor
    k_factor: Tensor | None
    hidden: Tensor | None
    count: Tensor
    out: Tensor
    reach: Tensor
    sinks: Tensor | None
    soft_cap: float | None


def work_dtype(device: torch.device, keys: int) -> torch.dtype:
    """dtype of sums: float32 on the CPU where that saves time. On GPUs float64 is as fast where it counts, and nobody
    sets it to TF32.
    """
    return torch.float32 if device.type == "cpu" and keys >= _MANY else torch.float64


def slack_of(terms: int, dtype: torch.dtype) -> float:
    """Bounds the relative error of a sum of so many products of numbers that were rounded to dtype."""
    return (terms + 16) * torch.finfo(dtype).eps / 2


def _matmul(w: Tensor, columns: Tensor) -> Tensor:
    """w [m, r, n] @ columns [m, n, c] as float64 sums of products over `_TERMS` keys each.

    In float64 that is for speed: a product of few rows over many keys has too little to do at a time for a GPU.
    """
    whole = w.shape[2] // _TERMS * _TERMS
    if whole == 0 or (columns.dtype == torch.float64 and whole == _TERMS):
        return (w @ columns).double()
    parts = w[..., :whole].unflatten(2, (-1, _TERMS)).transpose(1, 2) @ columns[:, :whole].unflatten(1, (-1, _TERMS))
    found: Tensor = parts.sum(1, dtype=torch.float64)
    return found if whole == w.shape[2] else found + (w[..., whole:] @ columns[:, whole:]).double()


def _largest(x: Tensor) -> Tensor:
    """Largest element of x >= 0, [1]; not finite if one is not."""
    return x.amax().view(1) if x.numel() else x.new_zeros(1)


def _highest(size: Tensor) -> Tensor:
    """Largest over the keys of size [m, n, e] >= 0: [m, 1, e]."""
    return size.amax(1, keepdim=True) if size.shape[1] else size.new_zeros(size.shape[0], 1, size.shape[2])


def _ends(stored: Tensor, size: Tensor) -> Tensor:
    """Numbers [1 | 2] of which the largest in size is that of the keys, read as they are stored, which is less, where
    torch can.

    size: of the keys, in the dtype that is wanted.
    """
    if stored.dtype.itemsize == 1 or not stored.numel():
        return _largest(size)
    return torch.stack(stored.aminmax()).to(size.dtype)


def _unit(largest: float) -> float:
    """A power of two by which numbers up to `largest` are divided, so that neither they nor their squares overflow
    float32, nor do many of them vanish. 1 where that holds as they are."""
    return 1.0 if largest == 0 or 2.0**-20 <= largest <= 2.0**40 else 2.0 ** math.frexp(largest)[1]


@dataclass(frozen=True, eq=False)
class Values:
    """The values [m, n, e] of n keys, as sums over the keys need them.

    columns [m, n, 3 e + 1]: v - mean, 1, (v - mean)^2, |v|, all of v / unit, in the dtype of sums.
    mean: float64 [m, 1, e]. highest [m, 1, e]: the largest |v| / unit. Non-finite values count as 0.
    levels: if values are whole multiples of some number, as many of it as the largest; inf if they are not, or have to
    be descaled.
    """

    columns: Tensor
    mean: Tensor
    highest: Tensor
    unit: float
    levels: float

    @staticmethod
    def of(wide: Tensor, columns: Tensor, highest: Tensor, largest: float, few: Tensor | None) -> Values:
        """wide: the values in the dtype of sums, whose sizes are the last of the columns already; the largest over
        the keys [m, 1, e], and of all.

        few: some of the values, on the CPU, which tell most that are no multiples; None: all were descaled.
        """
        e = wide.shape[2]
        centred, one, squared, size = columns.split((e, 1, e, e), -1)
        if not math.isfinite(largest):
            wide = wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            few = None if few is None else few.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            highest = _highest(torch.abs(wide, out=size))
            largest = float(_largest(highest))
        unit = _unit(largest)
        if unit != 1:
            wide, highest = wide / unit, highest / unit
            size /= unit
        mean = wide.mean(1, keepdim=True)
        torch.sub(wide, mean, out=centred)
        torch.mul(centred, centred, out=squared)
        one.fill_(1.0)
        levels = math.inf if few is None else _levels((few.double() / unit, wide), largest / unit)
        return Values(columns, mean.double() * unit, highest, unit, levels)

    @property
    def dim(self) -> int:
        return self.mean.shape[2]

    def of_keys(self, first: int, last: int) -> Values:
        return Values(self.columns[:, first:last], self.mean, self.highest, self.unit, self.levels)

    def sums(self, *weights: Tensor) -> WeightedSums:
        """Sums over the keys, each of the weights [m, r, n] >= 0 a factor."""
        work, (m, r, n), e = self.columns.dtype, weights[0].shape, self.dim
        top, floor = None, 0.0
        if work is torch.float32:
            top = torch.stack([w.amax(-1, keepdim=True) for w in weights], 1).clamp_(min=1e-300)
            stacked = torch.empty(m, len(weights), r, n, dtype=work, device=self.columns.device)
            for i, w in enumerate(weights):
                torch.div(w, top[:, i], out=stacked[:, i])
            slack, floor = slack_of(min(n, _TERMS), work), n * FLOOR
        else:
            stacked, slack = torch.stack(weights, 1), slack_of(n, work)
        sums = _matmul(stacked.flatten(1, 2), self.columns).unflatten(1, (len(weights), r))
        bounds = sums[..., e:].mul_(1 + slack)
        if top is not None:
            sums *= top
            bounds += floor * top
        first, total, second, size = sums.split((e, 1, e, e), -1)
        if self.unit != 1:
            first *= self.unit
            second *= self.unit**2
            size *= self.unit
        return WeightedSums(self.mean.unsqueeze(1), first, total, second, size, slack)


def _levels(parts: Iterable[Tensor], largest: float) -> float:
    """How many of a power of two are in the largest of some numbers, if that divides them all."""
    step = 2.0 ** (math.frexp(largest)[1] - 8)
    for part in parts:
        units = part / step
        if bool((units != units.round()).any()):
            return math.inf
    return largest / step


@dataclass(frozen=True, eq=False)
class WeightedSums:
    """Sums over the keys of w (v - mean), w, w (v - mean)^2, w |v|, for k weights w: [m, k, r, e], total [m, k, r, 1],
    mean [m, 1, 1, e]. All but the first are bounds from above.
    """

    mean: Tensor
    first: Tensor
    total: Tensor
    second: Tensor
    size: Tensor
    slack: float

    def square(self, centre: Tensor | None = None) -> Tensor:
        """Bound on the sum of w (v - centre)^2: [m, k, r, e]. centre [m, r, e], by default 0."""
        c = -self.mean if centre is None else centre.unsqueeze(1) - self.mean
        whole = torch.addcmul(self.second, c.square(), self.total)
        return torch.addcmul(whole, c, self.first, value=-2).clamp_(min=0.0).add_(whole, alpha=2 * self.slack)

    def spread(self, centre: Tensor, square: Tensor | None = None) -> Tensor:
        """Bound on the sum of w |v - centre|: by Cauchy-Schwarz, or from the sums of w and of w |v| if less.

        square: that of the centre, if it is at hand.
        """
        square = self.square(centre) if square is None else square
        apart = torch.addcmul(self.size, centre.abs().unsqueeze(1), self.total)
        return torch.minimum((self.total * square).sqrt_(), apart)


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of a problem, and the tokens [t] they belong to.

    source: which of requests * queries are no padding; None: all. empty: bool [m, r, 1], of rows without a key; None:
    there are none.
    """

    rows: Rows
    requests: int
    group: int
    source: Tensor | None
    tokens: Tensor | slice
    empty: Tensor | None

    def by_token(self, x: Tensor) -> Tensor:
        """x [m, r, e] as [tokens, heads, e]; 0 in rows without a key."""
        if self.empty is not None:
            x = x.masked_fill(self.empty, 0.0)
        x = x.view(self.requests, -1, x.shape[1] // self.group, self.group, x.shape[2])
        x = x.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return x if self.source is None else x[self.source]

    def keys(self) -> Tensor:
        """int64 [tokens]: how many keys each sees."""
        count = self.rows.count.view(self.requests, -1, self.rows.count.shape[1])[:, 0, :: self.group].flatten()
        count = _on(self.rows.q.device, count.long())
        return count if self.source is None else count[self.source]


def blocks(problem: Problem, out: Tensor, block_logits: int | None = None) -> Iterator[Block]:
    """Every row of `problem` that sees a key, in blocks of at most `block_logits`, or of one query of one request.

    out [Tq, Hq, D_v]: the exact results.
    """
    limit = block_logits or (_CPU_LOGITS if problem.device.type == "cpu" else _GPU_LOGITS)
    problem = _in_order(problem)
    out = out.to(problem.device).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    for members in _batches(problem, limit):
        yield from _Batch.of(problem, members, out).blocks(limit)


def block_of(problem: Problem, out: Tensor, token: int) -> Block:
    """The rows of one query."""
    problem = _in_order(problem)
    request = next(i for i, end in enumerate(problem.q_starts[1:]) if token < end)
    row = token - problem.q_starts[request]
    return _Batch.of(problem, [request], out.to(problem.device)).block(slice(row, row + 1))


def _in_order(problem: Problem) -> Problem:
    """The problem with the keys of every request in order of position."""
    order = None if problem.kv_positions is None else key_order(problem.positions(), problem.kv_lens)
    return problem if order is None else problem.take_keys(order, problem.kv_lens)


def _batches(problem: Problem, limit: int) -> Iterator[list[int]]:
    """Requests to bound together, padded to the longest, which at most doubles them."""
    sizes = [(k, q) for q, k in zip(problem.q_lens, problem.kv_lens, strict=True)]
    batch: list[int] = []
    useful = most_q = 0
    for i in sorted((i for i, size in enumerate(sizes) if all(size)), key=sizes.__getitem__):
        k, q = sizes[i]
        cost = (len(batch) + 1) * max(most_q, q) * k * problem.q_heads
        if batch and cost > min(limit, 2 * (useful + q * k * problem.q_heads)):
            yield batch
            batch, useful, most_q = [], 0, 0
        batch.append(i)
        useful, most_q = useful + q * k * problem.q_heads, max(most_q, q)
    if batch:
        yield batch


@dataclass(frozen=True, eq=False)
class _Batch:
    """Some requests, their keys in order of position: query i of request b sees lo[b, i] <= j < hi[b, i]. On the CPU,
    lo and hi; else as `Rows` has them.
    """

    problem: Problem
    out: Tensor
    lo: Tensor
    hi: Tensor
    query_index: Tensor
    query_valid: Tensor
    k: Tensor
    k_size: Tensor
    k_unit: float
    k_factor: Tensor | None
    values: Values
    reach: Tensor

    @staticmethod
    def of(problem: Problem, members: list[int], out: Tensor) -> _Batch:
        positions = None
        if problem.kv_positions is not None:
            parts = torch.split(problem.positions(), list(problem.kv_lens))
            positions = [parts[i] for i in members]
        ranges = key_ranges(
            [problem.q_lens[i] for i in members],
            [problem.kv_lens[i] for i in members],
            [problem.contexts[i] for i in members],
            causal=problem.causal,
            window=problem.window,
            positions=positions,
        )
        low, high = ranges.span()
        ranges = ranges.shifted(low)
        keys = _index([problem.kv_starts[i] + low for i in members], high - low, problem.k.shape[0])
        lens = torch.tensor([problem.q_lens[i] for i in members])
        queries = _index([problem.q_starts[i] for i in members], int(lens.max()), problem.q.shape[0])
        where, b = problem.device, len(members)
        taken, work = _Take(keys, where), work_dtype(where, high - low)
        k_factor = v_factor = None
        if problem.k_descale is not None:
            k_factor = _factor(problem.k_descale, problem.k, taken).transpose(1, 2).expand(b, problem.kv_heads, -1, 1)
            k_factor = k_factor.flatten(0, 1).transpose(1, 2)
        if problem.v_descale is not None:
            v_factor = _factor(problem.v_descale, problem.v, taken).transpose(1, 2).expand(b, problem.kv_heads, -1, 1)
            v_factor = v_factor.flatten(0, 1)
        stored = taken(problem.k)
        k = _by_kv_head(stored, torch.float64)
        k_size = k.abs() if work is k.dtype else k.to(work).abs_()
        v = _by_kv_head(taken(problem.v), work if v_factor is None else torch.float64)
        wide = v if v_factor is None else (v * v_factor).to(work)
        columns = torch.empty(*wide.shape[:2], 3 * wide.shape[2] + 1, dtype=work, device=where)
        highest = _highest(torch.abs(wide, out=columns[..., -wide.shape[2] :]))
        # The CPU waits for the device once, here.
        asked = (_ends(stored, k_size), _largest(highest), wide[:, :2].flatten())
        ends, v_largest, few = torch.cat(asked).cpu().split([x.numel() for x in asked])
        k_size, k_unit = _sizes(k_size, float(ends.abs().max()))
        values = Values.of(wide, columns, highest, float(v_largest), few if v_factor is None else None)
        return _Batch(
            problem=problem,
            out=out,
            lo=ranges.lo,
            hi=ranges.hi,
            query_index=queries,
            query_valid=torch.arange(queries.shape[1]) < lens.unsqueeze(1),
            k=k,
            k_size=k_size,
            k_unit=k_unit,
            k_factor=k_factor,
            values=values,
            reach=_reach(values, ranges.lo, ranges.hi, problem.kv_heads),
        )

    def blocks(self, limit: int) -> Iterator[Block]:
        """Blocks of queries, each with all the keys that one of them sees."""
        requests, queries = self.lo.shape
        if requests > 1:
            yield self.block(slice(0, queries))
            return
        step = max(1, limit // max(1, self.k.shape[1] * self.problem.q_heads))
        for start in range(0, queries, step):
            span = slice(start, min(start + step, queries))
            if bool((self.hi[:, span] > self.lo[:, span]).any()):
                yield self.block(span)

    def block(self, span: slice) -> Block:
        problem, lo, hi = self.problem, self.lo[:, span], self.hi[:, span]
        seen = hi > lo
        first, last = (int(lo[seen].min()), int(hi[seen].max())) if bool(seen.any()) else (0, 1)
        requests, where = lo.shape[0], problem.device
        valid = self.query_valid[:, span].flatten()
        index = self.query_index[:, span]
        taken = _Take(index, where)
        count = self.by_row((hi - lo).double().unsqueeze(-1))
        hidden = empty = None
        if bool((lo > first).any() or (hi < last).any()):
            hidden = self.by_row(_hidden(_on(where, lo), _on(where, hi), first, last))
        if not bool(seen.all()):
            empty = _on(where, count == 0)
        sinks = None
        if problem.sinks is not None:
            sinks = problem.sinks.to(where, torch.float64).expand(*lo.shape, -1).unsqueeze(-1)
        q_factor = _factor(problem.q_descale, problem.q, taken) * problem.scale
        k_factor = self.k_factor
        rows = Rows(
            q=self.by_head(taken(problem.q).double()),
            k=self.k[:, first:last],
            k_size=self.k_size[:, first:last],
            k_unit=self.k_unit,
            k_stored=problem.k.dtype if problem.k_descale is None else None,
            values=self.values.of_keys(first, last),
            v_stored=problem.v.dtype if problem.v_descale is None else None,
            q_factor=self.by_head(q_factor.expand(requests, lo.shape[1], problem.q_heads, 1)),
            k_factor=k_factor if k_factor is None or k_factor.shape[2] == 1 else k_factor[..., first:last],
            hidden=hidden,
            count=count,
            out=self.by_head(taken(self.out)),
            reach=self.by_row(self.reach[:, :, span], heads=True),
            sinks=None if sinks is None else self.by_head(sinks),
            soft_cap=problem.soft_cap,
        )
        source = None if bool(valid.all()) else _on(where, valid.nonzero().squeeze(1))
        return Block(rows, requests, problem.group, source, _place(index.flatten()[valid], where), empty)

    def by_head(self, x: Tensor) -> Tensor:
        """[b, queries, h * group, d] as [b * h, queries * group, d]."""
        b, t, heads, d = x.shape
        group = self.problem.group
        return x.reshape(b, t, heads // group, group, d).transpose(1, 2).reshape(-1, t * group, d)

    def by_row(self, x: Tensor, *, heads: bool = False) -> Tensor:
        """[b, queries, x] (heads: [b, h, queries, x]) as [b * h, queries * group, x]."""
        x = x if heads else x.unsqueeze(1)
        shape = (x.shape[0], self.problem.kv_heads, x.shape[2], self.problem.group, x.shape[3])
        return x.unsqueeze(3).expand(shape).reshape(shape[0] * shape[1], -1, x.shape[3])


def _index(starts: list[int], count: int, total: int) -> Tensor:
    """int64 [b, count]: so many tokens from each start. Padding reads some other token."""
    return (torch.tensor(starts).unsqueeze(1) + torch.arange(count)).clamp_(max=total - 1)


def _on(device: torch.device, x: Tensor) -> Tensor:
    """x on a device; the CPU does not wait for it."""
    return x.to(device, non_blocking=True)


def _place(index: Tensor, device: torch.device) -> slice | Tensor:
    """int64 [n] as a slice if it counts upward one by one."""
    if len(index) and bool((index[1:] - index[:-1] == 1).all()):
        return slice(int(index[0]), int(index[-1]) + 1)
    return _on(device, index)


class _Take:
    """Takes rows [b, n, ...] of tensors over all tokens."""

    def __init__(self, index: Tensor, device: torch.device) -> None:
        self.shape = index.shape
        self.place = _place(index.flatten(), device)

    def __call__(self, x: Tensor) -> Tensor:
        return x[self.place].view(*self.shape, *x.shape[1:])


def _by_kv_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, n, h, d] as contiguous [b * h, n, d] of a dtype, in one pass."""
    b, n, h, d = x.shape
    return torch.empty(b, h, n, d, dtype=dtype, device=x.device).copy_(x.transpose(1, 2)).view(b * h, n, d)


def _factor(descale: Descale, operand: Tensor, taken: _Take) -> Tensor:
    """A descale as float64 [b | 1, tokens | 1, heads | 1, 1]."""
    if not isinstance(descale, Tensor):
        value = 1.0 if descale is None else float(descale)
        return torch.full((1, 1, 1, 1), value, dtype=torch.float64, device=operand.device)
    factor = descale.to(operand.device, torch.float64)
    if factor.numel() == 1:
        return factor.reshape(1, 1, 1, 1)
    return factor.view(1, 1, -1, 1) if factor.shape[0] == 1 else taken(factor).unsqueeze(-1)


def _hidden(lo: Tensor, hi: Tensor, first: int, last: int) -> Tensor:
    """bool [b, queries, last - first]."""
    key = torch.arange(first, last, device=lo.device)
    return (key < lo.unsqueeze(-1)) | (key >= hi.unsqueeze(-1))


def _sizes(size: Tensor, largest: float) -> tuple[Tensor, float]:
    """size / unit, and the unit; 0 where a size is not finite."""
    if not math.isfinite(largest):
        largest = float(_largest(size.nan_to_num_(nan=0.0, posinf=0.0)))
    unit = _unit(largest)
    return (size if unit == 1 else size.div_(unit)), unit


_FEW = 4


def _reach(values: Values, lo: Tensor, hi: Tensor, heads: int) -> Tensor:
    """Largest |v| over lo[b, i] <= j < hi[b, i], as float64 [b, h, i, e]; 0 for empty ranges.

    Few queries look at every key. For many, two overlapping runs of a power of two cover a range; only the maxima of
    one power are held at a time.
    """
    size = values.columns[..., -values.dim :]
    size = size.view(-1, heads, *size.shape[1:])
    if lo.shape[1] <= _FEW:
        found = []
        for i in range(lo.shape[1]):
            low, high = lo[:, i : i + 1], hi[:, i : i + 1]
            if bool((low > 0).any() or (high < size.shape[2]).any()):
                hidden = _hidden(_on(size.device, low), _on(size.device, high), 0, size.shape[2])
                found.append(size.masked_fill(hidden.unsqueeze(-1), 0.0).amax(2, keepdim=True))
            else:
                found.append(values.highest.view(-1, heads, *values.highest.shape[1:]))
        result = (found[0] if len(found) == 1 else torch.cat(found, 2)).double()
        return result if values.unit == 1 else result * values.unit
    result = size.new_zeros(*size.shape[:2], lo.shape[1], values.dim)
    lengths = hi - lo
    width, runs = 1, size
    while width <= size.shape[2]:
        at = ((lengths >= width) & (lengths < 2 * width)).nonzero(as_tuple=True)
        if len(at[0]):
            request, query, low, high = (x.to(size.device) for x in (*at, lo[at], hi[at] - width))
            result[request, :, query] = torch.maximum(runs[request, :, low], runs[request, :, high])
        runs = torch.maximum(runs[:, :, :-width], runs[:, :, width:])
        width *= 2
    return result.double() * values.unit
