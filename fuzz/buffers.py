"""Tensors that a target receives: inside guards, over poison, with everything around them watched.

A buffer is a view into a larger storage. What is not data (guards, gaps between strided rows, unused
pages, slots past the length) holds poison, so that a read outside the data changes the result and a write
outside the data changes the storage.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from oracle.bits import bits

GUARD_BYTES = 4096
"""On each side of a buffer at least this much, and at least one step of the first axis: a row, or a page."""

_EMPTY = torch.empty
"""Kept from the moment of import: while a target runs, ``torch.empty`` is ours (``fuzz.check.scratch``)."""

_MAP_NORESERVE = 0x4000
"""Of mmap(2) on Linux; Python's own module has it from 3.13 on."""

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "uint8": torch.uint8,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "int32": torch.int32,
    "int64": torch.int64,
}

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Poison(StrEnum):
    """What stands where no data is. A target's output must not depend on the choice."""

    POSITIVE = "positive"
    """large and finite, so that one poisoned element moves any average"""
    NEGATIVE = "negative"
    NAN = "nan"


# Bit patterns. Indices hold values far outside any pool, so that following one leaves the buffer.
_PATTERNS: dict[torch.dtype, tuple[int, int, int]] = {
    torch.float64: (0x46293E5939A08CEA, -0x39D6C1A6C65F7316, 0x7FF8A5A5A5A5A5A5),
    torch.float32: (0x7149F2CA, -0x0EB60D36, 0x7FC0A5A5),
    torch.bfloat16: (0x7149, -0x0EB7, 0x7FE5),
    torch.float16: (0x7BF0, -0x0410, 0x7E5A),
    torch.uint8: (0x7B, 0xFB, 0x7F),
    torch.float8_e4m3fn: (0x7B, 0xFB, 0x7F),
    torch.float8_e4m3fnuz: (0x7B, 0xFB, 0x80),
    torch.float8_e5m2: (0x7A, 0xFA, 0x7E),
    torch.float8_e5m2fnuz: (0x7A, 0xFA, 0x80),
    torch.int8: (0x5B, -0x5B, 0x5C),
    torch.int16: (0x5B5B, -0x5B5B, 0x5C5C),
    torch.int32: (0x2AAAAAAA, -0x2AAAAAAA, 0x2AAAAAAB),
    torch.int64: (0x2AAAAAAAAA, -0x2AAAAAAAAA, 0x2AAAAAAAAB),
}


_PLACE = {poison: place for place, poison in enumerate(Poison)}


def pattern(dtype: torch.dtype, poison: Poison) -> int:
    """The poison's bits for ``dtype``, as an integer of ``oracle.bits``' type. Raises ``KeyError``."""
    return _PATTERNS[dtype][_PLACE[poison]]


@dataclass(frozen=True, eq=False)
class Buffer:
    """One tensor argument and the storage around it.

    ``view`` is what the target sees; ``storage`` is flat, of integers; ``watched`` lists the element
    ranges of the storage that we wrote and therefore may compare afterwards (all of it, unless the buffer is
    too large to touch).
    """

    name: str
    view: Tensor
    storage: Tensor
    watched: tuple[tuple[int, int], ...]

    def image(self) -> Tensor:
        """A copy of every watched element, as integers, in storage order."""
        if self.watched == ((0, self.storage.numel()),):
            return self.storage.clone()
        return torch.cat([self.storage[low:high] for low, high in self.watched])

    def where(self, position: int) -> int:
        """The element offset from the view's first element for a position in the image."""
        for low, high in self.watched:
            if position < high - low:
                return low + position - int(self.view.storage_offset())
            position -= high - low
        raise IndexError(position)


def empty_buffer(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    poison: Poison,
    *,
    device: str,
    strides: Sequence[int] | None = None,
) -> Buffer:
    """A poisoned buffer of ``shape``; the caller writes data into ``view``.

    ``strides`` in elements, where they are not those of a contiguous tensor: gaps stay poisoned.
    """
    strides = contiguous_strides(shape) if strides is None else strides
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if min(shape, default=1) else 0
    guard = _guard(strides, dtype)
    storage = _EMPTY(extent + 2 * guard, dtype=dtype, device=device)
    raw = bits(storage)
    raw.fill_(pattern(dtype, poison))
    view = torch.as_strided(storage, tuple(shape), tuple(strides), guard)
    return Buffer(name, view, raw, ((0, raw.numel()),))


def huge_buffer(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    poison: Poison,
    *,
    device: str,
    blocks: Sequence[int],
) -> Buffer:
    """A buffer of which only the guards, the listed ``blocks`` (first axis) and their neighbours are touched.

    Memory that nobody touches is not committed, so that a pool of many gigabytes costs little on a CPU.
    """
    strides = contiguous_strides(shape)
    guard, block = _guard(strides, dtype), strides[0]
    storage = _untouched(shape[0] * block + 2 * guard, dtype, device)
    raw = bits(storage)
    touched = sorted({n for b in blocks for n in (b - 1, b, b + 1) if 0 <= n < shape[0]})
    ranges = [(0, guard), *((guard + b * block, guard + (b + 1) * block) for b in touched)]
    ranges.append((raw.numel() - guard, raw.numel()))
    for low, high in ranges:
        raw[low:high] = pattern(dtype, poison)
    view = torch.as_strided(storage, tuple(shape), tuple(strides), guard)
    return Buffer(name, view, raw, tuple(ranges))


def _untouched(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """``count`` elements, on Linux's CPU more than the machine has memory for, if need be: few are to be touched."""
    if device != "cpu" or sys.platform != "linux":
        return _EMPTY(count, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=torch.uint8).view(dtype)


def _guard(strides: Sequence[int], dtype: torch.dtype) -> int:
    """Elements of a guard: a multiple of 256 bytes, so that the data keep an allocation's alignment."""
    wanted = max(GUARD_BYTES, (strides[0] if strides else 0) * dtype.itemsize)
    return -(-wanted // 256) * 256 // dtype.itemsize


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Strides, in elements, of a contiguous tensor of ``shape``."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return strides
