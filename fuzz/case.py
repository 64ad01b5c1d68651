"""A case: the small description from which a problem and its physical tensors are rebuilt.

A case holds no tensor and no path. It is JSON with a schema version; a file that does not fit is refused
with the field's name and what is allowed there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from fuzz.errors import Expected
from oracle import limits
from oracle.convention import Granularity
from oracle.kinds import IndexForm, IndexTask, KVLayout, Operation, VLayout

SCHEMA = 1

STORAGE_BYTES = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "uint8": 1,
    "e4m3fn": 1,
    "e4m3fnuz": 1,
    "e5m2": 1,
    "e5m2fnuz": 1,
}
MAX_TOKENS = limits.TOKENS
MAX_REQUESTS = limits.REQUESTS


class CaseError(Expected, ValueError):
    """A case that cannot be. The message is one line: the field and what is allowed."""


class Placement(StrEnum):
    """Where a request's pages lie in the pool."""

    ASCENDING = "ascending"
    SHUFFLED = "shuffled"


class Pool(StrEnum):
    """How large the pool of pages is."""

    TIGHT = "tight"
    """exactly the pages in use"""
    SPARE = "spare"
    """unused, poisoned pages between and after the used ones"""
    HUGE = "huge"
    """more than 2**31 elements, pages at both ends; only on request"""


class Skip(StrEnum):
    """How many tokens of a KV write carry a negative slot, which means: do not store."""

    NONE = "none"
    SOME = "some"
    ALL = "all"


class SlotMap(StrEnum):
    """Whether there is a map from full-pool slots to those of a sliding-window sub-pool.

    A KV write goes through it. A backend step has pools of both kinds beside each other, and a layer with a window
    uses the sub-pool.
    """

    NONE = "none"
    FULL = "full"
    """every token has a slot in the sub-pool"""
    HOLES = "holes"
    """the sub-pool does not keep some tokens. They map to -1 in a KV write; in a backend step, whose sub-pool has given
    up whole pages before the windows of its queries, to the unused slot 0"""


class Sink(StrEnum):
    """Learned sink logits, one a query head."""

    NONE = "none"
    NORMAL = "normal"
    DOMINANT = "dominant"
    """far above every logit"""
    NEGLIGIBLE = "negligible"
    """far below every logit"""


class Probe(StrEnum):
    """The design of the input values: ``fuzz.probes`` says of each what it shows and what it needs."""

    NORMAL = "normal"
    BYTES = "bytes"
    """every bit pattern, NaN payloads included; for copies only"""
    CONSTANT_V = "constant_v"
    NEEDLE_POISON = "needle_poison"
    CODE = "code"
    GATE = "gate"
    DEEP_NEGATIVE = "deep_negative"
    DEEP_NEGATIVE_UNCAPPED = "deep_negative_uncapped"
    RAMP = "ramp"
    VALUE_NEEDLE = "value_needle"
    SIGNATURES = "signatures"
    INTEGERS = "integers"
    CANCELLING = "cancelling"
    OUTLIERS = "outliers"
    NEAR_TIES = "near_ties"
    HUGE_SCALE = "huge_scale"
    TINY_SCALE = "tiny_scale"
    SINK_NEAR_LSE = "sink_near_lse"
    UNEQUAL_DESCALES = "unequal_descales"
    FP8_EDGES = "fp8_edges"


class Prefix(StrEnum):
    """Where the keys before a request's own query tokens are found in ``varlen_extend``."""

    INLINE = "inline"
    """passed with the others, one after the other"""
    POOL = "pool"
    """in the pool, by slot; only the query tokens' own keys are passed"""
    ALL = "all"
    """in the pool, by page table, and the query tokens' own keys too"""


class States(StrEnum):
    """Which partial states of an LSE merge are empty: no key, a log-sum-exp of -inf."""

    FULL = "full"
    SOME_EMPTY = "some_empty"
    ALL_EMPTY = "all_empty"
    """every state of some rows"""
    EMPTY_NAN = "empty_nan"
    """some states, and their outputs are NaN, as those of a softmax over nothing"""


Parser = Callable[[str, Any], Any]


def _shown(value: object) -> str:
    text = value if isinstance(value, str) and value.isidentifier() else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _fail(name: str, value: Any, allowed: str) -> CaseError:
    shown = json.dumps(value, default=repr)
    return CaseError(f"case.{name}: {shown if len(shown) <= 60 else shown[:57] + '...'}; allowed: {allowed}")


def _integer(low: int, high: int) -> Parser:
    def parse(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _fail(name, value, f"an integer from {low} to {high}")
        return value

    return parse


def _integers(low: int, high: int, most: int) -> Parser:
    one = _integer(low, high)

    def parse(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or len(value) > most:
            raise _fail(name, value, f"a list of at most {most} integers from {low} to {high}")
        return tuple(one(f"{name}[{i}]", v) for i, v in enumerate(value))

    return parse


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise _fail(name, value, "true or false")
    return value


def _number(low: float, high: float) -> Parser:
    def parse(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise _fail(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    return parse


def _optional(inner: Parser) -> Parser:
    def parse(name: str, value: Any) -> Any:
        if value is None:
            return None
        try:
            return inner(name, value)
        except CaseError as error:
            raise CaseError(f"{error}, or null") from None

    return parse


def _one_of(kind: type[StrEnum]) -> Parser:
    def parse(name: str, value: Any) -> StrEnum:
        if type(value) is kind:
            return value
        try:
            return kind(value)
        except ValueError:
            raise _fail(name, value, ", ".join(kind)) from None

    return parse


def _name(*allowed: str) -> Parser:
    plain = {known: known for known in allowed}

    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in plain:
            raise _fail(name, value, ", ".join(allowed))
        return plain[value]

    return parse


_DESCALES = (Granularity.NONE, Granularity.TENSOR, Granularity.HEAD, Granularity.TOKEN)
"""Granularities that tensors are built for so far."""

_PARSERS: dict[str, Parser] = {
    "operation": _one_of(Operation),
    "seed": _integer(0, (1 << 63) - 1),
    "context_lens": _integers(0, MAX_TOKENS, MAX_REQUESTS),
    "query_lens": _integers(0, MAX_TOKENS, MAX_REQUESTS),
    "num_kv_heads": _integer(1, limits.HEADS),
    "group_size": _integer(1, limits.HEADS),
    "head_dim": _integer(1, limits.DIM),
    "v_head_dim": _integer(1, limits.DIM),
    "dtype": _name(*STORAGE_BYTES),
    "kv_dtype": _name(*STORAGE_BYTES),
    "kv_layout": _one_of(KVLayout),
    "v_layout": _one_of(VLayout),
    "page_size": _integer(1, limits.PAGE_SIZE),
    "placement": _one_of(Placement),
    "pool": _one_of(Pool),
    "index_dtype": _name("int32", "int64"),
    "strided": _flag,
    "causal": _flag,
    "window": _optional(_integer(1, MAX_TOKENS)),
    "sinks": _one_of(Sink),
    "soft_cap": _optional(_number(*limits.SOFT_CAP)),
    "scale": _optional(_number(*limits.SCALE)),
    "q_descale": _name(*_DESCALES),
    "k_descale": _name(*_DESCALES),
    "v_descale": _name(*_DESCALES),
    "index_form": _one_of(IndexForm),
    "prefix": _one_of(Prefix),
    "skip": _one_of(Skip),
    "slot_map": _one_of(SlotMap),
    "parts": _integer(1, limits.PARTS),
    "rank": _integer(0, limits.PARTS - 1),
    "states": _one_of(States),
    "index_task": _one_of(IndexTask),
    "earlier_calls": _integer(0, 8),
    "probe": _one_of(Probe),
}
"""What each field may hold."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case. Lengths are in tokens; a request's queries are its last ``query_lens[i]`` positions.

    ``kv_write`` stores, and ``kv_gather`` reads, every position of every request; they have no queries.
    ``lse_merge`` merges ``parts`` states of one row per position; ``earlier_calls`` calls of other shapes come
    before it, so that what a target keeps between calls shows. ``index_build`` works for rank ``rank`` of
    ``parts``. ``backend`` stores the keys and values of the query tokens, then attends. Raises ``CaseError`` on
    construction where a field, or a pair of fields, cannot be.
    """

    operation: Operation
    seed: int
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_kv_heads: int
    group_size: int
    head_dim: int
    v_head_dim: int
    dtype: str
    kv_dtype: str
    kv_layout: KVLayout
    v_layout: VLayout
    page_size: int
    placement: Placement
    pool: Pool
    index_dtype: str
    strided: bool
    causal: bool
    window: int | None
    sinks: Sink
    soft_cap: float | None
    scale: float | None
    q_descale: Granularity
    k_descale: Granularity
    v_descale: Granularity
    index_form: IndexForm
    prefix: Prefix
    skip: Skip
    slot_map: SlotMap
    parts: int
    rank: int
    states: States
    index_task: IndexTask
    earlier_calls: int
    probe: Probe

    def __post_init__(self) -> None:
        given = vars(self)
        for name, parse in _PARSERS.items():
            value = given[name]
            parsed = parse(name, value)
            if parsed is not value:
                object.__setattr__(self, name, parsed)
        _check_together(self)

    @property
    def num_q_heads(self) -> int:
        """Number of query heads."""
        return self.num_kv_heads * self.group_size

    @property
    def is_copy(self) -> bool:
        """Whether the operation moves bits and computes nothing on them."""
        return self.operation in (Operation.KV_WRITE, Operation.KV_GATHER)

    @property
    def is_attention(self) -> bool:
        """Whether the operation attends: queries against keys."""
        return self.operation in _ATTENTION

    def to_json(self) -> str:
        """One JSON object on several lines, keys in the order of the fields."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ``schema`` first."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"schema": SCHEMA} | {
            name: value.value if isinstance(value, StrEnum) else list(value) if isinstance(value, tuple) else value
            for name, value in plain.items()
        }


_ATTENTION = (Operation.PAGED_DECODE, Operation.VARLEN_EXTEND, Operation.BACKEND)
_ONLY_FOR: dict[str, tuple[Any, tuple[Operation, ...]]] = {
    "query_lens": ((), (*_ATTENTION, Operation.INDEX_BUILD)),
    "group_size": (1, _ATTENTION),
    "causal": (True, (Operation.VARLEN_EXTEND, Operation.BACKEND)),
    "window": (None, _ATTENTION),
    "sinks": (Sink.NONE, _ATTENTION),
    "soft_cap": (None, _ATTENTION),
    "scale": (None, _ATTENTION),
    "q_descale": (Granularity.NONE, _ATTENTION),
    "k_descale": (Granularity.NONE, _ATTENTION),
    "v_descale": (Granularity.NONE, _ATTENTION),
    "pool": (Pool.TIGHT, (Operation.KV_WRITE, Operation.KV_GATHER, Operation.INDEX_BUILD, *_ATTENTION)),
    "prefix": (Prefix.INLINE, (Operation.VARLEN_EXTEND,)),
    "skip": (Skip.NONE, (Operation.KV_WRITE,)),
    "slot_map": (SlotMap.NONE, (Operation.KV_WRITE, Operation.BACKEND)),
    "parts": (1, (Operation.LSE_MERGE, Operation.INDEX_BUILD)),
    "rank": (0, (Operation.INDEX_BUILD,)),
    "states": (States.FULL, (Operation.LSE_MERGE,)),
    "index_task": (IndexTask.NONE, (Operation.INDEX_BUILD,)),
    "earlier_calls": (0, (Operation.LSE_MERGE,)),
}
"""Fields that mean nothing to other operations, and the value that they have there."""


def _check_together(case: Case) -> None:
    operation = case.operation
    for name, (plain, operations) in _ONLY_FOR.items():
        if operation not in operations and getattr(case, name) != plain:
            allowed = json.dumps(list(plain) if isinstance(plain, tuple) else plain)
            raise _fail(name, getattr(case, name), f"{allowed} for {operation}")
    if sum(case.context_lens) > MAX_TOKENS:
        raise CaseError(f"case.context_lens: {sum(case.context_lens)} tokens together; allowed: at most {MAX_TOKENS}")
    if operation in _ONLY_FOR["query_lens"][1] and len(case.query_lens) != len(case.context_lens):
        raise _fail("query_lens", list(case.query_lens), f"one length a request, here {len(case.context_lens)}")
    if case.rank >= case.parts:
        raise _fail("rank", case.rank, f"below parts, here {case.parts}")
    if operation is Operation.INDEX_BUILD and case.index_task is IndexTask.NONE:
        raise _fail("index_task", case.index_task, f"{', '.join(t for t in IndexTask if t is not IndexTask.NONE)}")
    queries = list(zip(case.query_lens, case.context_lens, strict=False))
    if case.prefix is not Prefix.INLINE and any(q > n for q, n in queries):
        raise _fail("query_lens", list(case.query_lens), "no more queries than keys where the prefix is in the pool")
    if operation is Operation.BACKEND and not all(0 < q <= n for q, n in queries):
        raise _fail("query_lens", list(case.query_lens), "at least 1, and no more queries than keys, for backend")
    _check_dtypes(case)
    _check_layout(case)


_PROBES_FOR_OTHERS = (Probe.NORMAL, Probe.CONSTANT_V)
_PROBES_FOR_COPIES = (*_PROBES_FOR_OTHERS, Probe.BYTES)


def _check_dtypes(case: Case) -> None:
    copy = case.is_copy
    if (copy or case.operation is Operation.LSE_MERGE) and case.dtype != case.kv_dtype:
        raise _fail("dtype", case.dtype, f"kv_dtype, {case.kv_dtype}, for {case.operation}")
    probes = _PROBES_FOR_COPIES if copy else () if case.is_attention else _PROBES_FOR_OTHERS
    if (probes and case.probe not in probes) or (case.is_attention and case.probe is Probe.BYTES):
        raise _fail("probe", case.probe, f"{', '.join(probes) or 'any other probe'} for {case.operation}")
    if case.is_attention or case.operation is Operation.LSE_MERGE:
        for name in ("dtype", "kv_dtype"):
            if getattr(case, name) == "uint8":
                raise _fail(name, "uint8", f"a float dtype for {case.operation}")


def _check_layout(case: Case) -> None:
    if case.kv_layout is not KVLayout.SHUFFLE_5D:
        return
    x = 16 // STORAGE_BYTES[case.kv_dtype]
    for name in ("head_dim", *(("page_size",) if case.v_layout is VLayout.V5D else ())):
        if getattr(case, name) % x:
            raise _fail(name, getattr(case, name), f"a multiple of {x} for shuffle_5d in {case.kv_dtype}")


def case_from_dict(data: object) -> Case:
    """Rebuild a case from plain data.

    Raises ``CaseError`` naming the first field that is unknown, missing, of the wrong type or out of range.
    """
    if not isinstance(data, Mapping):
        raise CaseError(f"case: {type(data).__name__}; allowed: a JSON object")
    if "target" in data and "case" in data:
        raise CaseError("this is a finding: use attn-oracle replay")
    if "schema" not in data:
        raise CaseError(f"case.schema: missing; allowed: {SCHEMA}")
    if type(data["schema"]) is not int or data["schema"] != SCHEMA:
        raise _fail("schema", data["schema"], f"{SCHEMA}, the version that this release reads")
    names = [f.name for f in fields(Case)]
    for name in data:
        if name != "schema" and name not in names:
            raise CaseError(f"case.{_shown(name)}: unknown field; allowed: schema, {', '.join(names)}")
    for name in names:
        if name not in data:
            raise CaseError(f"case.{name}: missing; every field is required")
    return Case(**{name: data[name] for name in names})


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CaseError(f"case.{_shown(name)}: given twice")
        found[name] = value
    return found


def case_from_json(text: str) -> Case:
    """Parse the JSON text of a case. Raises ``CaseError``."""
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except CaseError:
        raise
    except (ValueError, RecursionError) as error:
        raise CaseError(f"case: not JSON: {str(error)[:120]}") from None
    return case_from_dict(data)


def load_case(path: Path) -> Case:
    """Read a case file (UTF-8 JSON). Raises ``CaseError``, with the file's name in front."""
    try:
        return case_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CaseError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CaseError(f"{path}: not UTF-8 text") from None
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from None
