"""The arithmetic that a target is allowed: data with a cited source.

Every rounding that an implementation makes (its query cast, its softmax weights, its partial results)
is a field here and enters the error budget; none of them moves the truth. Needs nothing but the
standard library. Formulas that read these fields live in ``oracle.budget``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rounding(StrEnum):
    """How a value is rounded to a narrower format."""

    NEAREST_EVEN = "nearest_even"
    TOWARD_ZERO = "toward_zero"


class Accumulation(StrEnum):
    """How a matrix unit adds the products of one contraction."""

    ANY = "any"
    """Every partial sum rounded to float32, in any order."""
    BLOCK = "block"
    """Blocks of ``block`` terms summed in any order, the blocks chained."""
    FUSED = "fused"
    """Each term of a block truncated to ``fraction_bits`` below the largest, then one rounding."""


class KeyOrder(StrEnum):
    """The order in which tiles of keys are visited."""

    ANY = "any"
    ASCENDING = "ascending"
    DESCENDING = "descending"


class RankOwnership(StrEnum):
    """Which keys of a request a rank owns."""

    CONTIGUOUS = "contiguous"
    CYCLIC = "cyclic"
    ANY = "any"


@dataclass(frozen=True, kw_only=True)
class MatrixUnit:
    """Accumulation model of one matrix product.

    ``unit_roundoff`` is the relative rounding error of the accumulator (2**-24 for float32 rounded to
    nearest); ``block`` counts products per instruction; ``fraction_bits`` is F of the fused model.
    """

    accumulation: Accumulation = Accumulation.ANY
    block: int = 1
    fraction_bits: int = 24
    unit_roundoff: float = 2.0**-24
    toward_zero: bool = False


@dataclass(frozen=True, kw_only=True)
class Citation:
    """A version of a file that a precision was read from.

    ``file`` begins with its package's name; ``lines`` such as ``96-259, 667-738``; ``sha256`` of the whole file, so
    that a change of the source is noticed.
    """

    file: str
    lines: str
    sha256: str


_NAMES = ("input", "fp32", "bf16", "fp16", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
_DTYPES = {
    **dict.fromkeys(("q_cast", "kv_cast", "qk_product", "p_dtype"), True),
    **dict.fromkeys(("lse_dtype", "logit_dtype", "partial_dtype", "rank_dtype", "reduce_dtype"), False),
}
"""The fields of ``Precision`` that name a dtype, and whether each may be None."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What a target may round, as bounds. A default is the loosest honest assumption.

    dtypes are named ``fp32``, ``bf16``, ``fp16`` or an fp8 format; ``input`` means the dtype of the
    query. Errors are relative unless said otherwise.
    """

    source: str = "default"
    """The functions that it was read from, and what they round."""
    cited: tuple[Citation, ...] = ()
    """Where they are: one file for each version that was read."""

    out_rounding: Rounding = Rounding.NEAREST_EVEN
    lse_dtype: str = "fp32"

    q_cast: str | None = None
    """dtype that the query is cast to inside the target."""
    kv_cast: str | None = "input"
    """dtype that keys and values are cast to once their descales are multiplied in; None: used as stored."""
    qk: MatrixUnit = MatrixUnit()
    qk_product: str | None = "input"
    """dtype that each elementwise product q*k is rounded to before the sum; None: it is not."""
    logit_dtype: str = "fp32"
    """dtype that logits are held in before the softmax."""
    scale_error: float = 2.0**-23
    tanh_error: float = 2.0**-11
    """absolute error of tanh, before the multiplication by the cap."""
    exp_error: float = 2.5 * 2.0**-23
    exp_argument_roundings: int = 3
    log_error: float = 2.0**-22

    p_dtype: str | None = "input"
    """dtype that softmax weights are cast to for the second product; None: float32."""
    p_scale: float = 1.0
    p_rounding: Rounding = Rounding.NEAREST_EVEN
    p_normalised: bool = False
    """True: weights are divided by their sum before the cast, as in eager implementations; then none is exactly 1."""
    row_sum_of_rounded_p: bool | None = None
    """True: the denominator adds rounded weights; None: unknown."""
    pv: MatrixUnit = MatrixUnit()
    sink_first: bool | None = None
    """False: sinks join when parts are merged or at the end, so that weights are formed against the largest logit of
    a key; True: the running maximum starts at the sink; None: unknown."""

    tile: int = 16
    """the smallest number of keys that one step of the online softmax takes."""
    key_order: KeyOrder = KeyOrder.ANY
    max_splits: int = 1
    partial_dtype: str = "fp32"
    ranks: int = 1
    rank_ownership: RankOwnership = RankOwnership.ANY
    rank_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    flush_subnormals: bool = True

    def __post_init__(self) -> None:
        """Raises ``ValueError`` naming the field and what it may hold."""
        for name, optional in _DTYPES.items():
            value = getattr(self, name)
            if value not in _NAMES and not (optional and value is None):
                allowed = ", ".join([*_NAMES, *(["None"] if optional else [])])
                raise ValueError(f"precision.{name}: {value!r}; allowed: {allowed}")
        for name in ("tile", "max_splits", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"precision.{name}: {getattr(self, name)}; at least 1")
        if self.p_scale <= 0:
            raise ValueError(f"precision.p_scale: {self.p_scale}; above 0")

    def loosest(self) -> tuple[str, ...]:
        """Names of the fields that are left at a loose assumption; the defaults of the others assume nothing."""
        return tuple(name for name in _LOOSE if getattr(self, name) == getattr(Precision, name))


_LOOSE = (
    *("kv_cast", "qk", "qk_product", "scale_error", "tanh_error", "exp_error", "exp_argument_roundings", "log_error"),
    *("p_dtype", "row_sum_of_rounded_p", "pv", "tile", "key_order", "rank_ownership", "flush_subnormals"),
)

UNDECLARED = Precision(source="nothing is declared", p_normalised=True)
"""Of a kernel that says nothing of itself: it may be an eager one, which divides weights by their sum first."""

EXACT_COPY = Precision(source="a copy: bits are preserved")
"""For operations that move data and compute nothing on it."""
