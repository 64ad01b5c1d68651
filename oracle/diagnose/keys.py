"""Hypotheses about keys: missing, extra, stale, exchanged, and ranges of them; proposed by linear algebra.

Where several requests fail, the best proposal of each is made for all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oracle.bits import bits
from oracle.diagnose import scores
from oracle.diagnose.conventions import window_of
from oracle.diagnose.edits import Edit, also, hypothesis_of, without
from oracle.diagnose.hypothesis import Hypothesis
from oracle.diagnose.model import Kind
from oracle.diagnose.quick import times
from oracle.diagnose.rows import Row, describe_rows
from oracle.diagnose.scene import Scene
from oracle.diagnose.weights import Weights, weights
from oracle.problem import Problem
from oracle.rounding import widen

REQUESTS = 4
"""Failing requests for which keys are proposed; with more of them, a fault of single keys is not looked for."""
_ROWS = 16
_RANGE_ROWS = 4
_PAGE_ROWS = 2
_CUTS = 256
_PAGES = 512
_BEST = 2
_RANKS = range(2, 9)
ALIKE = 5.0
"""Difference of two scores that does not tell which of two keys it is: a decisive one, as noise is counted here."""
_EVIDENCE = 3
"""Rows of a kv head that it takes to say something about an unknown key."""


def hypotheses(scene: Scene, tokens: Sequence[int]) -> Iterator[Hypothesis]:
    """Proposals for the failing rows among `tokens`."""
    cells = _cells(scene, tokens, scene.failing)
    if not cells or len(cells) > REQUESTS:
        return
    # What is stored is the same for every row that reads it, also for those whose error is within budget.
    failing_heads = scene.failing.any(0).view(scene.subject.problem.kv_heads, -1).any(1)
    reading = failing_heads.repeat_interleave(scene.subject.problem.group).expand_as(scene.failing)
    readers = _cells(scene, tokens, reading)
    edits: dict[int, list[Edit]] = {}
    for request, by_head in cells.items():
        found = _weights(scene, request, by_head)
        edits[request] = [*_edits(scene, found), *_unknown(_few(_weights(scene, request, readers[request]), _ROWS))]
        if len(cells) == 1:
            yield from _windows(scene, found[0])
    if len(edits) == 1:
        ((request, own_edits),) = edits.items()
        for edit in own_edits:
            yield hypothesis_of(scene, {request: edit})
        return
    first: dict[int, dict[str, Edit]] = {r: {} for r in edits}
    for request, own_edits in edits.items():
        for edit in own_edits:
            first[request].setdefault(edit.name, edit)
    for name in next(iter(first.values())):
        if all(name in named for named in first.values()):
            yield hypothesis_of(scene, {r: named[name] for r, named in first.items()})


def _weights(scene: Scene, request: int, by_head: Mapping[int, Sequence[tuple[int, int]]]) -> list[Weights]:
    return [
        weights(scene.subject, scene.extended, scene.base.solution, request, kv_head, own)
        for kv_head, own in by_head.items()
    ]


def _few(found: Sequence[Weights], most: int) -> list[Weights]:
    return [x.few(most) for x in found]


def _cells(scene: Scene, tokens: Sequence[int], wanted: Tensor) -> dict[int, dict[int, list[tuple[int, int]]]]:
    """The (token, query head) that are `wanted` and have finite results, by request and kv head."""
    subject = scene.subject
    finite = widen(subject.out).isfinite().all(-1)
    if subject.lse is not None:
        finite &= widen(subject.lse).isfinite()
    finite &= scene.base.solution.lse.isfinite()
    found: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for row in describe_rows(subject.problem, tokens):
        for head in (wanted[row.token] & finite[row.token]).nonzero().flatten().tolist():
            by_head = found.setdefault(row.request, {})
            by_head.setdefault(head // subject.problem.group, []).append((row.token, head))
    return found


def _best(score: Tensor, most: int = _BEST) -> list[int]:
    """Indices of the least scores, best first; none that is impossible."""
    flat = score.flatten()
    if not flat.numel():
        return []
    least = flat.topk(min(most, flat.numel()), largest=False).values[-1].clamp(max=1e29)
    near = (flat <= least).nonzero().flatten()
    order = near[flat[near].argsort(stable=True)][:most].tolist()
    return [i for i in order if float(flat[i]) < 1e29]


def _edits(scene: Scene, found: Sequence[Weights]) -> Iterator[Edit]:
    few = _few(found, _ROWS)
    yield from _tails(few)
    yield from _single(few)
    yield from _ranges(scene, _few(found, _RANGE_ROWS))
    yield from _ranks(few)
    yield from _pages(scene, _few(found, _PAGE_ROWS))
    yield from _pool_pages(scene, _few(found, _PAGE_ROWS))


def _sum(found: Sequence[Weights], score: Callable[[Weights], Tensor]) -> Tensor:
    total = score(found[0])
    for x in found[1:]:
        total = total + score(x)
    return total


def _name(x: Weights, key: int) -> str:
    return f"key {key}" if key < x.count else f"the slot {key - x.count} past the end"


def _single(found: Sequence[Weights]) -> Iterator[Edit]:
    first = found[0]
    score = _sum(found, lambda x: scores.one_key(x, -1, x.seen))
    for key in _best(score):
        which, alike = _which(first, score, key)
        said = {"key": key, "alike": alike}
        yield Edit("missing", Kind.MISSING_KEY, f"missing_key: {which} is not seen", said, without(key))
    score = _sum(found, lambda x: scores.one_key(x, 1, x.seen))
    for key in _best(score):
        which, alike = _which(first, score, key)
        yield Edit(
            "twice",
            Kind.EXTRA_KEY,
            f"extra_key: {which} counts twice",
            {"key": key, "times": 2, "alike": alike},
            lambda row, seen, key=key: torch.cat([seen, seen[seen == key]]),  # type: ignore[misc]
        )
    score = _sum(found, lambda x: scores.one_key(x, 1, ~x.seen))
    for key in _best(score):
        past = key >= first.count
        kind = Kind.STALE_KEY if past else Kind.EXTRA_KEY
        which, alike = _which(first, score, key)
        yield Edit(
            "hidden",
            kind,
            f"{kind}: {which} is seen",
            {"key": key, "past_the_end": past, "alike": alike},
            also(key),
            stale=past,
            rank=0 if past else 1,
        )


def _which(x: Weights, score: Tensor, key: int) -> tuple[str, list[int]]:
    """A key in words, and the others that explain as well as it does: where there are any, none of them is named."""
    near = (score <= score[key] + ALIKE).nonzero().flatten()
    alike = [other for other in near.tolist() if (other >= x.count) == (key >= x.count)]
    if len(alike) == 1:
        return _name(x, key), []
    noun = "keys" if key < x.count else "slots past the end"
    shown = [other - (x.count if other >= x.count else 0) for other in alike[:4]]
    return f"one of the {noun} {', '.join(map(str, shown))}{', ...' if len(alike) > 4 else ''}", alike[:16]


def _tails(found: Sequence[Weights]) -> Iterator[Edit]:
    """Slots past the end: the first few, all."""
    first = found[0]
    for count in sorted({1, first.stale} - {0}):
        if count <= first.stale:
            tail = tuple(range(first.count, first.count + count))
            noun = "the slot" if count == 1 else f"{count} slots"
            yield Edit(
                f"tail {'one' if count == 1 else 'all'}",
                Kind.STALE_KEY,
                f"stale_key: {noun} past the request's last key {'is' if count == 1 else 'are'} seen",
                {"slots": count},
                also(*tail),
                stale=True,
            )


def _windows(scene: Scene, x: Weights) -> Iterator[Hypothesis]:
    """A window of any number of keys: the one whose first key explains one row best."""
    if not scene.subject.problem.causal:
        return
    row = x.rows[0]
    one = x.at(torch.tensor([0]))
    free = replace(one, seen=torch.arange(x.p.shape[1]).unsqueeze(0) < row.hi)
    cuts = torch.arange(row.hi + 1)
    w, m = scores.prefix(free, cuts)
    # Keys cut .. hi - 1 are seen: (s + W) returned - N is left.
    rest = (1 - one.bare[0]) * one.returned[0] - (m[0, -1] - m[0])
    change = w[:, -1:] - w - one.bare[0]
    score = scores.total(one, rest.square().sum(-1).unsqueeze(0), change)
    asked = scene.subject.problem.window
    for cut in _best(score[:-1], 1):
        keys = row.position - cut + 1
        if keys >= 1 and keys != asked:
            yield window_of(asked, keys)


def _ranges(scene: Scene, found: Sequence[Weights]) -> Iterator[Edit]:
    first = found[0]
    step = max(16, -(-first.count // _CUTS))
    cuts = torch.tensor(sorted({*range(0, first.count, step), first.count}))
    size = scene.around.page_size
    for sign, name in ((-1, "lost"), (1, "counted twice")):
        for a, b in _refined(found, cuts, step, lambda x, c, sign=sign: scores.ranges(x, c, sign)):  # type: ignore[misc]
            if b - a > 1:
                yield _range(a, b, sign, name, size)
    for a, b in _refined(found, cuts, step, scores.kept):
        yield Edit(
            "kept",
            Kind.SPLIT,
            f"split: only the keys {a} to {b - 1} are seen",
            {"first": a, "last": b - 1},
            lambda row, seen, a=a, b=b: seen[(seen >= a) & (seen < b)],  # type: ignore[misc]
            rank=1,
        )


def _range(a: int, b: int, sign: int, name: str, size: int | None) -> Edit:
    lost = sign < 0
    page = size is not None and a % size == 0 and b - a == size
    what = f"page {a // (size or 1)} (keys {a} to {b - 1}) is" if page else f"keys {a} to {b - 1} are"
    kind = Kind.PAGE if page else Kind.SPLIT

    def pick(row: Row, seen: Tensor) -> Tensor:
        inside = (seen >= a) & (seen < b)
        return seen[~inside] if lost else torch.cat([seen, seen[inside]])

    return Edit(name, kind, f"{kind}: {what} {name}", {"first": a, "last": b - 1}, pick)


def _refined(
    found: Sequence[Weights], cuts: Tensor, step: int, score: Callable[[Weights, Tensor], Tensor]
) -> list[tuple[int, int]]:
    """The best range of keys, its ends moved by less than a step."""
    coarse = _sum(found, lambda x: score(x, cuts))
    best = _best(coarse, 1)
    if not best:
        return []
    a, b = (int(cuts[i]) for i in divmod(best[0], len(cuts)))
    near = sorted({*range(max(0, a - step), a + step + 1), *range(b - step, min(found[0].count, b + step) + 1)})
    fine = torch.tensor([x for x in near if x >= 0])
    best = _best(_sum(found, lambda x: score(x, fine)), 1)
    return [(int(fine[best[0] // len(fine)]), int(fine[best[0] % len(fine)]))] if best else []


def _ranks(found: Sequence[Weights]) -> Iterator[Edit]:
    """Every Nth key lost: one rank's part."""
    names = [(ranks, rank) for ranks in _RANKS for rank in range(ranks)]

    def score(x: Weights, sign: int) -> Tensor:
        return torch.cat([scores.parts(x, ranks, sign) for ranks in _RANKS])

    for sign, what in ((-1, "lost"), (1, "counted twice")):
        for best in _best(_sum(found, lambda x, sign=sign: score(x, sign)), 1):  # type: ignore[misc]
            ranks, rank = names[best]

            def pick(row: Row, seen: Tensor, n: int = ranks, r: int = rank, sign: int = sign) -> Tensor:
                own = seen % n == r
                return seen[~own] if sign < 0 else torch.cat([seen, seen[own]])

            yield Edit(
                f"rank {what}",
                Kind.SPLIT,
                f"split: the part of rank {rank} of {ranks} is {what}",
                {"rank": rank, "ranks": ranks},
                pick,
            )


def _pages(scene: Scene, found: Sequence[Weights]) -> Iterator[Edit]:
    size = scene.around.page_size
    if size is None or size == 1 or found[0].count // size < 2 or found[0].count // size > _PAGES:
        return
    total: dict[str, Tensor] = {}
    for x in found:
        for name, score in scores.pages(x, size).items():
            total[name] = total[name] + score if name in total else score
    count = next(iter(total.values())).shape[0]
    for name, score in total.items():
        for best in _best(score):
            a, b = divmod(best, count)
            yield _page_edit(name, a, b, size)


def _page_edit(name: str, a: int, b: int, size: int) -> Edit:
    """Page a's keys are those of page b. Of K alone, the values stay: such an edit is made of the operands."""
    words = {
        "kv": f"page: page {b} is read where page {a} belongs",
        "k": f"page: K of page {b} is read where that of page {a} belongs",
        "v": f"page: V of page {b} is read where that of page {a} belongs",
        "swap": f"page: K of the pages {a} and {b} is exchanged",
    }
    return Edit(
        f"page {name}",
        Kind.PAGE,
        words[name],
        {"page": a, "read": b, "operand": {"kv": "k and v", "swap": "k"}.get(name, name)},
        lambda row, seen: seen,
        rank={"kv": 0, "swap": 1, "k": 2, "v": 2}[name],
    )


def _pool_pages(scene: Scene, found: Sequence[Weights]) -> Iterator[Edit]:
    """A page of the request read from a page of the pool that is none of the request's."""
    around, problem = scene.around, scene.subject.problem
    size, pages, pool_k, pool_v = around.page_size, around.pages, around.pool_k, around.pool_v
    if size is None or pages is None or pool_k is None or pool_v is None or pool_k.dtype != problem.k.dtype:
        return
    own = pages[found[0].request]
    others = [page for page in range(pool_k.shape[0]) if page not in set(own)][:_PAGES]
    if not others or problem.kv_positions is not None or found[0].count < size or not _shared(problem):
        return
    k, v = (
        times(x[torch.tensor(others)].flatten(0, 1), descale)
        for x, descale in ((pool_k, problem.k_descale), (pool_v, problem.v_descale))
    )
    score = _sum(found, lambda x: scores.other_pages(x, k[:, x.kv_head], v[:, x.kv_head], size))
    for best in _best(score, 1):
        a, b = best // len(others), others[best % len(others)]
        alike = [x for x in others if x != b and _same(pool_k, x, b) and _same(pool_v, x, b)]
        more = f" (or another of {len(alike) + 1} that are alike)" if alike else ""
        yield Edit(
            "page pool",
            Kind.PAGE,
            f"page: page {b} of the pool{more} is read where page {a} of the request, {own[a]} of the pool, belongs",
            {"page": a, "pool": b, "alike": alike, "operand": "k and v"},
            lambda row, seen: seen,
            rank=1,
        )


def _shared(problem: Problem) -> bool:
    """Whether no key has a descale of its own."""
    given = (problem.k_descale, problem.v_descale)
    return all(not isinstance(x, Tensor) or x.numel() == 1 or x.shape[0] == 1 for x in given)


def _same(pool: Tensor, a: int, b: int) -> bool:
    return bool((bits(pool[a].contiguous()) == bits(pool[b].contiguous())).all())


def _unknown(found: Sequence[Weights]) -> Iterator[Edit]:
    """Keys or values that are not what was given, wherever they come from."""
    rows = sum(len(x.rows) for x in found)
    for key in _best(_sum(found, scores.other_values)):
        values = {x.kv_head: scores.value_of(x, key) for x in found}
        sources = {x.kv_head: _nearest(x, values[x.kv_head], key) for x in found}
        if len(set(sources.values())) == 1:
            source = next(iter(sources.values()))
            yield Edit(
                "value of another",
                Kind.STALE_KEY,
                f"stale_key: V of key {key} is that of {_name(found[0], source)}",
                {"key": key, "operand": "v", "source": source},
                lambda row, seen: seen,
                replaced={key: {x.kv_head: x.v[source] for x in found}},
                rank=1,
            )
        if all(len(x.rows) >= _EVIDENCE for x in found):
            yield Edit(
                "other value",
                Kind.STALE_KEY,
                f"stale_key: V of key {key} is not the one given",
                {"key": key, "operand": "v"},
                lambda row, seen: seen,
                replaced={key: values},
                fitted=len(found) * found[0].v.shape[1],
                rank=2,
            )
    if any(x.growth is None or len(x.rows) < _EVIDENCE for x in found):
        return
    for key in _best(_sum(found, scores.other_weight), 1):
        yield Edit(
            "other weight",
            Kind.STALE_KEY,
            f"stale_key: K of key {key} is not the one given",
            {"key": key, "operand": "k"},
            without(key),
            unknown={x.kv_head: x.v[key] for x in found},
            fitted=rows,
            rank=2,
        )
    yield from _foreign(found, rows)


def _foreign(found: Sequence[Weights], rows: int) -> Iterator[Edit]:
    dims = len(found) * found[0].v.shape[1]
    for key in _best(_sum(found, lambda x: scores.foreign_key(x, lost=True))):
        values = {x.kv_head: scores.foreign_value(x, key) for x in found}
        if not all(scores.plausible(x, key, values[x.kv_head]) for x in found):
            continue
        sources = {_nearest(x, values[x.kv_head], key) for x in found}
        if len(sources) == 1:
            source = next(iter(sources))
            yield Edit(
                "key of another",
                Kind.STALE_KEY,
                f"stale_key: key {key} has K and V of {_name(found[0], source)}",
                {"key": key, "operand": "k and v", "source": source},
                lambda row, seen, key=key, source=source: torch.where(seen == key, source, seen),  # type: ignore[misc]
                stale=source >= found[0].count,
                rank=1,
            )
        yield Edit(
            "foreign in place",
            Kind.STALE_KEY,
            f"stale_key: K and V of key {key} are not those given",
            {"key": key, "operand": "k and v"},
            without(key),
            unknown=values,
            fitted=rows + dims,
            rank=3,
        )
    values = {x.kv_head: scores.foreign_value(x, None) for x in found}
    if all(scores.plausible(x, None, values[x.kv_head]) for x in found):
        yield Edit(
            "foreign beside",
            Kind.EXTRA_KEY,
            "extra_key: a key that is none of those given is seen as well",
            {"key": None},
            lambda row, seen: seen,
            unknown=values,
            fitted=rows + dims,
            rank=3,
        )


def _nearest(x: Weights, value: Tensor, key: int) -> int:
    """The key whose value is nearest to `value`, other than `key` itself."""
    distance = (x.v - value).square().sum(-1)
    distance[key] = math.inf
    return int(distance.argmin())


# ------------------------------------------------- edits as hypotheses
