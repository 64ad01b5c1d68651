"""Declare a kernel: which operation it claims, its convention, its precision, what it supports.

    from oracle import Convention, Supports, declare

    @declare.paged_decode(name="mine.decode", convention=Convention(source="my README"))
    def decode(q, k_cache, v_cache, page_table, lengths, *, scale, window, sinks, soft_cap,
               k_descale, v_descale):
        ...

A declaration is data attached to the function (attribute ``__attn_oracle__``); the function itself is
returned unchanged. Needs nothing but the standard library.

Signatures, in the target's own layout and convention (shapes as in ``docs/operations.md``):

=================  =======================================================================================
paged_decode       (q, k_cache, v_cache, page_table, lengths, *, scale, window, sinks, soft_cap,
                   k_descale, v_descale) -> out or (out, lse)
varlen_extend      (q, k, v, q_indptr, kv_indptr, *, causal, scale, window, sinks, soft_cap,
                   q_descale, k_descale, v_descale) -> out or (out, lse)
kv_write           (key, value, k_cache, v_cache, slots, *, slot_map) -> None, the caches in place
kv_gather          (k_cache, v_cache, slots) -> (key, value)
=================  =======================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from oracle.convention import Convention
from oracle.kinds import Engine, Operation
from oracle.precision import Precision

ATTRIBUTE = "__attn_oracle__"

PARAMETERS: dict[Operation, tuple[str, ...]] = {
    Operation.PAGED_DECODE: (
        *("q", "k_cache", "v_cache", "page_table", "lengths"),
        *("scale", "window", "sinks", "soft_cap", "k_descale", "v_descale"),
    ),
    Operation.VARLEN_EXTEND: (
        *("q", "k", "v", "q_indptr", "kv_indptr"),
        *("causal", "scale", "window", "sinks", "soft_cap", "q_descale", "k_descale", "v_descale"),
    ),
    Operation.KV_WRITE: ("key", "value", "k_cache", "v_cache", "slots", "slot_map"),
    Operation.KV_GATHER: ("k_cache", "v_cache", "slots"),
}
"""Parameter names of each operation that can be declared so far."""

_ATTENTION_FEATURES = ("window", "sinks", "soft_cap", "custom_scale", "non_causal", "chunked", "empty", "strided")
FEATURES: dict[Operation, tuple[str, ...]] = {
    Operation.PAGED_DECODE: _ATTENTION_FEATURES,
    Operation.VARLEN_EXTEND: _ATTENTION_FEATURES,
    Operation.KV_WRITE: ("strided", "skip", "slot_map"),
    Operation.KV_GATHER: (),
}
"""What a target of each operation may support beyond the plain call.

window, sinks, soft_cap, custom_scale (other than 1/sqrt(D)), non_causal; chunked: fewer queries than keys;
empty: a query without any key; strided: rows that are not contiguous; skip: negative slots; slot_map: writes
through a map to a sub-pool.
"""

F = TypeVar("F", bound=Callable[..., Any])


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
    compiler: str | None = None
    """distribution whose Triton must compile it; None: the one installed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Declaration:
    """One target: a callable and everything that is claimed about it."""

    name: str
    operation: Operation
    function: Callable[..., Any] = field(repr=False)
    convention: Convention
    precision: Precision | Mapping[str, Precision] | None
    """One arithmetic, or one by the dtype of the inputs; None: nothing is claimed."""
    supports: Supports
    engines: tuple[Engine, ...]
    unavailable: Callable[[Engine], str | None] = field(repr=False)
    """returns why the target cannot run on an engine here, or None if it can."""

    def precision_for(self, dtype: str) -> Precision:
        """The arithmetic allowed for inputs of ``dtype``; the loosest honest one where none is declared."""
        if isinstance(self.precision, Mapping):
            return self.precision.get(dtype, Precision())
        return self.precision or Precision()


def _available(engine: Engine) -> str | None:
    return None


def _check_signature(operation: Operation, function: Callable[..., Any]) -> None:
    wanted = PARAMETERS[operation]
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    missing = [name for name in wanted if name not in parameters]
    extra = [name for name, p in parameters.items() if name not in wanted and p.default is inspect.Parameter.empty]
    if missing or extra:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(extra)}"
        raise DeclarationError(
            f"declare.{operation.value}: {function.__name__}() {problem}; "
            f"write def {function.__name__}({', '.join(wanted)})"
        )


class _Operation:
    """Decorator factory for one operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def __call__(
        self,
        *,
        name: str,
        convention: Convention,
        precision: Precision | Mapping[str, Precision] | None = None,
        supports: Supports | None = None,
        engines: tuple[Engine, ...] = tuple(Engine),
        unavailable: Callable[[Engine], str | None] = _available,
    ) -> Callable[[F], F]:
        """Attach a declaration to a function.

        Raises ``DeclarationError`` if the name is no dotted word, a feature is not one of the operation's, or
        the function's parameters are not the operation's.
        """
        if not name or any(c.isspace() or c in "*?[]" for c in name):
            raise DeclarationError(f"declare.{self.operation.value}: name {name!r}; write dotted words")

        supported = supports or Supports()
        unknown = sorted(supported.features - set(FEATURES[self.operation]))
        if unknown:
            allowed = ", ".join(FEATURES[self.operation]) or "none"
            raise DeclarationError(
                f"declare.{self.operation.value}: supports.features: {', '.join(unknown)}; allowed: {allowed}"
            )

        def attach(function: F) -> F:
            _check_signature(self.operation, function)
            declaration = Declaration(
                name=name,
                operation=self.operation,
                function=function,
                convention=convention,
                precision=precision,
                supports=supported,
                engines=engines,
                unavailable=unavailable,
            )
            setattr(function, ATTRIBUTE, declaration)
            return function

        return attach


paged_decode = _Operation(Operation.PAGED_DECODE)
varlen_extend = _Operation(Operation.VARLEN_EXTEND)
kv_write = _Operation(Operation.KV_WRITE)
kv_gather = _Operation(Operation.KV_GATHER)


def declaration_of(function: object) -> Declaration | None:
    """The declaration attached to ``function``, or None."""
    found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, Declaration) else None
