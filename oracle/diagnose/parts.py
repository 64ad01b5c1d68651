"""Hypotheses about how a call was cut up: splits and their merge, rescaling, the first maximum, what masks leave.

Parts and tiles are those of the surroundings; where these do not say, whole tiles of the target's precision, spread as
evenly as they go over its splits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.budget import Bounds
from oracle.budget.formats import format_named
from oracle.diagnose.hypothesis import After, Bounded, Hypothesis
from oracle.diagnose.model import Kind
from oracle.diagnose.quick import View, weighted
from oracle.diagnose.rows import Row, describe_rows
from oracle.diagnose.scene import Scene
from oracle.diagnose.weights import values
from oracle.problem import Problem
from oracle.rounding import widen

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)
FLUSHED = (math.log(2.0**-126), math.log(2.0**-150))
"""Exponents below which float32 has no normal number, and no number at all."""
_TILES = (16, 32, 64, 128, 256)


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """All of them; none depends on what was returned."""
    yield from _merges(scene)
    yield from _maxima(scene)
    yield from _rescales(scene)
    yield from _masks(scene)


@dataclass(frozen=True, eq=False)
class State:
    """Partial states [N, H] of one row: logarithms of weights, and outputs [N, H, D_v]."""

    lse: Tensor
    out: Tensor


def _states(s: Tensor, v: Tensor, cuts: Sequence[int]) -> State:
    """States of a row's keys between cuts. s [H, n] natural logits, v [n, Hkv, D_v]."""
    lses, outs = [], []
    for a, b in pairwise(cuts):
        part = s[:, a:b]
        lse = part.logsumexp(-1) if b > a else s.new_full(s.shape[:1], -math.inf)
        weight = (part - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        lses.append(lse)
        outs.append(weighted(weight, v[a:b]))
    return State(torch.stack(lses), torch.stack(outs))


def row_by_row(
    one: Callable[[Row, Tensor, Tensor, Solution, Tensor | None], tuple[Tensor, Tensor]],
) -> Callable[..., Solution]:
    """`after` of a hypothesis that works out each row by itself.

    one(row, logits [H, n] and values [n, Hkv, D_v] of the keys that it sees, its solution, sinks [H]) gives out and the
    log-sum-exp without the sink.
    """

    def after(view: View, solution: Solution, rows: Sequence[Row]) -> Solution:
        out, lse = torch.empty_like(solution.out), torch.empty_like(solution.lse)
        sinks = None if view.sinks is None else view.sinks.double()
        for i, row in enumerate(rows):
            own = Solution(solution.out[i], solution.lse[i])
            out[i], lse[i] = one(row, view.logits(i), view.values(i), own, sinks)
        return Solution(out, lse)

    return after


def cuts_of(scene: Scene, row: Row) -> list[int]:
    """Where the parts of a row's request begin, and their end."""
    splits = scene.around.splits
    if splits is not None:
        return [*splits[row.request], row.count]
    precision, page = scene.subject.precision, scene.around.page_size or 1
    columns = -(-row.count // page) * page
    tile = scene.around.tile or precision.tile
    tiles = max(1, -(-columns // tile))
    parts = max(1, min(max(precision.max_splits, precision.ranks), tiles))
    width = -(-tiles // parts) * tile
    return [*range(0, max(row.count, 1), width), row.count]


def seen_cuts(scene: Scene, row: Row) -> list[int]:
    """`cuts_of` as indices into the keys that the row sees."""
    return [min(max(cut - row.lo, 0), row.hi - row.lo) for cut in cuts_of(scene, row)]


def with_sink(lse: Tensor, sinks: Tensor | None, includes: bool) -> Tensor:
    """The log-sum-exp [H] with the sinks counted, if a convention does."""
    return lse if sinks is None or not includes else torch.logaddexp(lse, sinks)


def _merges(scene: Scene) -> Iterator[Hypothesis]:
    problem = scene.subject.problem
    if all(len(cuts_of(scene, row)) <= 2 for row in _first_rows(problem)):
        return
    includes = scene.subject.convention.lse_includes_sink
    for factor, what in (
        (LOG2E, "the exponents of 2 are read as natural"),
        (LN2, "natural exponents are read as of 2"),
    ):
        for sink_too in (False, True):
            yield Hypothesis(
                Kind.MERGE,
                f"merge: in the wrong base, {what}{' (the sink too)' if sink_too else ''}",
                {"factor": factor, "sink": sink_too},
                after=row_by_row(_merged(scene, includes, factor=factor, sink_too=sink_too)),
                rank=1 if sink_too else 0,
            )
            if problem.sinks is None:
                break
    yield Hypothesis(
        Kind.MERGE,
        "merge: parts are averaged, whatever their weights",
        {"weights": "equal"},
        after=row_by_row(_merged(scene, includes, factor=0.0)),
        rank=2,
    )
    yield Hypothesis(
        Kind.MERGE,
        "merge: the weighted parts are not divided by the sum of weights",
        {"normalised": False},
        after=row_by_row(_merged(scene, includes, normalised=False)),
        rank=2,
    )


def _first_rows(problem: Problem) -> list[Row]:
    return describe_rows(problem, [s for s, n in zip(problem.q_starts, problem.q_lens, strict=False) if n])


Merge = Callable[[Row, Tensor, Tensor, Solution, Tensor | None], tuple[Tensor, Tensor]]


def _merged(
    scene: Scene, includes: bool, *, factor: float = 1.0, sink_too: bool = False, normalised: bool = True
) -> Merge:
    """Parts weighted by exp(factor * (lse - top)); the log-sum-exp is that of these weights."""

    def one(row: Row, s: Tensor, v: Tensor, own: Solution, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = _states(s, v, seen_cuts(scene, row))
        top = parts.lse.amax(0)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        top = top.masked_fill(top == -math.inf, 0.0)
        below = (parts.lse - top).masked_fill(parts.lse == -math.inf, -math.inf)
        weight = (below * factor).exp() if factor else torch.ones_like(below)
        weight = weight.masked_fill(parts.lse == -math.inf, 0.0)
        total = weight.sum(0)
        whole = total
        if sinks is not None:
            sink = ((sinks - top) * (factor if sink_too else 1.0)).exp()
            whole = total + sink
        share = weight / (whole if normalised else torch.ones_like(whole))
        out = (share.unsqueeze(-1) * parts.out).nan_to_num(0.0).sum(0)
        return out, top + (whole if includes else total).log()

    return one


def _maxima(scene: Scene) -> Iterator[Hypothesis]:
    """The running maximum starts at 0: weights of logits far below are lost in float32."""
    includes = scene.subject.convention.lse_includes_sink
    out = widen(scene.subject.out)[scene.failing]
    # Where every weight is lost, the start may be any number that is far above the logits.
    nothing = not bool(out.any())
    detail = "maximum: starts at 0, so that weights of logits far below it are lost"
    if nothing:
        largest = float(scene.base.solution.lse[scene.failing].amax())
        detail = f"maximum: starts far above every logit (log-sum-exps are at most {largest:.6g}), all weights are lost"
    for rank, limit in enumerate(FLUSHED):

        def one(
            row: Row, s: Tensor, v: Tensor, own: Solution, sinks: Tensor | None, limit: float = limit
        ) -> tuple[Tensor, Tensor]:
            kept = s.masked_fill(s < limit, -math.inf)
            lse = kept.logsumexp(-1)
            # A sink is merged against a maximum of its own.
            whole = with_sink(lse, sinks, True)
            weight = (kept - whole.masked_fill(whole == -math.inf, 0.0).unsqueeze(-1)).exp()
            return weighted(weight, v), with_sink(lse, sinks, includes)

        yield Hypothesis(
            Kind.MAXIMUM,
            detail,
            {"start": None if nothing else 0.0, "lost_below": None if nothing else limit},
            after=row_by_row(one),
            rank=rank,
        )


def _rescales(scene: Scene) -> Iterator[Hypothesis]:
    """What was accumulated is not rescaled to a new maximum, in a part's last tile or in any."""
    includes = scene.subject.convention.lse_includes_sink
    given = scene.around.tile
    sizes = (given,) if given is not None else tuple(dict.fromkeys((scene.subject.precision.tile, *_TILES)))
    for rank, size in enumerate(sizes):
        for last in (True, False):

            def one(
                row: Row,
                s: Tensor,
                v: Tensor,
                own: Solution,
                sinks: Tensor | None,
                size: int = size,
                last: bool = last,
            ) -> tuple[Tensor, Tensor]:
                cuts = seen_cuts(scene, row)
                parts = [_unscaled(s, v, a, b, (row.lo, size), last) for a, b in pairwise(cuts)]
                lse = torch.stack([x for x, _ in parts])
                whole = with_sink(lse.logsumexp(0), sinks, True)
                share = (lse - whole.masked_fill(whole == -math.inf, 0.0)).exp()
                out = (share.unsqueeze(-1) * torch.stack([o for _, o in parts])).sum(0)
                return out, with_sink(lse.logsumexp(0), sinks, includes)

            where = "in the last tile of a part" if last else "in any tile"
            yield Hypothesis(
                Kind.RESCALE,
                f"rescale: the accumulator is not rescaled {where} (of {size} keys)",
                {"tile": size, "last": last},
                after=row_by_row(one),
                rank=2 * rank + (0 if last else 1),
            )


def _unscaled(s: Tensor, v: Tensor, start: int, stop: int, tiles: tuple[int, int], last: bool) -> tuple[Tensor, Tensor]:
    """Log-sum-exp [H] and output [H, D_v] of a part whose accumulator misses a rescale.

    tiles: the position of the first key that the row sees, and keys of a tile, which begin at multiples of it.
    """
    if start >= stop:
        return s.new_full(s.shape[:1], -math.inf), v.new_zeros(s.shape[0], v.shape[2])
    offset, size = tiles
    part = s[:, start:stop]
    tile = (torch.arange(start, stop) + offset) // size
    tile = tile - int(tile[0])
    tops = torch.stack([part[:, tile == i].amax(-1) for i in range(int(tile[-1]) + 1)], 1).cummax(1).values
    top = tops[:, -1]
    # Each weight stays as it was formed, against the maximum of its own tile, or of the last but one.
    against = tops[:, tile]
    if last:
        before = tops[:, -2] if tops.shape[1] > 1 else top
        against = torch.where(tile == tile[-1], top.unsqueeze(-1), before.unsqueeze(-1))
    against = torch.where(against == -math.inf, top.unsqueeze(-1), against)
    total = (part - top.unsqueeze(-1)).exp().sum(-1)
    acc = weighted((part - against).exp(), v[start:stop])
    return top + total.log(), acc / total.unsqueeze(-1)


def _masks(scene: Scene) -> Iterator[Hypothesis]:
    """Hidden keys keep a finite logit: -cap where the cap comes after the mask, else a number."""
    problem = scene.subject.problem
    cap = problem.soft_cap
    fills = [(Kind.MASK, f"mask: hidden keys have the logit {fill:g}", fill) for fill in (0.0, -1.0, -100.0, -1e4)]
    if cap is not None:
        fills.insert(0, (Kind.SOFT_CAP, f"soft_cap: applied after the mask, hidden keys have the logit {-cap:g}", -cap))
    tile = scene.around.tile or scene.subject.precision.tile
    sums = _sums(scene)
    for kind, detail, fill in fills:
        for rank, (which, where) in enumerate(_HIDDEN.items()):
            after, bounded = _also_hidden(scene, sums, which, tile, fill)
            yield Hypothesis(
                kind,
                f"{detail}, {where}" if where else detail,
                {"fill": fill, "hidden": which},
                after=after,
                bounded=bounded,
                whole=True,
                rank=rank + 1,
            )


_HIDDEN = {
    "all": "",
    "past the end": "past the end",
    "request": "of the request",
    "tile": "of tiles that are read",
    "padded tile": "of tiles that are read, past the end with values of 0",
    "blank tile": "of tiles that are read, with values of 0",
}
"""Which hidden keys, and how that is said."""


def _sums(scene: Scene) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Sums of the values, and of their sizes, before each key of a request [n + 1, Hkv, D_v], stale ones included."""
    extended, made = scene.extended, dict[int, tuple[Tensor, Tensor]]()

    def sums(request: int) -> tuple[Tensor, Tensor]:
        if request not in made:
            own = slice(extended.kv_starts[request], extended.kv_starts[request + 1])
            v = values(extended)[own]
            first, second = (torch.cat([x.new_zeros(1, *x.shape[1:]), x.cumsum(0)]) for x in (v, v.abs()))
            made[request] = first, second
        return made[request]

    return sums


def _also_hidden(
    scene: Scene, sums: Callable[[int], tuple[Tensor, Tensor]], which: str, tile: int, fill: float
) -> tuple[After, Bounded]:
    """The hidden keys, or some of them, seen with one logit."""
    subject = scene.subject
    includes = subject.convention.lse_includes_sink
    p_dtype = subject.precision.p_dtype
    relative = 2.0**-18 + (2 * format_named(p_dtype, subject.input_dtype).unit_roundoff if p_dtype else 0.0)

    def hidden(row: Row, group: int) -> tuple[int, Tensor, Tensor]:
        """How many hidden keys are seen, and the means of their values and sizes [Hq, D_v]."""
        total, size = sums(row.request)
        low, high = _extent(which, row, len(total) - 1, tile)
        spans = [(low, row.lo), (row.hi, high)] if which != "past the end" else [(row.count, high)]
        spans = [(a, b) for a, b in spans if b > a]
        count = sum(b - a for a, b in spans)
        # A load that is masked gives 0.
        loaded = {"padded tile": row.count, "blank tile": 0}.get(which, len(total) - 1)
        spans = [(min(a, loaded), min(b, loaded)) for a, b in spans]
        means = [
            sum((x[b] - x[a] for a, b in spans), start=torch.zeros_like(x[0])) / max(count, 1) for x in (total, size)
        ]
        value, magnitude = (x.repeat_interleave(group, 0) for x in means)
        return count, value, magnitude

    def share(lse: Tensor, count: int) -> Tensor:
        """Of the hidden keys, in the whole weight. lse [H], as the convention says."""
        sinks = subject.problem.sinks
        full = lse if sinks is None or includes else torch.logaddexp(lse, sinks.double())
        return torch.sigmoid(fill + math.log(count) - full).unsqueeze(-1)

    def after(view: View, solution: Solution, rows: Sequence[Row]) -> Solution:
        out, lse = solution.out.clone(), solution.lse.clone()
        for i, row in enumerate(rows):
            count, value, _ = hidden(row, view.group)
            if count:
                part = share(lse[i], count)
                out[i] = out[i] * (1 - part) + part * value
                lse[i] = torch.logaddexp(lse[i], torch.tensor(fill + math.log(count), dtype=torch.float64))
        return Solution(out, lse)

    def bounded(own: Bounds, rows: Sequence[Row]) -> Bounds:
        """What hidden keys add: the rounding of their weights and sums."""
        out = own.out.clone()
        for i, row in enumerate(rows):
            count, _, magnitude = hidden(row, subject.problem.group)
            if count:
                out[i] += share(scene.base.solution.lse[row.token], count) * magnitude * relative
        return replace(own, out=out)

    return after, bounded


def _extent(which: str, row: Row, everything: int, tile: int) -> tuple[int, int]:
    """The keys that a kernel reads: of all, of the request, of the tiles that hold a key that is seen."""
    if which.endswith("tile"):
        end = -(-row.hi // tile) * tile
        return row.lo // tile * tile, min(everything, end) if which == "tile" else end
    return 0, row.count if which == "request" else everything
