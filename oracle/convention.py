"""What a backend means by its arguments: data with a cited source, never a branch in the oracle.

A convention is read from documentation, from the caller's contract or from the model, never from
observed output. The oracle has one definition of attention; adapters and checks translate between it
and a target's convention with the fields below. Needs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from oracle.kinds import IndexForm, KVLayout, LseBase, VLayout


class WindowMeaning(StrEnum):
    """How a target counts its sliding-window argument. The oracle counts keys, self included."""

    KEYS = "keys"
    """The argument is W: the number of visible keys, the query's own included."""
    LEFT = "left"
    """The argument is the number of keys to the left of the query: W - 1."""
    LEFT_RIGHT = "left_right"
    """A pair (left, right): (W - 1, 0) when causal, else (W - 1, off)."""
    UNSUPPORTED = "unsupported"


class CausalAlignment(StrEnum):
    """Where the causal diagonal ends when there are more keys than queries."""

    BOTTOM_RIGHT = "bottom_right"
    TOP_LEFT = "top_left"


class LseLayout(StrEnum):
    """Axis order of the log-sum-exp that a target returns."""

    TOKEN_HEAD = "token_head"
    HEAD_TOKEN = "head_token"
    NONE = "none"
    """The target returns no log-sum-exp."""


class EmptyOut(StrEnum):
    """What a row without any visible key holds in the output."""

    ZERO = "zero"
    UNDEFINED = "undefined"

    @property
    def number(self) -> float | None:
        """What such an output must hold; None: anything."""
        return 0.0 if self is EmptyOut.ZERO else None


class EmptyLse(StrEnum):
    """What a row without any visible key holds in the log-sum-exp."""

    NEGATIVE_INFINITY = "-inf"
    POSITIVE_INFINITY = "+inf"
    UNDEFINED = "undefined"

    @property
    def number(self) -> float | None:
        """What such a log-sum-exp must be; None: anything."""
        return None if self is EmptyLse.UNDEFINED else float(self.value)


class SinkUnits(StrEnum):
    """Units of a learned sink logit."""

    NATURAL = "natural"
    """Natural units, added to the softmax as it stands: exp(sink)."""
    SCALED = "scaled"
    """Multiplied by the softmax scale before the exponential."""
    UNSUPPORTED = "unsupported"


class DefaultScale(StrEnum):
    """The softmax scale used where the caller gives none."""

    RSQRT_HEAD_DIM = "rsqrt_head_dim"
    ONE = "one"
    REQUIRED = "required"
    """There is no default: the caller must give one."""


class Fp8Flavour(StrEnum):
    """Which family of 8-bit formats a target reads."""

    FN = "fn"
    FNUZ = "fnuz"
    ANY = "any"
    """Copies the bytes whatever they mean."""
    NONE = "none"


class Granularity(StrEnum):
    """How finely a descale factor varies."""

    NONE = "none"
    TENSOR = "tensor"
    HEAD = "head"
    REQUEST_HEAD = "request_head"
    TOKEN = "token"
    PAGE = "page"


def _members(owner: object, where: str, kinds: Mapping[str, type[StrEnum]]) -> None:
    """Make the fields of a frozen dataclass that were given as text members of their kinds.

    Raises ``ValueError`` with the field and what is allowed.
    """
    for name, kind in kinds.items():
        value = getattr(owner, name)
        try:
            object.__setattr__(owner, name, kind(value))
        except ValueError:
            allowed = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
            raise ValueError(f"{where}.{name}: {value!r}; allowed: {allowed}") from None


@dataclass(frozen=True, kw_only=True)
class Window:
    """How a target's window argument is to be read, and which values mean that there is none."""

    meaning: WindowMeaning = WindowMeaning.UNSUPPORTED
    off: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ``ValueError`` naming the field and what it may hold. ``meaning`` may be text."""
        _members(self, "window", {"meaning": WindowMeaning})
        if not isinstance(self.off, tuple) or not all(type(value) is int for value in self.off):
            raise ValueError(f"window.off: {self.off!r}; allowed: a tuple of integers, such as (-1,)")

    def argument(self, keys: int | None, *, causal: bool = True) -> int | tuple[int, int]:
        """The value to hand to the target so that each query sees ``keys`` keys, itself included; None: no window.

        Without ``causal`` there is no limit to the right. Raises ``ValueError`` where the target cannot express it.
        """
        if self.meaning is WindowMeaning.UNSUPPORTED:
            raise ValueError("window: this target takes none")
        if keys is None:
            if not self.off:
                raise ValueError("window: this convention has no value that means off")
            off = self.off[0]
            return (off, off) if self.meaning is WindowMeaning.LEFT_RIGHT else off
        if keys < 1:
            raise ValueError(f"window: {keys} keys; at least 1, the query's own, is visible")
        value = keys if self.meaning is WindowMeaning.KEYS else keys - 1
        if value in self.off:
            raise ValueError(f"window: {keys} keys would be passed as {value}, which means off here")
        if self.meaning is not WindowMeaning.LEFT_RIGHT:
            return value
        if not causal and not self.off:
            raise ValueError("window: this convention has no value that means no limit to the right")
        return (value, 0 if causal else self.off[0])

    def keys(self, argument: int | tuple[int, int] | None) -> int | None:
        """Inverse of ``argument``: how many keys a query sees by this value of it, itself included; None: no window.

        Raises ``ValueError`` for a value that means nothing here.
        """
        if self.meaning is WindowMeaning.UNSUPPORTED:
            raise ValueError("window: this convention has none")
        if argument is None:
            return None
        pair = self.meaning is WindowMeaning.LEFT_RIGHT
        left, *right = argument if pair and isinstance(argument, tuple) and len(argument) == 2 else (argument,)
        if type(left) is not int or len(right) != pair or any(r not in (0, *self.off) for r in right):
            allowed = f"(left, right) with right among {(0, *self.off)}" if pair else "an integer"
            raise ValueError(f"window: {argument!r}; allowed: {allowed}")
        if left in self.off:
            return None
        keys = left if self.meaning is WindowMeaning.KEYS else left + 1
        if keys < 1:
            raise ValueError(f"window: {left}; allowed: {left - keys + 1} up, or one of {self.off} for no window")
        return keys


@dataclass(frozen=True, kw_only=True)
class Descales:
    """How finely each operand's descale factor may vary."""

    q: Granularity = Granularity.NONE
    k: Granularity = Granularity.NONE
    v: Granularity = Granularity.NONE
    fp8_only: bool = False
    """Keys and values have factors if, and only if, they are stored in fp8, both of one granularity."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` naming the field and what it may hold. Granularities may be text."""
        _members(self, "descales", dict.fromkeys(("q", "k", "v"), Granularity))


@dataclass(frozen=True, kw_only=True)
class Convention:
    """Everything about a target's contract that differs between backends.

    ``source`` says where the contract is written: a document, a caller or a model. It is required,
    because a convention without a source is a guess.
    """

    source: str
    kv_layout: KVLayout = KVLayout.LINEAR
    v_layout: VLayout = VLayout.V5D
    index_form: IndexForm = IndexForm.SLOT_LIST
    index_dtypes: tuple[str, ...] = ("int32",)
    prefix_in_pool: bool = False
    """varlen_extend reads the keys before a request's queries from the pool, by slot."""
    keys_in_pool: bool = False
    """varlen_extend reads every key from the pool, those of the queries' own tokens too, by page table."""
    window: Window = Window()
    causal_alignment: CausalAlignment = CausalAlignment.BOTTOM_RIGHT
    lse_base: LseBase = LseBase.NATURAL
    lse_layout: LseLayout = LseLayout.NONE
    lse_includes_sink: bool = False
    empty_out: EmptyOut = EmptyOut.ZERO
    empty_lse: EmptyLse = EmptyLse.NEGATIVE_INFINITY
    sink: SinkUnits = SinkUnits.UNSUPPORTED
    sink_dtype: str = "fp32"
    soft_cap: bool = False
    default_scale: DefaultScale = DefaultScale.REQUIRED
    fp8_flavour: Fp8Flavour = Fp8Flavour.NONE
    descales: Descales = Descales()

    def __post_init__(self) -> None:
        """Raises ``ValueError`` naming the field and what it may hold. Members of enums may be text."""
        if not isinstance(self.source, str) or not self.source.strip():
            raise ValueError("convention.source: say where the contract is written")
        if self.prefix_in_pool and self.keys_in_pool:
            raise ValueError("convention.keys_in_pool: allowed: one of prefix_in_pool and keys_in_pool")
        _members(self, "convention", _KINDS)
        for field, kind in (("window", Window), ("descales", Descales)):
            if not isinstance(getattr(self, field), kind):
                raise ValueError(f"convention.{field}: {getattr(self, field)!r}; allowed: {kind.__name__}(...)")
        if not isinstance(self.index_dtypes, tuple) or not self.index_dtypes:
            raise ValueError(f"convention.index_dtypes: {self.index_dtypes!r}; allowed: a tuple of int32, int64")
        for name in self.index_dtypes:
            if name not in ("int32", "int64"):
                raise ValueError(f"convention.index_dtypes: {name!r}; allowed: int32, int64")


_KINDS: Mapping[str, type[StrEnum]] = {
    "kv_layout": KVLayout,
    "v_layout": VLayout,
    "index_form": IndexForm,
    "causal_alignment": CausalAlignment,
    "lse_base": LseBase,
    "lse_layout": LseLayout,
    "empty_out": EmptyOut,
    "empty_lse": EmptyLse,
    "sink": SinkUnits,
    "default_scale": DefaultScale,
    "fp8_flavour": Fp8Flavour,
}
