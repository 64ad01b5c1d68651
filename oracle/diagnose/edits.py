"""Changes of the keys of requests, and the hypotheses that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.bits import bits
from oracle.diagnose.hypothesis import Hypothesis, unchanged
from oracle.diagnose.model import Kind, Surroundings
from oracle.diagnose.quick import View
from oracle.diagnose.rows import Row, describe_rows, key_index, visible
from oracle.diagnose.scene import Scene
from oracle.problem import Descale, Problem
from oracle.rounding import round_to, widen

Pick = Callable[[Row, Tensor], Tensor]
"""The keys of a row, given those that it is to see."""


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of the keys of one request. name: edits of one name are combined over requests.

    unknown: by kv head, the value of a key whose weight only the returned log-sum-exp tells. replaced: values by key
    and kv head. fitted, rank: as in `Hypothesis`.
    """

    name: str
    kind: Kind
    detail: str
    parameters: Mapping[str, Any]
    pick: Pick
    stale: bool = False
    unknown: Mapping[int, Tensor] = field(default_factory=dict)
    replaced: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)
    fitted: int = 0
    rank: int = 0


def without(*keys: int) -> Pick:
    """All but these keys."""
    lost = torch.tensor(keys)
    return lambda row, seen: seen[~torch.isin(seen, lost)]


def also(*keys: int) -> Pick:
    """These keys as well, if they are not seen anyway."""
    more = torch.tensor(keys)
    return lambda row, seen: torch.cat([seen, more[~torch.isin(more, seen)]])


def hypothesis_of(scene: Scene, edits: Mapping[int, Edit]) -> Hypothesis:
    problem, around = scene.subject.problem, scene.around
    first = next(iter(edits.values()))
    one = len(edits) == 1
    places = ", ".join(f"request {r}: {e.detail.partition(': ')[2]}" for r, e in edits.items())
    detail = first.detail if one and problem.requests == 1 else f"{first.kind}: {places}"
    parameters: dict[str, Any] = dict(first.parameters)
    if not one:
        parameters = {f"request {r}": dict(e.parameters) for r, e in edits.items()}
    if one and problem.requests > 1:
        parameters["request"] = next(iter(edits))
    stale = any(e.stale for e in edits.values())
    foreign = {r: e for r, e in edits.items() if e.name == "page pool"}
    pages = {r: e for r, e in edits.items() if e.name.startswith("page ") and r not in foreign}
    replaced = {r: e.replaced for r, e in edits.items() if e.replaced}

    def keys(row: Row) -> Tensor:
        own = describe_rows(problem, (row.token,))[0] if stale else row
        seen = visible(own)
        edit = edits.get(row.request)
        return seen if edit is None else edit.pick(own, seen)

    def alter(p: Problem) -> Problem:
        if stale:
            return scene.extended
        if foreign:
            return _from_pool(p, foreign, around)
        if pages:
            return _exchanged(p, pages, around.page_size or 1)
        return _revalued(p, replaced) if replaced else p

    unknown = {r: e.unknown for r, e in edits.items() if e.unknown}
    return Hypothesis(
        first.kind,
        detail,
        parameters,
        alter=alter if stale or pages or foreign or replaced else unchanged,
        keys=keys,
        after=_with_unknown(scene, unknown) if unknown else None,
        whole=bool(unknown),
        lse_fitted=bool(unknown),
        fitted=sum(e.fitted for e in edits.values()),
        rank=first.rank,
    )


def _exchanged(p: Problem, edits: Mapping[int, Edit], size: int) -> Problem:
    """K, V or both of some pages replaced by those of others."""
    k_index, v_index = torch.arange(p.k.shape[0]), torch.arange(p.v.shape[0])
    for request, edit in edits.items():
        a, b, name = edit.parameters["page"], edit.parameters["read"], edit.name.removeprefix("page ")
        place = {
            page: key_index(p, request, torch.arange(page * size, min((page + 1) * size, p.kv_lens[request])))
            for page in (a, b)
        }
        count = min(len(x) for x in place.values())
        here, there = place[a][:count], place[b][:count]
        if name in ("kv", "k", "swap"):
            k_index[here] = there
        if name == "swap":
            k_index[there] = here
        if name in ("kv", "v"):
            v_index[here] = there
    return replace(
        p,
        k=p.k[k_index],
        v=p.v[v_index],
        k_descale=_moved(p.k_descale, k_index),
        v_descale=_moved(p.v_descale, v_index),
    )


def _from_pool(p: Problem, edits: Mapping[int, Edit], around: Surroundings) -> Problem:
    """K and V of some pages replaced by those of pages of the pool."""
    size = around.page_size
    assert size is not None
    assert around.pool_k is not None
    assert around.pool_v is not None
    k, v = p.k.clone(), p.v.clone()
    for request, edit in edits.items():
        a, b = edit.parameters["page"], edit.parameters["pool"]
        place = key_index(p, request, torch.arange(a * size, min((a + 1) * size, p.kv_lens[request])))
        for operand, pool in ((k, around.pool_k), (v, around.pool_v)):
            bits(operand)[place] = bits(pool[b, : len(place)].contiguous())
    return replace(p, k=k, v=v)


def _moved(descale: Descale, index: Tensor) -> Descale:
    if not isinstance(descale, Tensor) or descale.numel() == 1 or descale.shape[0] != len(index):
        return descale
    return descale[index]


def _revalued(p: Problem, replaced: Mapping[int, Mapping[int, Mapping[int, Tensor]]]) -> Problem:
    """Some values replaced: by request, key and kv head. The new ones are descaled; they are stored as the others are.

    A wider dtype would be cast by a kernel, and budgets allow for that.
    """
    v = p.v.clone()
    for request, by_key in replaced.items():
        for key, by_head in by_key.items():
            place = int(key_index(p, request, torch.tensor([key])))
            for kv_head, value in by_head.items():
                stored = round_to(value / _factor(p.v_descale, place, kv_head), v.dtype)
                bits(v)[place, kv_head] = bits(stored)
    return replace(p, v=v)


def _factor(descale: Descale, token: int, head: int) -> float:
    if descale is None:
        return 1.0
    if not isinstance(descale, Tensor):
        return float(descale)
    if descale.numel() == 1:
        return float(descale)
    rows, heads = descale.shape
    return float(descale[token if rows > 1 else 0, head if heads > 1 else 0])


def _with_unknown(scene: Scene, unknown: Mapping[int, Mapping[int, Tensor]]) -> Callable[..., Solution]:
    """Add a key of known value; its weight is what the returned log-sum-exp leaves."""
    subject = scene.subject

    def after(view: View, solution: Solution, rows: Sequence[Row]) -> Solution:
        assert subject.lse is not None
        out, lse = solution.out.clone(), solution.lse.clone()
        group = view.group
        for i, row in enumerate(rows):
            for kv_head, value in unknown.get(row.request, {}).items():
                heads = slice(kv_head * group, (kv_head + 1) * group)
                returned = widen(subject.lse[row.token, heads]) / subject.unit
                full = lse[i, heads]
                if view.sinks is not None and not subject.convention.lse_includes_sink:
                    full = torch.logaddexp(full, view.sinks[heads].double())
                # Weights in units of exp(full).
                added = ((returned - full).exp() - (lse[i, heads] - full).exp()).clamp(min=0.0)
                share = (added / (1 + added)).unsqueeze(-1)
                out[i, heads] = out[i, heads] * (1 - share) + share * value
                lse[i, heads] = torch.where(added > 0, returned, lse[i, heads])
        return Solution(out, lse)

    return after
