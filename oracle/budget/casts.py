"""What casting weights makes of a row, carried out: against running maxima that kernels may form the weights with.

Casting a weight errs by a saw-tooth of its logit, which a few maxima at random may all miss: those tried here are fixed
or rise, are near enough to each other to find weights that a step of the format takes for one, and part near-equal
weights into such as round up and such as round down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.budget.arithmetic import Arithmetic, ways
from oracle.budget.formats import FP32, Format
from oracle.budget.rows import Judged
from oracle.precision import RankOwnership, Rounding

_OFFSETS, _PHASES, _PHASE = 4, 7, 0.118
"""Running maxima for which casts are simulated: over one binade; and beside the row's own, so many, so much of a step
of the format apart."""
_SAMPLE = 128
"""Logits that stand for those of a row where their order is asked for, at most."""
_TILES = 4
"""Sizes of tiles for which they are: the smallest allowed, and doubled again and again."""
_CPU_NUMBERS, _GPU_NUMBERS = 1 << 17, 1 << 23
"""Weights cast at a time: what a cache holds, and what keeps a GPU busy."""
_MOST_PARTS = 64
"""Runs of keys whose own maxima are looked at, at most."""


def simulated(found: Judged, a: Arithmetic, p: Tensor, sinks: bool) -> list[Tensor]:
    """Errors of weights cast at several running maxima: each [m, k r, n] like p, which has the dtype of sums."""
    weights, fmt, s = found.weights, a.p, found.logits.value.unsqueeze(1)
    assert fmt is not None
    toward_zero = a.precision.p_rounding is Rounding.TOWARD_ZERO
    # The weight of 1, once scaled, may be no number of the format.
    one = torch.tensor(a.precision.p_scale)
    of_one = float(_cast(one, fmt, toward_zero) / one - 1)
    errors, p, lse = [], p.unsqueeze(1), weights.lse.unsqueeze(1)
    for top in _stacked(_running_maxima(found, a, sinks), p.numel(), p.device):
        # What a weight is in units of p.
        scale = (lse - top).exp_()
        if a.precision.p_scale != 1:
            scale *= a.precision.p_scale
        scale = scale.nan_to_num_(nan=1.0, posinf=1.0).clamp_(2.0**-100, 2.0**100).to(p.dtype)
        x = (p * scale).float()
        error = _cast(x, fmt, toward_zero).sub_(x).to(p.dtype).div_(scale)
        # A key at its maximum has the weight 1; one above it raises the maximum, and has it too.
        highest = s >= top
        error.masked_fill_(highest, 0.0)
        if of_one:
            error += (highest * p).mul_(of_one)
        errors.append(error.flatten(1, 2))
    return errors


def _stacked(tops: Iterator[Tensor], size: int, device: torch.device) -> Iterator[Tensor]:
    """Tensors [m, k, r, 1 | n] joined along k, as many as make sense at a time where each stands for `size` numbers."""
    limit = max(1, (_CPU_NUMBERS if device.type == "cpu" else _GPU_NUMBERS) // max(1, size))
    held: list[Tensor] = []
    for top in tops:
        if held and (sum(x.shape[1] for x in held) >= limit or held[0].shape[3] != top.shape[3]):
            yield torch.cat(held, 1) if len(held) > 1 else held[0]
            held = []
        held.append(top)
    if held:
        yield torch.cat(held, 1) if len(held) > 1 else held[0]


def _running_maxima(found: Judged, a: Arithmetic, sinks: bool) -> Iterator[Tensor]:
    """Running maxima that weights may be formed against: [m, k, r, 1 | n].

    The row's own; some below it, within a binade and within a step of the format; the sink, with which kernels may
    begin; some near both that part the weights into such as round up and such as round down; those of splits and ranks,
    which begin anew; and those of tiles of several sizes, which rise along with the logits where these do. Where logits
    err by steps of a narrow format, those of parts and of the smallest tiles also higher by such an error.
    """
    s = found.logits.value
    if a.precision.p_normalised:
        yield found.weights.full_lse.unsqueeze(1)
        return
    highest = s.amax(-1, keepdim=True)
    highest = highest.masked_fill_(highest == -math.inf, 0.0).unsqueeze(1)
    offsets = torch.arange(_OFFSETS, device=s.device).view(1, -1, 1, 1)
    yield torch.sub(highest, offsets, alpha=math.log(2.0) / _OFFSETS)
    known = [highest]
    if sinks and a.precision.sink_first is not False:
        known.append(found.weights.top.unsqueeze(1))
        yield known[1]
    raised = None
    if a.p is not None:
        phases = _phases(a.p, s.device)
        yield highest - phases
        yield torch.cat([_between(s, top, a.p, a) for top in known], 1)
        if a.coarse_logits:
            # What keys have in common may err, and leaves them farther below one that does not.
            raised = torch.fmin(phases[:, ::3], found.logits.error.amax(-1, keepdim=True).unsqueeze(1))
    for tops in _maxima_of_parts(s, a):
        yield tops
        if raised is not None:
            yield tops + raised
    yield from _maxima_of_tiles(s, a, raised)
    if a.precision.ranks > 1 and a.precision.rank_ownership is not RankOwnership.CONTIGUOUS:
        # The tiles of each rank, whose keys are every N-th one.
        owned = _in_runs(s, a.precision.ranks).transpose(2, 3).flatten(1, 2)
        raised = None if raised is None else raised.repeat_interleave(a.precision.ranks, 2)
        for tops in _maxima_of_tiles(owned, a, raised):
            by_key = tops.unflatten(2, (s.shape[1], -1)).transpose(3, 4).flatten(3)
            yield by_key[..., : s.shape[2]]


def _phases(fmt: Format, device: torch.device) -> Tensor:
    """Distances below a step of the format, of logits: [1, k, 1, 1].

    Weights that lie closer together than a step all err alike, by anything up to half of one, according to where a
    maximum happens to put them; in the middle between two numbers some round up and others down. What is a part of a
    step at the begin of a binade is up to twice that at its end.
    """
    parts = torch.arange(1, _PHASES + 1, dtype=torch.float64, device=device).view(1, -1, 1, 1)
    return parts * (_PHASE * 2 * fmt.unit_roundoff)


def _between(s: Tensor, top: Tensor, fmt: Format, a: Arithmetic) -> Tensor:
    """Maxima near `top` [m, 1, r, 1] against which some weights round up and the others down: [m, k, r, 1].

    Each puts one of the logits, which are the quarters of their order, where the rounding of its weight changes. That
    matters where most are nearly equal: no few maxima at random find the place, and an input may.
    """
    sample = s[..., :: -(-s.shape[2] // _SAMPLE)].sort(-1, descending=True).values
    count = (sample > -math.inf).sum(-1, keepdim=True)
    quarters = torch.arange(5, device=s.device) / 4
    middle = sample.gather(-1, ((count - 1).clamp_(min=0) * quarters).long())
    middle = middle.masked_fill_(middle == -math.inf, 0.0).transpose(1, 2).unsqueeze(-1)
    scale = a.precision.p_scale
    # Just below the largest weight, whose maximum is known.
    x = (middle - top).exp_().mul_(scale * (1 - 2.0**-20)).nan_to_num_().clamp_(2.0**-100, 2.0**100).float()
    turn = _turning_point(x, fmt, a.precision.p_rounding is Rounding.TOWARD_ZERO)
    return middle - (turn.double() / scale).log_()


def _turning_point(x: Tensor, fmt: Format, toward_zero: bool) -> Tensor:
    """The number nearest to float32 x > 0 where its rounding to a narrower format changes, without regard to its range:
    in the middle between two numbers, or a number itself if they are truncated."""
    dropped = 24 + round(math.log2(fmt.unit_roundoff))
    half, bits = 1 << (dropped - 1), x.view(torch.int32)
    changed = (bits + half).bitwise_and_(-1 << dropped) if toward_zero else (bits & (-1 << dropped)).add_(half)
    normal = changed.view(torch.float32)
    if fmt.smallest_normal <= FP32.smallest_normal:
        return normal
    step = 2 * fmt.half_subnormal
    fixed = (x / step).round_().clamp_(min=1) if toward_zero else (x / step).floor_().add_(0.5)
    return torch.where(x < fmt.smallest_normal, fixed.mul_(step), normal)


def _maxima_of_tiles(s: Tensor, a: Arithmetic, raised: Tensor | None) -> Iterator[Tensor]:
    """Those that rise from tile to tile, in either order, for tiles of several sizes; for the smallest ones also higher
    by each of `raised` [m, k, r, 1]: what logits may err by, where that is more than what their tile differs by."""
    tile, n = min(a.precision.tile, s.shape[2]), s.shape[2]
    finest = _in_runs(s, tile).amax(-1)
    runs, sizes = finest.shape[2], [1 << i for i in range(1, _TILES) if tile << i < n]
    # What larger tiles hold, for each of the smallest.
    joined = [_in_runs(finest, size).amax(-1) for size in sizes]
    levels = [finest.unsqueeze(1)] if _TILES else []
    levels += [_spread_out(tops, size, runs) for tops, size in zip(joined, sizes, strict=True)]
    if levels:
        tops = torch.cat(levels, 1)
        found = [
            (tops.flip(-1).cummax(-1).values.flip(-1) if backwards else tops.cummax(-1).values) for backwards in ways(a)
        ]
        if raised is not None:
            found += [running[:, :1] + raised for running in found]
        running = torch.cat(found, 1)
        yield _spread_out(running.masked_fill_(running == -math.inf, 0.0).flatten(1, 2), tile, n).view(
            s.shape[0], -1, s.shape[1], n
        )


def _maxima_of_parts(s: Tensor, a: Arithmetic) -> Iterator[Tensor]:
    """The largest logits of runs of keys, about as many as splits and ranks may make, and of every N-th key:
    [m, 1, r, n].

    Where the runs end is not known: equal ones of several lengths stand for them.
    """
    p, n = a.precision, s.shape[2]
    parts, count = min(p.max_splits * p.ranks, _MOST_PARTS), 2
    while parts > 1 and count < 2 * parts:
        length = -(-n // count)
        tops = _in_runs(s, length).amax(-1)
        yield _spread_out(tops.masked_fill_(tops == -math.inf, 0.0), length, n)
        count *= 2
    if p.ranks > 1 and p.rank_ownership is not RankOwnership.CONTIGUOUS:
        tops = _in_runs(s, p.ranks).amax(2, keepdim=True)
        tops.masked_fill_(tops == -math.inf, 0.0)
        yield tops.expand(-1, -1, -(-n // p.ranks), -1).flatten(2)[..., :n].unsqueeze(1)


def _in_runs(s: Tensor, length: int) -> Tensor:
    """s [m, r, n] as [m, r, runs, length], the last filled up with -inf."""
    whole = F.pad(s, (0, -s.shape[2] % length), value=-math.inf) if s.shape[2] % length else s
    runs: Tensor = whole.unflatten(2, (-1, length))
    return runs


def _spread_out(tops: Tensor, length: int, n: int) -> Tensor:
    """What runs have [m, r, runs], for each of their keys: [m, 1, r, n]."""
    long = tops.unsqueeze(-1).expand(-1, -1, -1, length).flatten(2)
    return long[..., :n].unsqueeze(1)


def _cast(x: Tensor, fmt: Format, toward_zero: bool) -> Tensor:
    """float32 x >= 0 rounded to a narrower format, ties upward, without regard to its range: a simulation."""
    dropped = 24 + round(math.log2(fmt.unit_roundoff))
    half = 0 if toward_zero else 1 << (dropped - 1)
    normal = (x.view(torch.int32) + half).bitwise_and_(-1 << dropped).view(torch.float32)
    if fmt.smallest_normal <= FP32.smallest_normal:
        return normal
    step = 2 * fmt.half_subnormal
    fixed = (x / step).floor_() if toward_zero else (x / step).round_()
    return torch.where(x < fmt.smallest_normal, fixed.mul_(step), normal)
