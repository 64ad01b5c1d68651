"""The case space of a target: fields, choices and constraints, written once.

``Space.draw`` builds a case by asking a ``Chooser`` for one option after the other, simplest first. The
campaign's counter-based generator and the Hypothesis strategy are two choosers over this one function.
``Space.features`` reads the same labels back from any case, so that coverage can be counted for cases
that nobody drew: minimised, mutated or written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Protocol, TypeVar

from fuzz.case import MAX_TOKENS, Case, Placement, Pool, Prefix, Probe, Sink, Skip, SlotMap, States
from fuzz.features import LENGTHS, OF_RANKS, PARTITION, Feature, labels
from fuzz.probes import DESIGNS, PLAIN, RECOMMENDED, unfit
from oracle.convention import Granularity, SinkUnits, WindowMeaning
from oracle.declare import Declaration
from oracle.kinds import Operation

T = TypeVar("T")
Pair = frozenset[Feature]

_REQUESTS = {"none": (0, 0), "one": (1, 1), "many": (2, 5)}
"""How many requests a batch has, at least and at most."""

_OF_REQUESTS = {"none": 1, "one": 3, "many": 6}
"""How often each is drawn: one run of a kernel tries several lengths at once."""

_OFTEN_OFF = ("window", "sinks", "soft_cap", "scale")
"""What is off half of the time: where one of them is wrong, it hides what is wrong with the others."""

_OF_RECOMMENDED = 3
"""How often a recommended probe, which together show most faults, is drawn for once that each of the others is."""

LONGEST_WINDOW = 48
"""A window drawn at random is at most this long, so that contexts beyond it stay cheap."""


class Chooser(Protocol):
    """Something that picks: a counter-based generator, a Hypothesis draw, a test."""

    def choose(self, name: str, options: Sequence[T]) -> T:
        """One of ``options``, the simplest first."""
        ...

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included; simplest is ``low``."""
        ...


def _words(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


_GRANULARITIES = {
    Granularity.NONE: (Granularity.NONE,),
    Granularity.TENSOR: (Granularity.NONE, Granularity.TENSOR),
    Granularity.HEAD: (Granularity.NONE, Granularity.TENSOR, Granularity.HEAD),
    # A kernel that takes a factor for each token of each head takes none for a head alone.
    Granularity.TOKEN: (Granularity.NONE, Granularity.TENSOR, Granularity.TOKEN),
}
"""Granularities that are drawn for a target, by the finest that it takes."""


@dataclass(frozen=True)
class Space:
    """The cases that a declaration claims to support, as data and as one drawing function.

    ``most_tokens`` is what the contexts of a case have together; ``huge`` adds pools of
    more than 2**31 elements.
    """

    declaration: Declaration
    most_tokens: int = 600
    huge: bool = False
    dimensions: dict[str, tuple[str, ...]] = field(init=False)
    """Every feature that can be drawn, with its labels, simplest first."""

    def __post_init__(self) -> None:
        operation = self.declaration.operation
        if operation in (Operation.KV_WRITE, Operation.KV_GATHER):
            own = self._copy() | self._pool()
        elif operation is Operation.LSE_MERGE:
            own = self._merge()
        elif operation is Operation.INDEX_BUILD:
            own = self._indices() | self._pool()
        else:
            in_pool = operation is not Operation.VARLEN_EXTEND or prefix_of(self.declaration) is not Prefix.INLINE
            own = self._attention() | (self._pool() if in_pool else {})
            if "slot_map" in self.declaration.supports.features:
                own["slot_map"] = tuple(SlotMap)
        dimensions = self._common() | own
        if "probe" not in dimensions:
            # First, since what a probe needs decides what else may be drawn.
            quantised = operation is Operation.BACKEND and bool(self.declaration.supports.kv_dtypes)
            dimensions = {"probe": PLAIN if quantised else _probes(dimensions)} | dimensions
        object.__setattr__(self, "dimensions", {name: labels for name, labels in dimensions.items() if labels})

    def _common(self) -> dict[str, tuple[str, ...]]:
        supports, convention = self.declaration.supports, self.declaration.convention
        features = supports.features
        lengths = [n for n in LENGTHS if not n.startswith("window") or "window" in features]
        if self.declaration.operation is not Operation.INDEX_BUILD:
            lengths = [n for n in lengths if n not in OF_RANKS]
        if self.declaration.operation is Operation.LSE_MERGE:
            # Rows to merge know no partition of keys.
            lengths = [n for n in lengths if not n.startswith("partition")]
        if self.declaration.operation is not Operation.PAGED_DECODE:
            # So many keys are for kernels that split them.
            lengths = [n for n in lengths if n not in ("partitions", "window+partition")]
        backend = self.declaration.operation is Operation.BACKEND
        if backend or (self.declaration.operation is Operation.PAGED_DECODE and "empty" not in features):
            lengths.remove("zero")
        return {
            "requests": ("one", "many") if backend else ("one", "many", "none"),
            "length": tuple(lengths),
            "kv_heads": _words(supports.num_kv_heads),
            "head_dim": _words(supports.head_dims),
            "v_head_dim": ("same", *_words(supports.v_head_dims)),
            "index_dtype": convention.index_dtypes,
            "strided": ("no", "yes") if "strided" in features else ("no",),
        }

    def _pool(self) -> dict[str, tuple[str, ...]]:
        return {
            "page_size": _words(self.declaration.supports.page_sizes),
            "placement": tuple(Placement),
            "pool": (Pool.TIGHT, Pool.SPARE, *((Pool.HUGE,) if self.huge else ())),
        }

    def _copy(self) -> dict[str, tuple[str, ...]]:
        features = self.declaration.supports.features
        return {
            "kv_dtype": self.declaration.supports.dtypes,
            "skip": tuple(Skip) if "skip" in features else (Skip.NONE,),
            "slot_map": tuple(SlotMap) if "slot_map" in features else (SlotMap.NONE,),
            "probe": (Probe.NORMAL, Probe.BYTES),
        }

    def _merge(self) -> dict[str, tuple[str, ...]]:
        supports = self.declaration.supports
        return {
            "dtype": supports.dtypes,
            "kv_dtype": ("same",),
            "parts": _words(supports.parts),
            "states": (
                States.FULL,
                *((States.SOME_EMPTY, States.ALL_EMPTY) if "empty" in supports.features else ()),
                *((States.EMPTY_NAN,) if "empty_nan" in supports.features else ()),
            ),
            "earlier_calls": ("0", "1", "3") if "stateful" in supports.features else ("0",),
            "probe": (Probe.NORMAL,),
        }

    def _indices(self) -> dict[str, tuple[str, ...]]:
        return {
            "dtype": ("bf16",),
            "kv_dtype": ("same",),
            "parts": _words(self.declaration.supports.parts),
            "rank": ("first", "last", "middle"),
            "query": ("full", "one", "some", "but_one"),
            "probe": (Probe.NORMAL,),
        }

    def _attention(self) -> dict[str, tuple[str, ...]]:
        supports, convention = self.declaration.supports, self.declaration.convention
        features = supports.features
        windows = ("off", "one", "page", "inside", "beyond")
        limited = convention.window.meaning is WindowMeaning.UNSUPPORTED or "window" not in features
        sinks = convention.sink is not SinkUnits.UNSUPPORTED and "sinks" in features
        return {
            "dtype": supports.dtypes,
            "kv_dtype": ("same", *supports.kv_dtypes),
            "group": _words(supports.group_sizes),
            "query": self._queries(),
            "causal": ("yes", "no") if "non_causal" in features else ("yes",),
            "window": windows[:1] if limited else windows,
            "sinks": tuple(Sink) if sinks else (Sink.NONE,),
            "soft_cap": ("off", "on", "saturated") if convention.soft_cap and "soft_cap" in features else ("off",),
            "scale": ("default", "small", "large") if "custom_scale" in features else ("default",),
            "k_descale": _GRANULARITIES[convention.descales.k],
            "v_descale": _GRANULARITIES[convention.descales.v],
        }

    def _queries(self) -> tuple[str, ...]:
        supports = self.declaration.supports
        decode = self._decodes
        several = supports.max_query_len is None or supports.max_query_len > 1
        chunked = decode or "chunked" in supports.features
        return (
            *(() if decode else ("full",)),
            *(("one",) if chunked else ()),
            *(("some",) if chunked and several else ()),
            *(("but_one",) if chunked and not decode and supports.max_query_len is None else ()),
            *(("empty",) if "empty" in supports.features else ()),
        )

    @property
    def _decodes(self) -> bool:
        """Whether each request has the same few queries, as of a backend that decodes, or verifies what was drafted."""
        declaration = self.declaration
        few = declaration.operation is Operation.BACKEND and declaration.supports.max_query_len is not None
        return few or declaration.operation is Operation.PAGED_DECODE

    # ---------------------------------------------------------------- drawing

    def draw(self, chooser: Chooser) -> Case:
        """A case inside the declared capabilities."""
        picked: dict[str, str] = {}
        for name in self.dimensions:
            if name != "length":
                picked[name] = chooser.choose(name, self._options(name, picked.get("probe", Probe.NORMAL)))
        case = self._blank(picked, chooser)
        case = self._with_lengths(case, picked, chooser)
        return case if unfit(case) is None else replace(case, probe=Probe.NORMAL)

    def _options(self, name: str, probe: str) -> Sequence[str]:
        """What may be drawn beside ``probe``: an option that is to come up more often is there more than once."""
        declared = self.dimensions[name]
        if name == "probe":
            return _weighted_probes(declared)
        allowed = _PROBE_NEEDS.get(probe, {}).get(name, declared)
        offered = [label for label in declared if label in allowed]
        if name == "requests":
            return [label for label in offered for _ in range(_OF_REQUESTS[label])]
        if name in _OFTEN_OFF:
            return (*offered[:1] * (len(offered) - 2), *offered)
        return offered

    def _blank(self, picked: dict[str, str], chooser: Chooser) -> Case:
        declaration, convention = self.declaration, self.declaration.convention
        page_size, head_dim = int(picked.get("page_size", 16)), int(picked["head_dim"])
        dtype = picked.get("dtype", picked["kv_dtype"])
        parts = int(picked.get("parts", 1))
        ranks = {"first": 0, "middle": parts // 2, "last": parts - 1}
        k_descale = Granularity(picked.get("k_descale", Granularity.NONE))
        v_descale = Granularity(picked.get("v_descale", Granularity.NONE))
        if convention.descales.fp8_only:
            k_descale = v_descale = _of_fp8(picked["kv_dtype"], k_descale, v_descale)
        if declaration.operation is Operation.BACKEND and picked["kv_dtype"] == "same":
            # A backend's pool in the dtype of the model has no scales; one of fp8 may have one, both or none.
            k_descale = v_descale = Granularity.NONE
        return Case(
            operation=declaration.operation,
            seed=chooser.integer("seed", 0, (1 << 31) - 1),
            context_lens=(),
            query_lens=(),
            num_kv_heads=int(picked["kv_heads"]),
            group_size=int(picked.get("group", 1)),
            head_dim=head_dim,
            v_head_dim=head_dim if picked["v_head_dim"] == "same" else int(picked["v_head_dim"]),
            dtype=dtype,
            kv_dtype=dtype if picked["kv_dtype"] == "same" else picked["kv_dtype"],
            kv_layout=convention.kv_layout,
            v_layout=convention.v_layout,
            page_size=page_size,
            placement=Placement(picked.get("placement", Placement.ASCENDING)),
            pool=Pool(picked.get("pool", Pool.TIGHT)),
            index_dtype=picked["index_dtype"],
            strided=picked["strided"] == "yes",
            causal=picked.get("causal", "yes") == "yes",
            window=_window(picked.get("window", "off"), page_size, chooser),
            sinks=Sink(picked.get("sinks", Sink.NONE)),
            soft_cap={"off": None, "on": 5.0, "saturated": 0.01}[picked.get("soft_cap", "off")],
            scale={"default": None, "small": 0.02, "large": 0.5}[picked.get("scale", "default")],
            q_descale=Granularity.NONE,
            k_descale=k_descale,
            v_descale=v_descale,
            index_form=convention.index_form,
            prefix=prefix_of(declaration),
            skip=Skip(picked.get("skip", Skip.NONE)),
            slot_map=SlotMap(picked.get("slot_map", SlotMap.NONE)),
            parts=parts,
            rank=ranks[picked.get("rank", "first")],
            states=States(picked.get("states", States.FULL)),
            index_task=declaration.task,
            earlier_calls=int(picked.get("earlier_calls", 0)),
            probe=Probe(picked["probe"]),
        )

    def _with_lengths(self, case: Case, picked: dict[str, str], chooser: Chooser) -> Case:
        contexts = self._contexts(case, picked["requests"], chooser)
        if "query" not in picked:
            return replace(case, context_lens=tuple(contexts))
        most = self.declaration.supports.max_query_len
        if case.operation is Operation.BACKEND:
            contexts = [max(length, 1) for length in contexts]
        if self._decodes:
            # Decode kernels take the same number of queries of every request, whose keys they are too.
            count = chooser.integer("queries", 2, most or 4) if picked["query"] == "some" else 1
            # A backend's drafted tokens come after others, which makes them no prompt.
            least = count + (case.operation is Operation.BACKEND and count > 1)
            contexts = [max(length, least) for length in contexts]
        if picked["query"] == "empty" and contexts:
            contexts[-1] = 0
        queries = (count,) * len(contexts) if self._decodes else _queries(contexts, picked["query"], most, chooser)
        if case.operation is Operation.BACKEND and not self._decodes:
            # Prompts without a prefix beside others: one with a prefix decides which way all of them go.
            fresh = [i > 0 and chooser.integer("fresh", 0, 2) == 0 for i in range(len(contexts))]
            queries = tuple(n if all_ else q for n, q, all_ in zip(contexts, queries, fresh, strict=True))
        return replace(case, context_lens=tuple(contexts), query_lens=queries)

    def _contexts(self, case: Case, requests: str, chooser: Chooser) -> list[int]:
        """Lengths of contexts, each of another boundary class as long as there are any that fit.

        The first may be as long as its class asks for, and is half of the time as long as no other has room for; the
        others fill the rest, half of ``most_tokens`` at least.
        """
        at = ((label, LENGTHS[label](case)) for label in self.dimensions["length"])
        boundaries = {label: n for label, n in at if n is not None and n < MAX_TOKENS - 1}
        longest = PARTITION // 4 if case.operation is Operation.LSE_MERGE else 2 * PARTITION
        contexts: list[int] = []
        for request in range(chooser.integer("count", *_REQUESTS[requests])):
            room = MAX_TOKENS
            if request:
                room = max(self.most_tokens - contexts[0], self.most_tokens // 2) - sum(contexts[1:])
            fitting = [label for label, n in boundaries.items() if n <= room and n not in contexts]
            if request == 0 and (long := [label for label in fitting if boundaries[label] > self.most_tokens // 2]):
                fitting += long * ((len(fitting) - len(long)) // len(long))
            label = chooser.choose("other_length" if request else "length", (*fitting, "any"))
            length = boundaries.get(label)
            contexts.append(chooser.integer("tokens", min(1, room), min(longest, room)) if length is None else length)
        return contexts

    # --------------------------------------------------------------- features

    def features(self, case: Case) -> frozenset[Feature]:
        """Labels that ``case`` shows, among ``dimensions``."""
        return self.declared(labels(case))

    def declared(self, found: set[Feature]) -> frozenset[Feature]:
        """Those labels that are among ``dimensions``."""
        return frozenset((name, label) for name, label in found if label in self.dimensions.get(name, ()))

    def pairs(self) -> list[Pair]:
        """Every pair of features that a case could show, in a fixed order."""
        found: list[Pair] = []
        for (first, some), (second, others) in combinations(self.dimensions.items(), 2):
            for a in some:
                for b in others:
                    pair = frozenset({(first, a), (second, b)})
                    if self.excluded(pair) is None:
                        found.append(pair)
        return found

    def excluded(self, pair: Pair) -> str | None:
        """Why no case can show both features, or None."""
        names = dict(pair)
        if names.get("requests") == "none" and not names.keys() & {"dtype", "kv_dtype"}:
            return "a batch without requests has no tokens: nothing else of it shows"
        length, query = names.get("length"), names.get("query")
        if length is not None and query is not None and (query == "empty") != (length == "zero") and query != "full":
            return "a query without keys is the label empty, and that label has no others"
        backend = self.declaration.operation is Operation.BACKEND
        decode = backend or self._decodes
        if length == "one" and (
            query in ("some", "but_one") or (query == "full" and backend) or (query == "one" and not decode)
        ):
            return "a request has more keys than that many queries of its own"
        nothing = (length, names.get("page_size")) == ("page-1", "1") or (length, names.get("window")) == (
            "window-1",
            "one",
        )
        if decode and nothing:
            return "a request has at least one key"
        if (
            backend
            and names.get("kv_dtype") == "same"
            and {"tensor", "head"}
            & {
                names.get("k_descale"),
                names.get("v_descale"),
            }
        ):
            return "a pool in the dtype of the model has no scales"
        if names.get("window") == "page" and names.get("page_size") == "1":
            return "a window of one page of one key has the label one"
        needs = _PROBE_NEEDS.get(names.get("probe", ""), {})
        # What the probe needs comes along: an fp8 cache, or a descale.
        implied = {name: allowed[0] for name, allowed in needs.items()} | names
        if self.declaration.convention.descales.fp8_only and (reason := unpaired(implied)):
            return reason
        if names.get("length", "").startswith("window") and names.get("window") in ("off", "beyond"):
            return "there is no window to be at the edge of"
        probe = names.get("probe")
        for name, label in names.items():
            if probe in _PROBE_NEEDS and label not in _PROBE_NEEDS[probe].get(name, (label,)):
                return f"the probe {probe} needs {name} {' or '.join(_PROBE_NEEDS[probe][name])}"
        return None


def prefix_of(declaration: Declaration) -> Prefix:
    """Where a target finds the keys before a request's queries, as its cases say it."""
    convention = declaration.convention
    if declaration.operation is not Operation.VARLEN_EXTEND:
        return Prefix.INLINE
    return Prefix.ALL if convention.keys_in_pool else Prefix.POOL if convention.prefix_in_pool else Prefix.INLINE


def _of_fp8(kv_dtype: str, k: Granularity, v: Granularity) -> Granularity:
    """The granularity of both descales where they come with an fp8 cache only."""
    if kv_dtype == "same":
        return Granularity.NONE
    return next((own for own in (k, v) if own is not Granularity.NONE), Granularity.TENSOR)


def unpaired(names: dict[str, str]) -> str | None:
    """Why these descales, of some of kv_dtype, k_descale and v_descale, do not come together, or None."""
    given = {name: names[name] for name in ("k_descale", "v_descale") if name in names}
    if len(set(given.values())) > 1:
        return "descales of keys and values have one granularity"
    bare = names.get("kv_dtype") == "same"
    if "kv_dtype" in names and any((value == Granularity.NONE) is not bare for value in given.values()):
        return "descales come with an fp8 cache, and with no other"
    return None


_PROBE_NEEDS: dict[str, Mapping[str, tuple[str, ...]]] = {probe.value: d.needs for probe, d in DESIGNS.items()}


def _weighted_probes(declared: Sequence[str]) -> list[str]:
    """The first, normal, as often as all that are not recommended together: about a third of the time."""
    recommended = [probe for probe in declared[1:] if probe in RECOMMENDED]
    others = len(declared) - 1 - len(recommended)
    often = dict.fromkeys(recommended, _OF_RECOMMENDED) | {declared[0]: max(others, 1) if recommended else 1}
    return [probe for probe in declared for _ in range(often.get(probe, 1))]


def _probes(dimensions: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The designs whose needs the other dimensions can meet."""

    def possible(probe: Probe) -> bool:
        needs = DESIGNS[probe].needs.items()
        return all(any(label in dimensions[name] for label in allowed) for name, allowed in needs)

    return tuple(probe for probe in DESIGNS if possible(probe))


def _window(label: str, page_size: int, chooser: Chooser) -> int | None:
    if label == "off":
        return None
    if label == "inside":
        drawn = chooser.integer("window_keys", 2, LONGEST_WINDOW)
        return drawn if drawn != page_size else drawn + 1
    return {"one": 1, "page": page_size, "beyond": MAX_TOKENS}[label]


def _queries(contexts: list[int], label: str, most: int | None, chooser: Chooser) -> tuple[int, ...]:
    """Query lengths: as ``label`` says where a request's context allows it."""
    found = []
    for length in contexts:
        if label == "empty":
            found.append(1 if length == 0 else length)
        elif label == "full" or length <= 1:
            found.append(length)
        elif label == "but_one":
            found.append(length - 1)
        elif label == "one" or length == 2:
            found.append(1)
        else:
            found.append(chooser.integer("queries", 2, min(length - 1, most or length)))
    return tuple(found)
