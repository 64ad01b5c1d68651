"""How well changes of single keys, ranges and pages would explain what was returned, for all of them at once.

Scores are squared errors over the noise of rounding, summed over rows: the least is the best candidate, to be verified
by a solve. Notation as in `oracle.diagnose.weights`: (1 + w) * returned - out - n is what a change (w, n) leaves.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from oracle.diagnose.weights import Weights

_FAR = 1e30
"""Score of what cannot be."""


def _lse_score(x: Weights, w: Tensor) -> Tensor | float:
    """Score [R, ...] of the log-sum-exp for changes w [R, ...]."""
    error = x.lse_error
    if error is None:
        return 0.0
    shape = (-1, *[1] * (w.ndim - 1))
    grown = w * x.lse_share.view(shape)
    left = error.view(shape) - torch.where(grown > -1, grown.clamp(min=-1 + 1e-12).log1p(), -1e3)
    return (left / x.lse_noise.view(shape)).square()


def total(x: Weights, square: Tensor, w: Tensor) -> Tensor:
    """Sum over the rows of both scores: square [R, ...] is of (1 + w) * returned - out - n."""
    shape = (-1, *[1] * (w.ndim - 1))
    out = square / (1 + w).clamp(min=1e-9).square() / x.noise.square().view(shape)
    return (out + _lse_score(x, w)).nan_to_num(_FAR, _FAR, _FAR).clamp(max=_FAR).sum(0)


def one_key(x: Weights, sign: int, where: Tensor) -> Tensor:
    """Score [n] of adding (sign 1) or leaving out (-1) one key, in the rows where it is `where` [R, n]."""
    w = x.p.masked_fill(~where, 0.0) * sign
    e, ret = x.error, x.returned
    cross = (e * ret).sum(-1, keepdim=True) - e @ x.v.t()
    size = ret.square().sum(-1, keepdim=True) - 2 * ret @ x.v.t() + x.v.square().sum(-1)
    square = e.square().sum(-1, keepdim=True) + 2 * w * cross + w.square() * size
    score = total(x, square.clamp(min=0.0), w)
    return score.masked_fill(~where.any(0), _FAR)


def prefix(x: Weights, cuts: Tensor, seen: bool = True) -> tuple[Tensor, Tensor]:
    """Weight [R, C] of the keys before each cut, and n - w * returned [R, C, D_v] of them."""
    p = x.p.masked_fill(~x.seen, 0.0) if seen else x.p
    if len(cuts) > 1 and int(cuts[0]) == 0 and bool((cuts.diff() == 1).all()) and int(cuts[-1]) <= p.shape[1]:
        # One key between cuts: sums of what each adds.
        p, v = p[:, : int(cuts[-1])], x.v[: int(cuts[-1])]
        w, n = (torch.cat([y[:, :1] * 0, y.cumsum(1)], 1) for y in (p, p.unsqueeze(-1) * v))
        return w, n - w.unsqueeze(-1) * x.returned.unsqueeze(1)
    ends = torch.cat([cuts[:1], cuts]).clamp(max=p.shape[1])
    blocks = [slice(int(a), int(b)) for a, b in pairwise(ends)]
    w = torch.stack([p[:, b].sum(-1) for b in blocks], 1).cumsum(1)
    n = torch.stack([p[:, b] @ x.v[b] for b in blocks], 1).cumsum(1)
    return w, n - w.unsqueeze(-1) * x.returned.unsqueeze(1)


def ranges(x: Weights, cuts: Tensor, sign: int) -> Tensor:
    """Score [C, C] of the keys from cut a (first axis) to cut b: lost (sign -1), or counted twice (1)."""
    w, m = prefix(x, cuts)
    found = torch.zeros(len(cuts), len(cuts), dtype=torch.float64)
    for r in range(len(x.rows)):
        # What is left is e - sign * (m_b - m_a).
        end = x.error[r] - sign * m[r]
        left = _distances(end, sign * m[r]).t()
        change = sign * (w[r].unsqueeze(0) - w[r].unsqueeze(1))
        found += total(_row(x, r), left.unsqueeze(0), change.unsqueeze(0))
    return found.masked_fill(cuts.unsqueeze(1) >= cuts.unsqueeze(0), _FAR)


def kept(x: Weights, cuts: Tensor) -> Tensor:
    """Score [C, C] of only the keys from cut a (first axis) to cut b being seen."""
    w, m = prefix(x, cuts)
    found = torch.zeros(len(cuts), len(cuts), dtype=torch.float64)
    for r in range(len(x.rows)):
        # (s + W) returned - N with s the sink's weight: nothing else is left of the row.
        end = (1 - x.bare[r]) * x.returned[r] - m[r]
        left = _distances(end, m[r]).t()
        change = w[r].unsqueeze(0) - w[r].unsqueeze(1) - x.bare[r]
        found += total(_row(x, r), left.unsqueeze(0), change.unsqueeze(0))
    return found.masked_fill(cuts.unsqueeze(1) >= cuts.unsqueeze(0), _FAR)


def parts(x: Weights, ranks: int, sign: int) -> Tensor:
    """Score [ranks] of every Nth key lost or counted twice, from key 0, 1, ... N - 1 on."""
    rows, count = x.p.shape
    missing = -count % ranks
    p = pad(x.p.masked_fill(~x.seen, 0.0), (0, missing)).view(rows, -1, ranks)
    v = pad(x.v, (0, 0, 0, missing)).view(-1, ranks, x.v.shape[1])
    w, n = p.sum(1), torch.einsum("rmk,mkd->rkd", p, v)
    left = x.error.unsqueeze(1) + sign * (w.unsqueeze(-1) * x.returned.unsqueeze(1) - n)
    return total(x, left.square().sum(-1), sign * w)


def other_values(x: Weights) -> Tensor:
    """Score [n] of one key's value being another, whichever: the same in every row."""
    p = x.p.masked_fill(~x.seen, 0.0) / x.noise.unsqueeze(-1)
    e = x.error / x.noise.unsqueeze(-1)
    found = (p.t() @ e).square().sum(-1) / p.square().sum(0).clamp(min=1e-300)
    out = (e.square().sum() - found).clamp(min=0.0)
    zero = torch.zeros(len(x.rows), 1, dtype=torch.float64)
    lse = _lse_score(x, zero)
    rest = lse.sum() if isinstance(lse, Tensor) else torch.tensor(lse)
    return (out + rest).masked_fill(~x.seen.any(0), _FAR)


def value_of(x: Weights, key: int) -> Tensor:
    """The value [D_v] of `key` that fits best where only it is another."""
    p, scale = x.p[:, key].masked_fill(~x.seen[:, key], 0.0), x.noise.square()
    found: Tensor = x.v[key] + (p / scale) @ x.error / (p.square() / scale).sum().clamp(min=1e-300)
    return found


def foreign_key(x: Weights, lost: bool) -> Tensor:
    """Score of one unknown key in the place of key j [n] (`lost`), or beside all of them [1].

    The log-sum-exp tells its weight in each row; its value is the same in every row. FAR without a log-sum-exp.
    """
    growth = x.growth
    if growth is None:
        return torch.full((x.p.shape[1] if lost else 1,), _FAR, dtype=torch.float64)
    a, scale = _numerator(x, growth), 1 / (x.noise * (1 + growth)).square()
    p = x.p.masked_fill(~x.seen, 0.0) if lost else torch.zeros(len(x.rows), 1, dtype=torch.float64)
    v = x.v if lost else x.v[:1] * 0
    u = growth.unsqueeze(-1) + p
    c = (scale.unsqueeze(-1) * u.square()).sum(0)
    g = (scale.unsqueeze(-1) * u).t() @ a + (scale.unsqueeze(-1) * u * p).sum(0).unsqueeze(-1) * v
    whole = (scale.unsqueeze(-1) * (a.square().sum(-1, keepdim=True) + 2 * p * (a @ v.t()))).sum(0)
    whole = whole + (scale.unsqueeze(-1) * p.square()).sum(0) * v.square().sum(-1)
    score = (whole - g.square().sum(-1) / c.clamp(min=1e-300)).clamp(min=0.0)
    negative = (u < -1e-6).any(0)
    unseen = ~x.seen.any(0) if lost else torch.zeros(1, dtype=torch.bool)
    return score.nan_to_num(_FAR, _FAR, _FAR).masked_fill(negative | unseen, _FAR)


def foreign_value(x: Weights, key: int | None) -> Tensor:
    """The value [D_v] of the unknown key, in the place of `key` or beside all."""
    growth = x.growth
    assert growth is not None
    a, scale = _numerator(x, growth), 1 / (x.noise * (1 + growth)).square()
    u = growth
    if key is not None:
        p = x.p[:, key].masked_fill(~x.seen[:, key], 0.0)
        u, a = growth + p, a + p.unsqueeze(-1) * x.v[key]
    found: Tensor = (scale * u) @ a / (scale * u.square()).sum().clamp(min=1e-300)
    return found


def plausible(x: Weights, key: int | None, value: Tensor) -> bool:
    """Whether an unknown key in the place of `key`, or beside all, may be one that somebody stored.

    Its value is no smaller than a tenth of the usual one, and some key no longer than twice the longest given has its
    weights.
    """
    growth = x.growth
    assert growth is not None
    if not float(value.norm()) > 0.1 * float(x.v[: x.count].norm(dim=-1).median()):
        return False
    weight = growth if key is None else growth + x.p[:, key].masked_fill(~x.seen[:, key], 0.0)
    if not bool((weight > 0).all()):
        return False
    s = weight.log() + x.full
    if x.soft_cap is not None:
        if not bool((s.abs() < x.soft_cap).all()):
            return True  # at the cap, which says nothing of the key's length
        s = torch.atanh(s / x.soft_cap) * x.soft_cap
    return float((torch.linalg.pinv(x.q, rtol=1e-6) @ s).norm()) <= 2 * x.largest_key


def other_weight(x: Weights) -> Tensor:
    """Score [n] of one key's weight being another (its K, not its V); the log-sum-exp tells which."""
    growth = x.growth
    if growth is None:
        return torch.full((x.p.shape[1],), _FAR, dtype=torch.float64)
    a, scale = _numerator(x, growth), 1 / (x.noise * (1 + growth)).square()
    left = a.square().sum(-1, keepdim=True) - 2 * growth.unsqueeze(-1) * (a @ x.v.t())
    left = (left + growth.square().unsqueeze(-1) * x.v.square().sum(-1)).clamp(min=0.0)
    return (scale.unsqueeze(-1) * left).sum(0).masked_fill(~x.seen.any(0), _FAR)


def _numerator(x: Weights, growth: Tensor) -> Tensor:
    """n [R, D_v] of what was added, as out and log-sum-exp say together."""
    return (1 + growth).unsqueeze(-1) * x.returned - x.out


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances [A, B] of a [A, D] and -b [B, D]: |a + b|^2."""
    square = a.square().sum(-1).unsqueeze(1) + b.square().sum(-1).unsqueeze(0) + 2 * a @ b.t()
    return square.clamp(min=0.0)


def _row(x: Weights, r: int) -> Weights:
    return x.at(torch.tensor([r]))


@torch.no_grad()
def pages(x: Weights, size: int) -> dict[str, Tensor]:
    """Scores [P, P] of page a (first axis) being read where page b's data are, by what of it is: "kv", "k", "v".

    And "swap": K of the two pages exchanged. Whole pages of the request only. Of "v" and "swap" the squares are those
    of pages that are not alike.
    """
    count = x.count // size
    p = x.p[:, : count * size].view(len(x.rows), count, size)
    seen = x.seen[:, : count * size].view(len(x.rows), count, size)
    v = x.v[: count * size].view(count, size, -1)
    gram = v @ v.transpose(1, 2)
    found = {name: torch.zeros(count, count, dtype=torch.float64) for name in ("kv", "k", "v", "swap")}
    for r in range(len(x.rows)):
        one = _row(x, r)
        for name, score in _pages_of_row(one, p[r], seen[r], v, gram).items():
            found[name] += score
    same = torch.eye(count, dtype=torch.bool)
    whole = seen.all(-1).any(0)
    return {n: s.masked_fill(same, _FAR).masked_fill(~whole.unsqueeze(1), _FAR) for n, s in found.items()}


def other_pages(x: Weights, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Score [A, B] of whole page a of the request being read where page b of others lies.

    k [B * size, D_qk], v [B * size, D_v]: of those, descaled.
    """
    count = x.count // size
    s = x.q @ k.t()
    if x.soft_cap is not None:
        s = (s / x.soft_cap).tanh() * x.soft_cap
    weights = (s - x.full.unsqueeze(-1)).exp().view(len(x.rows), -1, size)
    seen = x.seen[:, : count * size].view(len(x.rows), count, size)
    own = x.p[:, : count * size].view(len(x.rows), count, size) * seen
    values, own_values = v.view(-1, size, v.shape[-1]), x.v[: count * size].view(count, size, -1)
    found = torch.zeros(count, weights.shape[1], dtype=torch.float64)
    for r in range(len(x.rows)):
        ret = x.returned[r]
        (w, m), (own_w, own_m) = (
            (p.sum(-1), (p.unsqueeze(1) @ y).squeeze(1) - p.sum(-1, keepdim=True) * ret)
            for p, y in ((weights[r], values), (own[r], own_values))
        )
        left = _distances(x.error[r] + own_m, -m)
        found += total(_row(x, r), left.unsqueeze(0), (w.unsqueeze(0) - own_w.unsqueeze(1)).unsqueeze(0))
    return found.masked_fill(~seen.all(-1).any(0).unsqueeze(1), _FAR)


def _pages_of_row(x: Weights, p: Tensor, seen: Tensor, v: Tensor, gram: Tensor) -> dict[str, Tensor]:
    e, ret = x.error[0], x.returned[0]
    own = p * seen
    weight, own_weight = p.sum(-1), own.sum(-1)
    n, own_n = (torch.einsum("bi,bid->bd", y, v) for y in (p, own))
    grown = weight.unsqueeze(0) - own_weight.unsqueeze(1)
    m, own_m = n - weight.unsqueeze(-1) * ret, own_n - own_weight.unsqueeze(-1) * ret
    both = _distances(e + own_m, -m)
    # K of page b with V of page a: u_ab = sum_i (p_b,i - p_a,i) v_a,i.
    y, z = v @ e, v @ ret
    ey, ez = p @ y.t(), p @ z.t()
    eu = ey.t() - (own * y).sum(-1).unsqueeze(1)
    ru = ez.t() - (own * z).sum(-1).unsqueeze(1)
    squared = _squares(p, own, gram)
    t = e.square().sum() + 2 * grown * (e @ ret) + grown.square() * ret.square().sum()
    k = t - 2 * (eu + grown * ru) + squared
    swap = e.square().sum() - 2 * (eu + eu.t()) + squared + squared.t()
    # V of page b with the weights of page a: sum_i p_a,i (v_b,i - v_a,i).
    ev = own @ y.t() - (own * y).sum(-1).unsqueeze(1)
    cross = _pairs(own) @ gram.flatten(1).t()
    only_v = e.square().sum() - 2 * ev + cross + cross.diagonal().unsqueeze(1)
    zero = torch.zeros_like(grown)
    return {
        "kv": total(x, both.unsqueeze(0), grown.unsqueeze(0)),
        "k": total(x, k.clamp(min=0.0).unsqueeze(0), grown.unsqueeze(0)),
        "v": total(x, only_v.clamp(min=0.0).unsqueeze(0), zero.unsqueeze(0)),
        "swap": total(x, swap.clamp(min=0.0).unsqueeze(0), zero.unsqueeze(0)),
    }


def _squares(p: Tensor, own: Tensor, gram: Tensor) -> Tensor:
    """[P, P]: squared length of sum_i (p_b,i - own_a,i) v_a,i."""
    first = gram.flatten(1) @ _pairs(p).t()
    mixed = torch.einsum("ai,aij->aj", own, gram)
    return first - 2 * mixed @ p.t() + (mixed * own).sum(-1, keepdim=True)


def _pairs(p: Tensor) -> Tensor:
    """Products of two weights of a page [P, size * size]."""
    return (p.unsqueeze(2) * p.unsqueeze(1)).flatten(1)
