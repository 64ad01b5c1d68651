"""Triton's scalar types over torch dtypes, and Triton's promotion rules.

Rules as in `triton.language.semantic` of Triton 3.6: `computation_type_impl`, `integer_promote_impl`,
`to_tensor`. A Python literal is weak: it takes the other operand's type unless its kind is higher.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch

from fuzz.engine.emulator.errors import KernelError


class Kind(IntEnum):
    """Order in which a literal's kind is compared with a tensor's."""

    BOOLEAN = 0
    INTEGRAL = 1
    FLOATING = 2
    POINTER = 3


@dataclass(frozen=True, eq=False)
class DType:
    """A scalar type. `memory` is the torch dtype of a tensor argument, `compute` that of a value's data.

    They differ where torch computes poorly: fp8 values are held as their codes (uint8), and uint16, uint32 in
    the next wider signed type, always within range; uint64 in int64 as its bit pattern.
    """

    name: str
    kind: Kind
    bits: int
    memory: torch.dtype
    compute: torch.dtype
    signed: bool = True

    @property
    def scalar(self) -> "DType":
        return self

    @property
    def element_ty(self) -> "DType":
        return self

    @property
    def primitive_bitwidth(self) -> int:
        return self.bits

    @property
    def int_bitwidth(self) -> int:
        return self.bits

    @property
    def itemsize(self) -> int:
        return max(1, self.bits // 8)

    def is_fp8(self) -> bool:
        return self.kind is Kind.FLOATING and self.bits == 8

    def is_fp16(self) -> bool:
        return self is float16

    def is_bf16(self) -> bool:
        return self is bfloat16

    def is_fp32(self) -> bool:
        return self is float32

    def is_fp64(self) -> bool:
        return self is float64

    def is_floating(self) -> bool:
        return self.kind is Kind.FLOATING

    def is_int(self) -> bool:
        return self.kind <= Kind.INTEGRAL

    def is_int_signed(self) -> bool:
        return self.kind is Kind.INTEGRAL and self.signed

    def is_int_unsigned(self) -> bool:
        return self.is_int() and not self.signed

    def is_bool(self) -> bool:
        return self is int1

    def is_ptr(self) -> bool:
        return False

    def is_block(self) -> bool:
        return False

    @property
    def minimum(self) -> int:
        """Least value of an integer type."""
        return -(1 << (self.bits - 1)) if self.is_int_signed() else 0

    @property
    def maximum(self) -> int:
        """Greatest value of an integer type."""
        return (1 << (self.bits - (1 if self.is_int_signed() else 0))) - 1

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class PointerType:
    """Pointer to elements of one scalar type."""

    element_ty: DType

    kind = Kind.POINTER
    bits = primitive_bitwidth = 64
    compute = torch.int64

    @property
    def name(self) -> str:
        return f"pointer<{self.element_ty.name}>"

    @property
    def scalar(self) -> "PointerType":
        return self

    def is_fp8(self) -> bool:
        return False

    def is_floating(self) -> bool:
        return False

    def is_int(self) -> bool:
        return False

    def is_int_signed(self) -> bool:
        return False

    def is_ptr(self) -> bool:
        return True

    def is_block(self) -> bool:
        return False

    def __repr__(self) -> str:
        return self.name


ScalarType = DType | PointerType


def _signed(bits: int, dtype: torch.dtype) -> DType:
    return DType(f"int{bits}", Kind.INTEGRAL, bits, dtype, dtype)


def _unsigned(bits: int, memory: torch.dtype, compute: torch.dtype) -> DType:
    return DType(f"uint{bits}", Kind.INTEGRAL, bits, memory, compute, signed=False)


def _float(name: str, bits: int, dtype: torch.dtype) -> DType:
    return DType(name, Kind.FLOATING, bits, dtype, torch.uint8 if bits == 8 else dtype)


int1 = DType("int1", Kind.BOOLEAN, 1, torch.bool, torch.bool, signed=False)
int8 = _signed(8, torch.int8)
int16 = _signed(16, torch.int16)
int32 = _signed(32, torch.int32)
int64 = _signed(64, torch.int64)
uint8 = _unsigned(8, torch.uint8, torch.uint8)
uint16 = _unsigned(16, torch.uint16, torch.int32)
uint32 = _unsigned(32, torch.uint32, torch.int64)
uint64 = _unsigned(64, torch.uint64, torch.int64)
float16 = _float("fp16", 16, torch.float16)
bfloat16 = _float("bf16", 16, torch.bfloat16)
float32 = _float("fp32", 32, torch.float32)
float64 = _float("fp64", 64, torch.float64)
float8e4nv = _float("fp8e4nv", 8, torch.float8_e4m3fn)
float8e4b8 = _float("fp8e4b8", 8, torch.float8_e4m3fnuz)
float8e5 = _float("fp8e5", 8, torch.float8_e5m2)
float8e5b16 = _float("fp8e5b16", 8, torch.float8_e5m2fnuz)

INTEGERS = (int1, int8, uint8, int16, uint16, int32, uint32, int64, uint64)
FLOATS = (float8e4nv, float8e4b8, float8e5, float8e5b16, float16, bfloat16, float32, float64)
FROM_TORCH = {dtype.memory: dtype for dtype in INTEGERS + FLOATS}

_LEAST_NORMAL_FLOAT32 = 2.0**-126
_GREATEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def type_of_literal(value: bool | int | float) -> DType:
    """The type that a Python number gets on its own. Raises KernelError where no type holds it."""
    if isinstance(value, bool):
        return int1
    if isinstance(value, int):
        for dtype in (int32, uint32, int64, uint64):
            if dtype.minimum <= value <= dtype.maximum:
                return dtype
        raise KernelError(f"no integer type holds {value}")
    magnitude = abs(value)
    exact = magnitude == 0 or not math.isfinite(value)
    return float32 if exact or _LEAST_NORMAL_FLOAT32 <= magnitude <= _GREATEST_FLOAT32 else float64


def promote_integers(a: DType, b: DType) -> DType:
    """The usual arithmetic conversions of C on width and signedness."""
    if a.signed == b.signed:
        return a if a.bits > b.bits else b
    unsigned, signed = (b, a) if a.signed else (a, b)
    return unsigned if unsigned.bits >= signed.bits else signed


def promote(a: DType, b: DType, *, division: bool = False) -> DType:
    """The type in which two typed operands meet. `division`: of /, // and %, which fp16 and bf16 lack."""
    if float64 in (a, b):
        return float64
    if float32 in (a, b):
        return float32
    if float16 in (a, b):
        return float32 if division else float16
    if bfloat16 in (a, b):
        return bfloat16 if a is b and not division else float32
    if a.is_fp8() and b.is_fp8():
        return a if a is b else float16
    if a.is_floating() or b.is_floating():
        raise KernelError(f"no common type of {a} and {b}")
    if division and a.signed != b.signed:
        raise KernelError(f"division of {a} and {b}, which differ in signedness")
    return promote_integers(a, b)


@lru_cache(maxsize=4096, typed=True)
def promote_literal(value: bool | int | float, dtype: DType, *, division: bool = False) -> DType:
    """The type in which a Python number and an operand of type `dtype` meet.

    Raises KernelError for an integer that the common integer type does not hold.
    """
    literal = type_of_literal(value)
    if literal.kind <= dtype.kind:
        common = float32 if division and dtype in (float16, bfloat16) else dtype
    else:
        common = promote(literal, dtype, division=division)
    if common.is_int() and not common.minimum <= value <= common.maximum:
        raise KernelError(f"literal {value} is out of range for {common}")
    return common
