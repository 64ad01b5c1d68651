"""Arithmetic for designs without libm: the same bits on every machine.

Logarithms come from integers, by repeated squaring; everything else that a design does in float64 is one
correctly rounded operation after the other. Nothing here needs more than six digits: a design aims at a
logit, it does not have to hit it.
"""

from __future__ import annotations

import math
from fractions import Fraction

_WORK_BITS = 40
_LOG2_BITS = 24
_LN2 = 2977044472
"""ln 2 in units of 2^-32."""


def log(x: int | Fraction) -> float:
    """Natural logarithm of a positive rational, within 1e-7 + 1e-9 * abs(ln x). Raises ValueError for others."""
    if x <= 0:
        raise ValueError(f"log: {x}, allowed are numbers above 0")
    ratio = Fraction(x)
    units = _log2(ratio.numerator) - _log2(ratio.denominator)
    return units * _LN2 / (1 << (_LOG2_BITS + 32))


def _log2(n: int) -> int:
    """log2 of a positive integer in units of 2^-24, rounded down."""
    whole = n.bit_length() - 1
    mantissa = (n << _WORK_BITS) >> whole
    found = whole
    for _ in range(_LOG2_BITS):
        mantissa = mantissa * mantissa >> _WORK_BITS
        bit = mantissa >> (_WORK_BITS + 1)
        mantissa >>= bit
        found = found << 1 | bit
    return found


def uncapped(logit: float, cap: float | None) -> float:
    """The logit that the soft cap turns into ``logit``: cap * atanh(logit / cap). Raises ValueError at the cap."""
    if cap is None:
        return logit
    ratio = Fraction(logit / cap)
    return cap * ((log(1 + ratio) - log(1 - ratio)) / 2)


def power_above(x: float) -> int:
    """The least integer e with 2^e >= x > 0."""
    mantissa, exponent = math.frexp(x)
    return exponent - 1 if mantissa == 0.5 else exponent
