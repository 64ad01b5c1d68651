"""Smaller cases: each reduction is a pure function from a case to candidates that are simpler in one respect.

A candidate lies inside what the target declares, so that it can be run, and has a smaller ``weight``, so that any
sequence of reductions ends. Within a reduction the boldest candidates come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fuzz.case import Case, CaseError, Pool
from fuzz.features import LENGTHS, labels
from fuzz.space import Space
from fuzz.support import unsupported
from oracle.convention import Granularity
from oracle.declare import Declaration
from oracle.kinds import Operation

Weight = tuple[int, ...]
"""How large a case is, compared from the left: requests, tokens, features, and what each of those is."""

Reduction = Callable[[Case, Space], Iterator[Case]]

_NUMBERS = {
    "num_kv_heads": "kv_heads",
    "group_size": "group",
    "head_dim": "head_dim",
    "page_size": "page_size",
    "parts": "parts",
    "earlier_calls": "earlier_calls",
}
"""Fields whose declared values are numbers, with the dimension of the case space that lists them."""

_WORDS = ("sinks", "placement", "pool", "skip", "slot_map", "states", "index_dtype", "k_descale", "v_descale")
"""Fields that hold a label of the dimension of the same name."""

_FEATURES = (*_WORDS, "soft_cap", "scale", "strided", "causal")

_CAPS: dict[str, float | None] = {"off": None, "on": 5.0, "saturated": 0.01}
_SCALES: dict[str, float | None] = {"default": None, "small": 0.02, "large": 0.5}


@dataclass(frozen=True)
class Reducer:
    """The reductions of one target's cases."""

    declaration: Declaration

    def candidates(self, case: Case) -> list[Case]:
        """Everything that is one reduction simpler than ``case``."""
        return list(dict.fromkeys(candidate for name in REDUCTIONS for candidate in self.of(name, case)))

    def of(self, name: str, case: Case) -> list[Case]:
        """The candidates of one reduction, boldest first, each once."""
        space = Space(self.declaration, huge=case.pool is Pool.HUGE)
        own = weight(case, space)
        found = dict.fromkeys(c for c in REDUCTIONS[name](case, space) if weight(c, space) < own)
        return [c for c in found if unsupported(self.declaration, c) is None and (_has_keys(c) or not _has_keys(case))]


def weight(case: Case, space: Space) -> Weight:
    """How large ``case`` is. Every component is a natural number, so that no sequence falls for ever."""
    shown = labels(case)
    features = sum(_rank(space, name, shown) for name in (*_FEATURES, "dtype", "kv_dtype"))
    narrow = int(case.kv_dtype != case.dtype) + int(case.v_head_dim != case.head_dim)
    return (
        len(case.context_lens),
        sum(case.context_lens) + sum(case.query_lens),
        case.parts + case.earlier_calls,
        features + narrow + int(case.window is not None),
        case.window or 0,
        _rank(space, "probe", shown),
        case.num_q_heads,
        case.num_kv_heads,
        case.head_dim + case.v_head_dim,
        case.page_size,
        case.rank,
    )


def _has_keys(case: Case) -> bool:
    """Whether each request has queries, and a key for each of them, or no keys at all: no others are ever drawn."""
    return all(0 < q <= n or n == 0 for q, n in zip(case.query_lens, case.context_lens, strict=False))


def _rank(space: Space, name: str, shown: set[tuple[str, str]]) -> int:
    """The place of a case's label among those declared, the simplest first."""
    declared = space.dimensions.get(name, ())
    return next((place for place, label in enumerate(declared) if (name, label) in shown), 0)


def _made(case: Case, **changes: Any) -> Iterator[Case]:
    """``case`` with ``changes``, if there can be such a case."""
    try:
        yield replace(case, **changes)
    except CaseError:
        return


# ------------------------------------------------------------------ requests and lengths


def fewer_requests(case: Case, space: Space) -> Iterator[Case]:
    """None, then each of ever smaller pieces of the batch alone, then the batch without it (delta debugging)."""
    requests = len(case.context_lens)
    if requests:
        yield from _kept(case, [])
    size = requests // 2
    while size:
        pieces = [range(start, min(start + size, requests)) for start in range(0, requests, size)]
        for piece in pieces:
            yield from _kept(case, piece)
        for piece in pieces:
            yield from _kept(case, [i for i in range(requests) if i not in piece])
        size //= 2


def _kept(case: Case, requests: Iterable[int]) -> Iterator[Case]:
    kept = list(requests)
    queries = tuple(case.query_lens[i] for i in kept) if case.query_lens else ()
    yield from _made(case, context_lens=tuple(case.context_lens[i] for i in kept), query_lens=queries)


def shorter_together(case: Case, space: Space) -> Iterator[Case]:
    """No context longer than a boundary, than half of the longest, and so on up to one less."""
    longest = max(case.context_lens, default=0)
    for most in _shorter(case, longest):
        contexts = tuple(min(n, most) for n in case.context_lens)
        queries = tuple(min(q, n) for q, n in zip(case.query_lens, contexts, strict=False))
        yield from _made(case, context_lens=contexts, query_lens=queries)
        yield from _made(case, context_lens=contexts)


def shorter_contexts(case: Case, space: Space) -> Iterator[Case]:
    """One request's context shorter: its queries as many as fit, as many as before, or fewer after the same prefix."""
    for request, length in enumerate(case.context_lens):
        own = case.query_lens[request] if case.query_lens else 0
        for shorter in _shorter(case, length):
            for queries in dict.fromkeys((min(own, shorter), own, max(0, own - (length - shorter)))):
                yield from _resized(case, request, shorter, queries)


def fewer_queries(case: Case, space: Space) -> Iterator[Case]:
    """Fewer queries: of every request at once where a kernel takes the same number of each, else of one."""
    if case.operation is Operation.PAGED_DECODE:
        for fewer in _numbers(max(case.query_lens, default=0)):
            yield from _made(case, query_lens=tuple(min(q, fewer) for q in case.query_lens))
        return
    for request, own in enumerate(case.query_lens):
        for fewer in _numbers(own):
            yield from _resized(case, request, case.context_lens[request], fewer)


def _resized(case: Case, request: int, context: int, queries: int) -> Iterator[Case]:
    def changed(lengths: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*lengths[:request], value, *lengths[request + 1 :])

    own = changed(case.query_lens, queries) if case.query_lens else ()
    if case.operation is Operation.PAGED_DECODE and len(set(own)) > 1:
        return
    yield from _made(case, context_lens=changed(case.context_lens, context), query_lens=own)


def _shorter(case: Case, length: int) -> list[int]:
    """Lengths below ``length``: boundaries of page, window and partition, then ever closer to it."""
    boundaries = {found for at in LENGTHS.values() if (found := at(case)) is not None}
    pages = {length % case.page_size, length - case.page_size, length // case.page_size * case.page_size}
    queries = set(case.query_lens)
    near = [n for n in sorted({2, *boundaries, *pages, *queries}) if 0 <= n < length]
    return list(dict.fromkeys((*near, *_numbers(length))))


def _numbers(below: int) -> list[int]:
    """0, 1, half of ``below``, three quarters, and so on up to one less."""
    found, step = [0, 1], below // 2
    while step:
        found.append(below - step)
        step //= 2
    return [n for n in dict.fromkeys(found) if n < below]


# ------------------------------------------------------------------------------ features


def plainer_all(case: Case, space: Space) -> Iterator[Case]:
    """Everything as plain as it is declared, at once: with the case's probe and with the first one."""
    for probe in dict.fromkeys((space.dimensions["probe"][0], case.probe.value)):
        plain = case
        for reduction in (no_window, plainer_dtypes):
            plain = next(reduction(plain, space), plain)
        for name in _FEATURES:
            plain = next(_labelled(plain, space, name), plain)
        yield from _made(plain, probe=probe)


def plainer_features(case: Case, space: Space) -> Iterator[Case]:
    """One feature as a label that is declared before its own."""
    for name in _FEATURES:
        yield from _labelled(case, space, name)
    if case.rank:
        yield from _made(case, rank=0)


def _labelled(case: Case, space: Space, name: str) -> Iterator[Case]:
    """``case`` with every label of a feature that is declared before its own."""
    declared = space.dimensions.get(name, ())
    for label in declared[: _rank(space, name, labels(case))]:
        values: dict[str, Any] = {name: label}
        if name == "soft_cap":
            values = {name: _CAPS[label]}
        elif name == "scale":
            values = {name: _SCALES[label]}
        elif name in ("strided", "causal"):
            values = {name: label == "yes"}
        yield from _made(case, **values)


def plainer_dtypes(case: Case, space: Space) -> Iterator[Case]:
    """A dtype that is declared before the case's own; the cache in the dtype of the model, without descales."""
    bare = {"k_descale": Granularity.NONE, "v_descale": Granularity.NONE}
    if case.is_copy:
        for dtype in space.dimensions["kv_dtype"][: _rank(space, "kv_dtype", labels(case))]:
            yield from _made(case, dtype=dtype, kv_dtype=dtype)
        return
    if case.kv_dtype != case.dtype:
        yield from _made(case, kv_dtype=case.dtype, **bare)
        yield from _made(case, kv_dtype=case.dtype)
        yield from _made(case, **bare)
        for cache in space.dimensions["kv_dtype"][1 : _rank(space, "kv_dtype", labels(case))]:
            yield from _made(case, kv_dtype=cache)
    if Granularity.NONE not in (case.k_descale, case.v_descale):
        yield from _made(case, **dict.fromkeys(bare, Granularity.TENSOR))
    for dtype in space.dimensions.get("dtype", ())[: _rank(space, "dtype", labels(case))]:
        yield from _made(case, dtype=dtype, kv_dtype=dtype if case.kv_dtype == case.dtype else case.kv_dtype)


def no_window(case: Case, space: Space) -> Iterator[Case]:
    """No window."""
    if case.window is not None:
        yield from _made(case, window=None)


def smaller_window(case: Case, space: Space) -> Iterator[Case]:
    """A window of fewer keys: of boundaries, then ever closer to its own."""
    if case.window is None:
        return
    edges = {
        case.page_size,
        *case.context_lens,
        *(n + 1 for n in case.context_lens),
        *(n - 1 for n in case.context_lens),
    }
    for keys in dict.fromkeys((1, 2, *sorted(edges), *_numbers(case.window))):
        if 0 < keys < case.window:
            yield from _made(case, window=keys)


def simpler_probe(case: Case, space: Space) -> Iterator[Case]:
    """A probe that is declared before the case's own."""
    declared = space.dimensions["probe"]
    for probe in declared[: _rank(space, "probe", labels(case))]:
        yield from _made(case, probe=probe)


# ------------------------------------------------------------------------------- numbers


def smaller_numbers(case: Case, space: Space) -> Iterator[Case]:
    """Heads, dims, pages, parts and earlier calls: a smaller declared number, the smallest first."""
    yield from _values_of_own_width(case, space)
    for field, dimension in _NUMBERS.items():
        own = getattr(case, field)
        for value in sorted(int(label) for label in space.dimensions.get(dimension, ())):
            if value < own:
                yield from _with_number(case, field, value)


def _with_number(case: Case, field: str, value: int) -> Iterator[Case]:
    changes: dict[str, Any] = {field: value}
    if field == "head_dim" and case.v_head_dim == case.head_dim:
        changes["v_head_dim"] = value
    if field == "parts":
        changes["rank"] = min(case.rank, value - 1)
    if field == "page_size" and case.window == case.page_size:
        yield from _made(case, **changes, window=value)
    yield from _made(case, **changes)


def _values_of_own_width(case: Case, space: Space) -> Iterator[Case]:
    if case.v_head_dim != case.head_dim:
        yield from _made(case, v_head_dim=case.head_dim)
        for label in sorted(int(n) for n in space.dimensions["v_head_dim"] if n != "same"):
            if label < case.v_head_dim:
                yield from _made(case, v_head_dim=label)


REDUCTIONS: dict[str, Reduction] = {
    "requests": fewer_requests,
    "all features": plainer_all,
    "all contexts": shorter_together,
    "contexts": shorter_contexts,
    "queries": fewer_queries,
    "window": no_window,
    "dtypes": plainer_dtypes,
    "features": plainer_features,
    "window length": smaller_window,
    "probe": simpler_probe,
    "numbers": smaller_numbers,
}
"""Every reduction by name, in the order in which they are best tried: what costs most time in a judgement first."""
