"""Declare a kernel: which operation it claims, its convention, its precision, what it supports.

    from oracle import Convention, Supports, declare

    @declare.paged_decode(name="mine.decode", convention=Convention(source="my README"))
    def decode(q, k_cache, v_cache, page_table, lengths, *, scale, window, sinks, soft_cap,
               k_descale, v_descale):
        ...

A declaration is data attached to the function (attribute ``__attn_oracle__``); the function itself is
returned unchanged. ``declared`` finds those of this process by name. Needs nothing but the standard library.

The parameters are those of ``parameters``: in the target's own layout and convention, tensors by name, the
options last and by keyword. ``docs/operations.md`` gives shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakSet

from oracle.convention import Convention, SinkUnits, WindowMeaning
from oracle.kinds import Engine, IndexForm, IndexTask, Operation
from oracle.precision import UNDECLARED, Precision

ATTRIBUTE = "__attn_oracle__"

_OPTIONS = ("scale", "window", "sinks", "soft_cap", "k_descale", "v_descale")
_BY_TASK: dict[IndexTask, tuple[str, ...]] = {
    IndexTask.RANK_SLOTS: (
        *("req_to_token", "req_pool_indices", "local_lens", "indptr", "starts"),
        *("parts", "rank", "total"),
    ),
    IndexTask.GATHERED: ("indptr", "query_lens", "query_starts", "prefix_lens", "prefix_starts", "parts", "total"),
    IndexTask.LOCAL: ("lens", "kv_starts", "slots", "local_lens", "local_starts", "parts", "rank", "total"),
}


def parameters(operation: Operation, convention: Convention, task: IndexTask = IndexTask.NONE) -> tuple[str, ...]:
    """Parameter names of a target's function.

    Attention returns ``out`` or ``(out, lse)``; kv_write stores in place and returns None; kv_gather returns
    ``(key, value)``; lse_merge ``(out, lse)``; index_build the list; backend stores in place and returns ``out``.
    Raises ``DeclarationError`` for an operation that cannot be declared yet.
    """
    table = convention.index_form is IndexForm.PAGE_TABLE
    match operation:
        case Operation.PAGED_DECODE:
            return (
                "q",
                "k_cache",
                "v_cache",
                *(("page_table", "lengths") if table else ("kv_indptr", "slots")),
                *_OPTIONS,
            )
        case Operation.VARLEN_EXTEND if convention.prefix_in_pool:
            return (
                "q",
                "k",
                "v",
                "k_cache",
                "v_cache",
                "q_indptr",
                "kv_indptr",
                "slots",
                "causal",
                *_OPTIONS,
                "q_descale",
            )
        case Operation.VARLEN_EXTEND if convention.keys_in_pool:
            return (
                "q",
                "k_cache",
                "v_cache",
                "q_indptr",
                "page_table",
                "lengths",
                "causal",
                *_OPTIONS,
                "q_descale",
            )
        case Operation.VARLEN_EXTEND:
            return "q", "k", "v", "q_indptr", "kv_indptr", "causal", *_OPTIONS, "q_descale"
        case Operation.KV_WRITE:
            return "key", "value", "k_cache", "v_cache", "slots", "slot_map"
        case Operation.KV_GATHER:
            return "k_cache", "v_cache", "slots"
        case Operation.LSE_MERGE:
            return "outs", "lses"
        case Operation.INDEX_BUILD if task in _BY_TASK:
            return _BY_TASK[task]
        case Operation.BACKEND:
            return (
                "q",
                "k",
                "v",
                "k_cache",
                "v_cache",
                "q_indptr",
                "lengths",
                "slots",
                "slot_map",
                "causal",
                *_OPTIONS,
            )
    raise DeclarationError(f"declare.{operation.value}: cannot be declared yet{' without a task' if task else ''}")


_ATTENTION_FEATURES = ("window", "sinks", "soft_cap", "custom_scale", "non_causal", "chunked", "empty", "strided")
FEATURES: dict[Operation, tuple[str, ...]] = {
    Operation.PAGED_DECODE: _ATTENTION_FEATURES,
    Operation.VARLEN_EXTEND: _ATTENTION_FEATURES,
    Operation.KV_WRITE: ("strided", "skip", "slot_map"),
    Operation.KV_GATHER: (),
    Operation.LSE_MERGE: ("empty", "empty_nan", "stateful"),
    Operation.INDEX_BUILD: (),
    Operation.BACKEND: ("window", "sinks", "soft_cap", "custom_scale", "non_causal", "chunked", "slot_map", "strided"),
}
"""What a target of each operation may support beyond the plain call.

window, sinks, soft_cap, custom_scale (other than 1/sqrt(D)), non_causal; chunked: fewer queries than keys;
empty: a query, or a state to merge, without any key; empty_nan: outputs of empty states may be NaN; strided:
rows that are not contiguous; skip: negative slots; slot_map: through a map to a sub-pool; stateful:
something is kept from call to call.
"""

_ALSO_AGREES = {Operation.PAGED_DECODE: (Operation.VARLEN_EXTEND,)}
"""Whose targets must return the same for the same queries."""

DTYPES = ("fp32", "bf16", "fp16", "uint8", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
"""Storage dtypes by name; uint8 for copies only."""

_INTEGERS = {
    "head_dims": (4096, True),
    "v_head_dims": (4096, False),
    "page_sizes": (4096, True),
    "num_kv_heads": (1024, True),
    "group_sizes": (1024, True),
    "parts": (64, True),
}
"""The largest value of each field of ``Supports``, as in a case, and whether it needs one."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A setting that may change how a result is rounded, and nothing else: a number of splits, the size of a partition.

    ``keyword`` is one of the function's own, with a default; ``values`` are others that it takes. ``precision`` names
    the field of ``Precision`` that holds the setting, so that each value is judged by its own budget.
    """

    keyword: str
    values: tuple[int, ...]
    precision: str | None = None


class DeclarationError(TypeError):
    """A declaration that cannot be used. The message says what to write instead."""


@dataclass(frozen=True, kw_only=True)
class Supports:
    """What a target claims to handle. What it does not claim is skipped, counted and shown.

    ``features`` are among those that ``FEATURES`` lists for the operation.
    """

    dtypes: tuple[str, ...] = ("bf16", "fp16")
    kv_dtypes: tuple[str, ...] = ()
    """storage dtypes of the cache; empty: as the inputs."""
    head_dims: tuple[int, ...] = (64, 128)
    v_head_dims: tuple[int, ...] = ()
    """empty: as head_dims."""
    page_sizes: tuple[int, ...] = (16,)
    num_kv_heads: tuple[int, ...] = (1, 2, 3, 8)
    group_sizes: tuple[int, ...] = (1, 4)
    max_query_len: int | None = None
    features: frozenset[str] = frozenset()
    requires_finite_pool: bool = False
    batch_invariant: bool = False
    deterministic: bool = True
    archs: tuple[str, ...] = ()
    """empty: any."""
    parts: tuple[int, ...] = (1,)
    """numbers of partial states or ranks."""
    compiler: str | None = None
    """distribution whose Triton must compile it; None: the one installed."""

    def __post_init__(self) -> None:
        """Raises ``DeclarationError`` naming the field and what it may hold."""
        for name, required in (("dtypes", True), ("kv_dtypes", False)):
            _check_each(name, getattr(self, name), DTYPES.__contains__, ", ".join(DTYPES), required)
        for name, (most, required) in _INTEGERS.items():
            _check_each(name, getattr(self, name), _integer_up_to(most), f"integers from 1 to {most}", required)
        _check_each("archs", self.archs, _is_text, "names", False)
        features = self.features
        if not isinstance(features, frozenset | set) or not all(map(_is_text, features)):
            raise DeclarationError(f"supports.features: {features!r}; allowed: a set of names, such as {{'window'}}")
        object.__setattr__(self, "features", frozenset(features))
        if self.max_query_len is not None and not _integer_up_to(1 << 20)(self.max_query_len):
            raise DeclarationError(f"supports.max_query_len: {self.max_query_len!r}; allowed: an integer, 1 up; None")
        for name in ("requires_finite_pool", "batch_invariant", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise DeclarationError(f"supports.{name}: {getattr(self, name)!r}; allowed: True, False")
        if self.compiler is not None and not _is_text(self.compiler):
            raise DeclarationError(f"supports.compiler: {self.compiler!r}; allowed: a distribution's name or None")


def _check_each(name: str, values: object, fits: Callable[[Any], bool], allowed: str, required: bool) -> None:
    """Raises ``DeclarationError`` unless ``values`` is a tuple of what fits, with one at least if ``required``."""
    if not isinstance(values, tuple):
        raise DeclarationError(f"supports.{name}: {values!r}; allowed: a tuple of {allowed}")
    for value in values:
        if not fits(value):
            raise DeclarationError(f"supports.{name}: {value!r}; allowed: {allowed}")
    if required and not values:
        raise DeclarationError(f"supports.{name}: empty; allowed: at least one of {allowed}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _integer_up_to(most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 1 <= value <= most


@dataclass(frozen=True, kw_only=True, eq=False)
class Declaration:
    """One target: a callable and everything that is claimed about it."""

    name: str
    operation: Operation
    function: Callable[..., Any] = field(repr=False)
    convention: Convention
    precision: Precision | Mapping[str, Precision] | None
    """One arithmetic, or one by dtype, as ``precision_for`` looks it up; None: nothing is claimed."""
    supports: Supports
    engines: tuple[Engine, ...]
    unavailable: Callable[[Engine], str | None] = field(repr=False)
    """returns why the target cannot run on an engine here, or None if it can."""
    task: IndexTask = IndexTask.NONE
    reset: Callable[[], None] | None = field(default=None, repr=False)
    """forgets what the target keeps between calls; called before each case."""
    agrees_with: Declaration | None = field(default=None, repr=False)
    """another target that must return the same on cases that both support: one of the same operation, or, of a decode,
    a ``varlen_extend``, which is given the same queries as the last tokens of each request."""
    knobs: tuple[Knob, ...] = ()
    runs: tuple[str, ...] = ()
    """the functions that a call runs, each with the package whose code it is, a caller before what it calls; empty: as
    the name says."""

    def precision_for(self, dtype: str, kv_dtype: str | None = None) -> Precision:
        """The arithmetic allowed for a query of ``dtype`` and keys stored as ``kv_dtype`` (None: as the query).

        Of a mapping: the entry of ``kv_dtype``, else that of ``dtype``. The loosest honest one where none is declared.
        """
        if isinstance(self.precision, Mapping):
            return self.precision.get(kv_dtype or dtype, self.precision.get(dtype, UNDECLARED))
        return self.precision or UNDECLARED


def _available(engine: Engine) -> str | None:
    return None


def _check_signature(operation: Operation, wanted: tuple[str, ...], function: Callable[..., Any]) -> None:
    """Arguments are given by keyword: those that the operation has, and no others. ``**_`` takes what is left out."""
    declared = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in declared.values())
    named = {n: p for n, p in declared.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    missing = [] if open_ended else [name for name in wanted if name not in named]
    extra = [name for name, p in named.items() if name not in wanted and p.default is inspect.Parameter.empty]
    positional = [name for name, p in named.items() if p.kind is p.POSITIONAL_ONLY]
    if missing or extra or positional:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(extra)}"
        if positional:
            problem = f"takes {', '.join(positional)} by position only, and is called by keyword"
        shown = getattr(function, "__name__", "it")
        raise DeclarationError(
            f"declare.{operation.value}: {shown}() {problem}; write def {shown}({', '.join(wanted)})"
        )


def _unsaid(convention: Convention, supports: Supports) -> Iterator[tuple[str, str]]:
    """Features of which the convention says nothing, so that they would never be tried, and what to write for each."""
    attends = supports.features
    if "window" in attends and convention.window.meaning is WindowMeaning.UNSUPPORTED:
        yield "window", "window=Window(meaning=WindowMeaning.KEYS, off=(0,)), or what your window argument means"
    if "sinks" in attends and convention.sink is SinkUnits.UNSUPPORTED:
        yield "sinks", "sink=SinkUnits.NATURAL, or the units of your sinks"
    if "soft_cap" in attends and not convention.soft_cap:
        yield "soft_cap", "soft_cap=True"


class _Operation:
    """Decorator factory for one operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def __call__(
        self,
        function: None = None,
        /,
        *,
        name: str = "",
        convention: Convention | None = None,
        precision: Precision | Mapping[str, Precision] | None = None,
        supports: Supports | None = None,
        engines: tuple[Engine, ...] = tuple(Engine),
        unavailable: Callable[[Engine], str | None] = _available,
        task: IndexTask = IndexTask.NONE,
        reset: Callable[[], None] | None = None,
        agrees_with: Callable[..., Any] | None = None,
        knobs: tuple[Knob, ...] = (),
        runs: tuple[str, ...] = (),
    ) -> Callable[[F], F]:
        """Attach a declaration to a function; ``name`` and ``convention`` are needed.

        Raises ``DeclarationError`` if the name is no dotted word, an argument is not of its type, a feature is
        not one of the operation's, or the function's parameters are not the operation's. ``agrees_with`` is a
        function declared before, which must return the same; ``runs`` names functions.
        """
        if function is not None or convention is None:
            raise DeclarationError(f"write @declare.{self.operation.value}(name=..., convention=Convention(...), ...)")
        if not _is_text(name) or any(c.isspace() or c in "*?[]" for c in name):
            raise DeclarationError(f"declare.{self.operation.value}: name {name!r}; write dotted words")

        supported = Supports() if supports is None else supports
        self._check_types(convention, precision, supported, engines, unavailable, task, reset)
        if not isinstance(runs, tuple) or not all(map(_is_text, runs)):
            raise self._wrong("runs", runs, "a tuple of names")
        partner = None if agrees_with is None else declaration_of(agrees_with)
        partners = (self.operation, *_ALSO_AGREES.get(self.operation, ()))
        if agrees_with is not None and (partner is None or partner.operation not in partners):
            raise self._wrong("agrees_with", agrees_with, f"a function declared as {' or '.join(partners)}, None")
        if not isinstance(knobs, tuple) or not all(isinstance(knob, Knob) for knob in knobs):
            raise self._wrong("knobs", knobs, "a tuple of Knob")
        unknown = sorted(supported.features - set(FEATURES[self.operation]))
        if unknown:
            allowed = ", ".join(FEATURES[self.operation]) or "none"
            raise DeclarationError(
                f"declare.{self.operation.value}: supports.features: {', '.join(unknown)}; allowed: {allowed}"
            )

        for feature, write in _unsaid(convention, supported):
            raise DeclarationError(
                f"declare.{self.operation.value}: supports.features: {feature!r}, of which the convention says "
                f"nothing; write convention=Convention({write}, ...)"
            )

        def attach(function: F) -> F:
            if not callable(function):
                raise self._wrong("the decorated object", function, "a function")
            _check_signature(self.operation, parameters(self.operation, convention, task), function)
            for knob in knobs:
                self._check_knob(knob, function)
            declaration = Declaration(
                name=name,
                operation=self.operation,
                function=function,
                convention=convention,
                precision=precision,
                supports=supported,
                engines=engines,
                unavailable=unavailable,
                task=task,
                reset=reset,
                agrees_with=partner,
                knobs=knobs,
                runs=runs,
            )
            setattr(function, ATTRIBUTE, declaration)
            _declared.add(declaration)
            return function

        return attach

    def _check_types(
        self,
        convention: object,
        precision: object,
        supports: object,
        engines: object,
        unavailable: object,
        task: object,
        reset: object,
    ) -> None:
        if not isinstance(convention, Convention):
            raise self._wrong("convention", convention, "a Convention")
        if not isinstance(supports, Supports):
            raise self._wrong("supports", supports, "a Supports or None")
        by_dtype = precision if isinstance(precision, Mapping) else {}
        if not isinstance(precision, Precision | Mapping | None) or not all(
            isinstance(value, Precision) for value in by_dtype.values()
        ):
            raise self._wrong("precision", precision, "a Precision, a mapping from dtype to Precision, None")
        for dtype in by_dtype:
            if dtype not in DTYPES:
                raise self._wrong("precision", dtype, ", ".join(DTYPES))
        if not isinstance(engines, tuple) or not engines or not all(isinstance(e, Engine) for e in engines):
            raise self._wrong("engines", engines, f"a tuple of {', '.join(f'Engine.{e.name}' for e in Engine)}")
        if not callable(unavailable):
            raise self._wrong("unavailable", unavailable, "a function of an Engine that returns a reason or None")
        if not isinstance(task, IndexTask):
            raise self._wrong("task", task, ", ".join(f"IndexTask.{t.name}" for t in IndexTask))
        if reset is not None and not callable(reset):
            raise self._wrong("reset", reset, "a function without parameters, None")

    def _check_knob(self, knob: Knob, function: Callable[..., Any]) -> None:
        """Raises ``DeclarationError`` unless the function takes the keyword, and the precision has the field."""
        declared = inspect.signature(function).parameters
        own = [name for name, p in declared.items() if p.default is not inspect.Parameter.empty]
        if knob.keyword not in own:
            raise self._wrong("knob.keyword", knob.keyword, f"a parameter with a default: {', '.join(own) or 'none'}")
        fields = Precision.__dataclass_fields__
        if knob.precision is not None and knob.precision not in fields:
            raise self._wrong("knob.precision", knob.precision, f"None, {', '.join(fields)}")
        if not isinstance(knob.values, tuple) or not knob.values or not all(type(v) is int for v in knob.values):
            raise self._wrong("knob.values", knob.values, "a tuple of integers, one at least")

    def _wrong(self, name: str, value: object, allowed: str) -> DeclarationError:
        return DeclarationError(f"declare.{self.operation.value}: {name}: {value!r}; allowed: {allowed}")


_declared: WeakSet[Declaration] = WeakSet()
"""Of this process, as long as their functions live."""

paged_decode = _Operation(Operation.PAGED_DECODE)
"""One or a few queries a request over keys in a paged cache."""
varlen_extend = _Operation(Operation.VARLEN_EXTEND)
"""Requests of any lengths, packed one after another: prefill, or extension of a cached prefix."""
kv_write = _Operation(Operation.KV_WRITE)
"""Keys and values of new tokens into slots of a paged cache."""
kv_gather = _Operation(Operation.KV_GATHER)
"""Keys and values of requests out of a paged cache into linear tensors."""
lse_merge = _Operation(Operation.LSE_MERGE)
"""Partial results with their log-sum-exps to the result over all keys."""
index_build = _Operation(Operation.INDEX_BUILD)
"""Lists of slots, for decode context parallel: see `IndexTask`."""
backend = _Operation(Operation.BACKEND)
"""A serving stack's whole path over a cache: write, plan, attend."""


def __getattr__(name: str) -> Any:
    raise AttributeError(f"declare.{name}: no operation; allowed: {', '.join(Operation)}")


def declaration_of(function: object) -> Declaration | None:
    """The declaration attached to ``function``, or None."""
    found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, Declaration) else None


def declared(name: str) -> list[Declaration]:
    """What was declared by this name in this process, in no order: a module that is loaded again declares again."""
    return [declaration for declaration in _declared if declaration.name == name]
