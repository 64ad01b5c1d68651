"""AMD buffer operations and asynchronous copies: a scalar pointer and a block of 32-bit offsets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.blocks import broadcast
from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.dtypes import PointerType, int1, int32, uint32
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.gluon.execution import execution
from fuzz.engine.emulator.gluon.layouts import check_distributed
from fuzz.engine.emulator.gluon.shared import SharedMemory
from fuzz.engine.emulator.memory import load, store, target
from fuzz.engine.emulator.operators import arithmetic
from fuzz.engine.emulator.sanitizer import FindingKind, report
from fuzz.engine.emulator.value import Number, Value, as_value, lift

Mask = Value | Number | None


def _addresses(ptr: Value, offsets: Value, mask: Mask) -> tuple[Value, Value | None]:
    """A block of pointers, and the mask, of one shape. Raises KernelError for what the operations do not take."""
    if not isinstance(ptr, Value) or not isinstance(ptr.dtype, PointerType) or ptr.shape:
        raise KernelError("buffer operations take a scalar pointer")
    if not isinstance(offsets, Value) or offsets.dtype not in (int32, uint32):
        dtype = offsets.dtype if isinstance(offsets, Value) else type(offsets).__name__
        raise KernelError(f"buffer operations take a block of int32 or uint32 offsets, not {dtype}")
    if not offsets.shape:
        raise KernelError("buffer operations take a block of offsets, not a scalar")
    if mask is None:
        return arithmetic("add", ptr, offsets), None
    chooser = as_value(mask)
    if chooser.shape and chooser.shape != offsets.shape:
        offsets, chooser = broadcast(offsets, chooser)
    return arithmetic("add", ptr, offsets), chooser


def buffer_load(ptr: Value, offsets: Value, mask: Mask = None, other: Any = None, cache: Any = None, **_: Any) -> Value:
    """Elements at `ptr + offsets`. A masked-off lane holds `other`, and zero without it: the hardware is given an
    offset beyond the buffer there, which reads as zero (CDNA3 ISA, buffer addressing, range checking).
    """
    pointer, mask = _addresses(ptr, offsets, mask)
    if other is not None and mask is None:
        raise KernelError("buffer_load takes `other` only together with a mask")
    return load(pointer, mask, 0 if other is None and mask is not None else other)


def buffer_store(
    stored_value: Value, ptr: Value, offsets: Value, mask: Mask = None, cache: Any = None, **_: Any
) -> None:
    """Write a block. Nothing is cast: a value of another type than the pointer's is reported (and cast, to go on)."""
    pointer, mask = _addresses(ptr, offsets, mask)
    buffer, element = target(pointer)
    value = as_value(stored_value)
    if value.shape != pointer.shape:
        raise KernelError(f"buffer_store of a block {list(value.shape)} to offsets {list(pointer.shape)}")
    if value.dtype is not element:
        lanes = torch.ones_like(pointer.data, dtype=torch.bool)
        if mask is not None:
            lanes = lanes & lift(cast(mask, int1).data, lanes.ndim)
        report(FindingKind.STORE_DTYPE, lanes, pointer.data, buffer)
    store(pointer, value, mask)


def buffer_atomic(function: Callable[..., Value]) -> Callable[..., Value]:
    """An atomic of the language over a scalar pointer and offsets."""

    def apply(ptr: Value, offsets: Value, value: Value | Number, mask: Mask = None, **_: Any) -> Value:
        pointer, mask = _addresses(ptr, offsets, mask)
        return function(pointer, value, mask)

    return apply


def buffer_load_to_shared(
    dest: SharedMemory,
    ptr: Value,
    offsets: Value,
    mask: Mask = None,
    other: Any = None,
    cache_modifier: Any = "",
    **_: Any,
) -> None:
    """Start copying a block to shared memory; masked-off lanes become `other`, or zero as in `buffer_load`."""
    execution().copies.issue(dest, buffer_load(ptr, offsets, mask, other), None)


def global_load_to_shared(
    dest: SharedMemory, ptr: Value, mask: Mask = None, other: Any = None, cache_modifier: Any = "", **_: Any
) -> None:
    """Start copying a block to shared memory; masked-off lanes become `other`, and stay as they are without it."""
    if not isinstance(ptr, Value) or not ptr.shape:
        raise KernelError("global_load_to_shared takes a block of pointers")
    value = load(ptr, mask, other)
    lanes: Tensor | None = None
    if mask is not None and other is None:
        lanes = lift(cast(as_value(mask), int1).data, value.data.ndim).expand(value.data.shape)
    execution().copies.issue(dest, value, lanes)


def commit_group(**_: Any) -> None:
    """Make the copies issued so far a group that `wait_group` can count."""
    execution().copies.commit()


def wait_group(num_outstanding: Any = 0, **_: Any) -> None:
    """Wait until at most the given number of groups is under way."""
    execution().copies.wait(int(num_outstanding))


def load_shared_relaxed(smem: SharedMemory, layout: Any, **_: Any) -> Value:
    """Load from shared memory, with a hint that the copies into it were waited for."""
    check_distributed(layout, smem.shape)
    return smem.load(layout)
