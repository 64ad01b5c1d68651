"""How the emulator behaves where hardware, versions or taste differ: data, never branches on a target."""

from dataclasses import dataclass
from enum import StrEnum


class MaskedLanes(StrEnum):
    """What a masked-off lane of a load without `other` holds."""

    UNDEFINED = "undefined"  # as Triton documents it: reported when it reaches an output or an address
    ZERO = "zero"  # as AMD buffer loads define it


class Fp8Overflow(StrEnum):
    """What a value that rounds beyond the largest finite fp8 value becomes."""

    SATURATE = "saturate"
    NAN = "nan"


@dataclass(frozen=True)
class Options:
    """Fidelity and execution choices of a session.

    `batch_bytes` bounds the memory of one batch of programs: the largest value of a batch stays below an
    eighth of it. `serial` executes programs one by one; results are the same, bit for bit.
    """

    masked_lanes: MaskedLanes = MaskedLanes.UNDEFINED
    fp8_overflow: Fp8Overflow = Fp8Overflow.SATURATE
    batch_bytes: int = 64 << 20
    serial: bool = False
