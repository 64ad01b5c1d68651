"""Conversions between types, and between values and the bits that memory holds."""

import torch
from torch import Tensor

from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import (
    DType,
    PointerType,
    ScalarType,
    int1,
    uint16,
    uint32,
    uint64,
)
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.rounding import decode_fp8, encode_fp8, narrow
from fuzz.engine.emulator.value import Number, Value

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_bits(data: Tensor, dtype: DType) -> Tensor:
    """Data of a value as memory holds them: integers of the element's width (see RAW)."""
    if dtype is int1:
        return data.to(torch.uint8)
    raw = RAW[dtype.itemsize]
    return data.to(raw) if dtype in (uint16, uint32) else data.view(raw)


def from_bits(bits: Tensor, dtype: DType) -> Tensor:
    """Inverse of `to_bits`. A bool reads true for any byte but 0."""
    if dtype is int1:
        return bits != 0
    if dtype in (uint16, uint32):
        return bits.to(dtype.compute) & dtype.maximum
    return bits.view(dtype.compute)


def normalise(data: Tensor, dtype: DType) -> Tensor:
    """Integer data brought into the range of an unsigned type that is held in a wider one."""
    return data & dtype.maximum if dtype in (uint16, uint32) else data


def real(data: Tensor, dtype: DType) -> Tensor:
    """Floating data in a torch dtype that computes: fp8 codes become float32, others stay."""
    return decode_fp8(data, dtype) if dtype.is_fp8() else data


def unreal(data: Tensor, dtype: DType) -> Tensor:
    """Floating data of any torch dtype rounded into `dtype`."""
    if dtype.is_fp8():
        exact = data if data.dtype in (torch.float32, torch.float64) else data.float()
        return encode_fp8(exact, dtype, active().options.fp8_overflow)
    return narrow(data, dtype)


def from_number(number: Number, dtype: DType) -> Value:
    """A Python number as a scalar of `dtype`; it must be representable if the type is an integer."""
    if dtype.is_floating():
        return Value(unreal(torch.tensor([float(number)], dtype=torch.float64), dtype), dtype)
    whole = int(number)
    bounds = None if dtype is uint64 else (whole, whole)
    if dtype is uint64 and whole > 2**63 - 1:
        whole -= 2**64
    return Value(torch.tensor([whole], dtype=dtype.compute), dtype, bounds=bounds)


def cast(x: Value, dtype: ScalarType) -> Value:
    """`x` as `dtype`: to nearest even between floating types, towards zero to integers, modulo 2^n between
    integers. A floating value beyond an integer type saturates, NaN becomes 0, as PTX and GCN define it.
    """
    source = x.dtype
    if source is dtype or source == dtype:
        return x
    if isinstance(source, PointerType) or isinstance(dtype, PointerType):
        return _cast_pointer(x, dtype)
    bounds = wrapped = None
    if source.is_floating():
        data = real(x.data, source)
        if dtype is int1:
            data = data != 0
        elif dtype.is_floating():
            data = unreal(data, dtype)
        else:
            data = _to_integer(data, dtype)
    else:
        data = x.data
        if dtype is int1:
            data = data != 0
        elif dtype.is_floating():
            if source is uint64:
                refuse_large(x)
            data = unreal(data.to(torch.float64 if dtype.bits == 64 else torch.float32), dtype)
        else:
            data = normalise(data.to(dtype.compute), dtype)
            wrapped = x.wrapped
            if x.bounds is not None and dtype.minimum <= x.bounds[0] and x.bounds[1] <= dtype.maximum:
                bounds = x.bounds
    return Value(data, dtype, undefined=x.undefined, wrapped=wrapped, bounds=bounds)


def reinterpret(x: Value, dtype: ScalarType) -> Value:
    """The bits of `x` read as another type of the same width."""
    if isinstance(x.dtype, PointerType) or isinstance(dtype, PointerType):
        return _cast_pointer(x, dtype)
    if x.dtype.bits != dtype.bits:
        raise KernelError(f"bitcast from {x.dtype} to {dtype}, which differ in width")
    data = from_bits(to_bits(x.data, x.dtype), dtype)
    return Value(data, dtype, undefined=x.undefined, wrapped=x.wrapped if dtype.is_int() else None)


def refuse_large(x: Value) -> None:
    """Raise KernelError if a uint64 value reaches 2^63, where int64 arithmetic would mistake it."""
    if x.dtype is uint64 and bool((x.data < 0).any()):
        raise KernelError("uint64 values of 2^63 and more are not covered by this operation")


def _to_integer(data: Tensor, dtype: DType) -> Tensor:
    high = min(dtype.maximum, 2**63 - 1)
    wide = data.double().nan_to_num(0.0, posinf=2.0**63, neginf=-(2.0**63)).trunc()
    whole = wide.clamp(float(dtype.minimum), 2.0**62).long()
    if dtype.bits == 64:
        inside = wide < 2.0**63
        whole = wide.clamp(max=2.0**63 - 1024).clamp(min=float(dtype.minimum)).long()
        return torch.where(inside, whole, high)
    return whole.clamp(max=high).to(dtype.compute)


def _cast_pointer(x: Value, dtype: ScalarType) -> Value:
    if not isinstance(x.dtype, PointerType) or not isinstance(dtype, PointerType) or x.buffer is None:
        raise KernelError(f"no conversion from {x.dtype} to {dtype}")
    before, after = x.dtype.element_ty.itemsize, dtype.element_ty.itemsize
    if before % after and bool((x.data * before % after != 0).any()):
        raise KernelError(f"a pointer to {dtype.element_ty} must be aligned to {after} bytes")
    data = x.data if before == after else x.data * before // after
    buffer = x.buffer.retyped(dtype.element_ty)
    return Value(data, dtype, buffer=buffer, undefined=x.undefined, wrapped=x.wrapped)
