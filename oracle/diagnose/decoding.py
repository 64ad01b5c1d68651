"""Hypotheses about keys that the decoder reads from the outputs: several of them, of other requests, of the pool.

Tried where nothing else explains what came back. The decoder needs outputs that are a code of the keys, as designed
inputs make them; what it says is verified as every hypothesis is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.diagnose.decode import Change, Key, RowKeys, decode, lines
from oracle.diagnose.hypothesis import Hypothesis
from oracle.diagnose.model import Kind
from oracle.diagnose.rows import Row, describe_rows, key_index, visible
from oracle.diagnose.scene import Scene
from oracle.problem import Problem
from oracle.rounding import widen

ROWS = 4
"""Queries that are decoded."""
_KEYS = 1024
"""Keys and slots beyond which nothing is decoded: the search takes long where values are no code."""
_LINES = 4


def hypotheses(scene: Scene, tokens: Sequence[int]) -> Iterator[Hypothesis]:
    """What the decoder says of the failing rows among `tokens`, if it can tell of each."""
    problem, around = scene.subject.problem, scene.around
    failing = [t for t in tokens if bool(scene.failing[t].any())][:ROWS]
    slots = 0 if around.pool_k is None else around.pool_k.shape[0] * around.pool_k.shape[1]
    whole = problem.kv_positions is None and max(sum(problem.kv_lens), slots) <= _KEYS
    if not whole or not failing or not bool(widen(scene.subject.out)[failing].isfinite().all()):
        return
    decoded = decode(
        problem,
        scene.subject.out,
        page_size=around.page_size,
        pages=around.pages,
        pool_k=around.pool_k,
        pool_v=around.pool_v,
        rows=failing,
        noise=scene.base.bounds.out.nan_to_num(posinf=1e300),
    )
    changes = [_Changes.of(row) for row in decoded]
    if not decoded or any(not c.counts for c in changes):
        return
    # What is the same for all of them is said once, and holds of rows that were not decoded too.
    common = changes[0] if all(c.counts == changes[0].counts for c in changes) else None
    said = lines(decoded if common is None else decoded[:1], around.page_size)
    if common is not None:
        said = [line.replace(f"row {common.token}", f"each row of request {common.request}", 1) for line in said]
    by_row = {(c.token, h): c for c in changes for h in c.heads}
    heads = {h for c in changes for h in c.heads}
    if len({c.heads for c in changes}) > 1 or (len(heads) != problem.q_heads and common is None):
        return
    detail = "; ".join(said[:_LINES]) + ("; ..." if len(said) > _LINES else "")
    kind = _kind(decoded, said)
    yield Hypothesis(
        kind,
        f"{kind}: {detail}",
        {"rows": failing, "keys": [_plain(c) for c in _all(decoded)][:16]},
        alter=_with_foreign(scene, _foreign(decoded, scene)),
        keys=_counted(problem, by_row, common, _foreign(decoded, scene)),
        rank=4,
    )


@dataclass(frozen=True)
class _Changes:
    """How often a row's heads counted keys otherwise: the difference from what was asked, by key."""

    token: int
    request: int
    heads: tuple[int, ...]
    counts: tuple[tuple[Key, int], ...]

    @staticmethod
    def of(row: RowKeys) -> _Changes:
        counts = tuple(sorted((c.key, c.count - c.expected) for c in row.changes or ()))
        return _Changes(row.row, row.request, row.heads, counts)


def _all(decoded: Sequence[RowKeys]) -> list[Change]:
    return [c for row in decoded for c in row.changes or ()]


def _plain(change: Change) -> dict[str, int]:
    key = change.key
    return {"request": key.request, "position": key.position, "slot": key.slot, "count": change.count}


def _kind(decoded: Sequence[RowKeys], said: Sequence[str]) -> Kind:
    if any("page" in line for line in said):
        return Kind.PAGE
    changes = _all(decoded)
    if any(c.key.request < 0 for c in changes):
        return Kind.STALE_KEY
    return Kind.EXTRA_KEY if any(c.count > c.expected for c in changes) else Kind.MISSING_KEY


def _foreign(decoded: Sequence[RowKeys], scene: Scene) -> dict[Key, int]:
    """Keys that are not of the request that counts them: the place of each behind the request's own."""
    found: dict[Key, int] = {}
    for row in decoded:
        for change in row.changes or ():
            if change.key.request != row.request:
                found.setdefault(change.key, len(found))
    return found


def _with_foreign(scene: Scene, foreign: dict[Key, int]) -> Callable[[Problem], Problem]:
    """The problem with foreign keys behind each request's own, nothing hidden."""

    def alter(p: Problem) -> Problem:
        if not foreign:
            return p
        k, v = (torch.cat([_rows(p, scene, key, name) for key in foreign]) for name in ("k", "v"))
        own = {"k": p.k.split(list(p.kv_lens)), "v": p.v.split(list(p.kv_lens))}
        return replace(
            p,
            k=torch.cat([x for part in own["k"] for x in (part, k)]),
            v=torch.cat([x for part in own["v"] for x in (part, v)]),
            kv_lens=tuple(n + len(foreign) for n in p.kv_lens),
            context_lens=None,
            causal=False,
            window=None,
        )

    return alter


def _rows(p: Problem, scene: Scene, key: Key, name: str) -> Tensor:
    """K or V [1, Hkv, D] of a key, as it is stored."""
    if key.request >= 0:
        index = key_index(p, key.request, torch.tensor([key.position]))
        return p.k[index] if name == "k" else p.v[index]
    pool = scene.around.pool_k if name == "k" else scene.around.pool_v
    assert pool is not None
    return pool.flatten(0, 1)[key.slot : key.slot + 1].to(p.k.dtype if name == "k" else p.v.dtype)


def _counted(
    problem: Problem,
    by_row: dict[tuple[int, int], _Changes],
    common: _Changes | None,
    foreign: dict[Key, int],
) -> Callable[[Row], Tensor]:
    """The keys that a row counts. Heads of a row are taken to be alike."""
    rows = {token: changes for (token, _), changes in by_row.items()}

    def keys(row: Row) -> Tensor:
        own = describe_rows(problem, (row.token,))[0]
        seen = visible(own).tolist()
        changes = rows.get(row.token, common)
        if changes is None or changes.request != row.request:
            return torch.tensor(seen, dtype=torch.int64)
        counts = dict.fromkeys(seen, 1)
        for key, more in changes.counts:
            place = own.count + foreign[key] if key in foreign else key.position
            counts[place] = max(0, counts.get(place, 0) + more)
        return torch.tensor([j for j, count in sorted(counts.items()) for _ in range(count)], dtype=torch.int64)

    return keys
