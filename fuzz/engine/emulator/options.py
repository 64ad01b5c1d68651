"""How the emulator behaves where hardware, versions or taste differ: data, never branches on a target."""

from dataclasses import dataclass, replace
from enum import StrEnum


class MaskedLanes(StrEnum):
    """What a masked-off lane of a load without `other` holds."""

    UNDEFINED = "undefined"  # as Triton documents it: reported when it reaches an output or an address
    ZERO = "zero"  # as AMD buffer loads define it


class Fp8Overflow(StrEnum):
    """What a value that rounds beyond the largest finite fp8 value becomes."""

    SATURATE = "saturate"
    NAN = "nan"


class Accumulation(StrEnum):
    """Width and order of the sums of a matrix product whose accumulator is fp32.

    Hardware documents neither; matrix units differ in how many products one step adds, and in its rounding. A
    verdict that changes with the order was within a rounding error of the bound.
    """

    LIBRARY = "library"  # fp32, in the order of torch's matrix product: the fastest
    SEQUENTIAL = "sequential"  # fp32 after every `dot_chunk` products, which one step adds exactly; k ascending
    TREE = "tree"  # fp32 after every addition, as a balanced binary tree over k
    FLOAT64 = "float64"  # float64, rounded to fp32 once: what no order can better


@dataclass(frozen=True)
class Options:
    """Fidelity and execution choices of a session.

    Fidelity: `masked_lanes`, `fp8_overflow`, `accumulation` and its `dot_chunk` (products a step; 16 is the k of
    the 16-bit matrix instructions of NVIDIA and AMD). They change results, and serial and batched execution
    stay bit-identical under each.

    Execution: `batch_bytes` bounds the memory of one batch of programs: the largest value of a batch stays below
    an eighth of it. `serial` executes programs one by one; results are the same, bit for bit. `coverage`
    collects which lines, branches, trip counts and masks were seen (`coverage.Coverage`); it is slow.

    Raises ValueError for a `dot_chunk` below 1.
    """

    masked_lanes: MaskedLanes = MaskedLanes.UNDEFINED
    fp8_overflow: Fp8Overflow = Fp8Overflow.SATURATE
    accumulation: Accumulation = Accumulation.LIBRARY
    dot_chunk: int = 16
    batch_bytes: int = 64 << 20
    serial: bool = False
    coverage: bool = False

    def __post_init__(self) -> None:
        if self.dot_chunk < 1:
            raise ValueError(f"dot_chunk is {self.dot_chunk}; a step adds at least one product")


def fidelity_variants(base: Options) -> tuple[Options, ...]:
    """`base`, then each option set that differs from it in one fidelity choice: to repeat a verdict under each."""
    every = [
        base,
        *(replace(base, masked_lanes=choice) for choice in MaskedLanes),
        *(replace(base, fp8_overflow=choice) for choice in Fp8Overflow),
        *(replace(base, accumulation=choice) for choice in Accumulation),
    ]
    return tuple(dict.fromkeys(every))
