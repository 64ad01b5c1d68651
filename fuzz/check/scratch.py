"""Poison under what a target allocates for itself: outputs and scratch that nobody has written yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fuzz.buffers import GUARD_BYTES, Buffer, Poison, contiguous_strides, pattern
from oracle.bits import bits

_NAMES = ("empty", "empty_like", "empty_strided")


@contextmanager
def poisoned_allocations(poison: Poison) -> Iterator[list[Buffer]]:
    """Within the block ``torch.empty`` and its kin return poisoned memory between guards.

    Yields the list of buffers handed out, so that their guards can be checked. Only what Python code
    allocates by these names is seen; kernels inside torch keep their own memory.
    """
    handed: list[Buffer] = []

    def wrapped(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            plain = original(*args, **kwargs)
            if plain.layout is not torch.strided or plain.dtype.is_complex or plain.dtype is torch.bool:
                return plain
            buffer = _guarded(plain, poison, original_empty)
            handed.append(buffer)
            return buffer.view

        return allocate

    original_empty = torch.empty
    saved = {name: getattr(torch, name) for name in _NAMES}
    saved_new = Tensor.new_empty
    try:
        for name, original in saved.items():
            setattr(torch, name, wrapped(original))
        Tensor.new_empty = wrapped(saved_new)  # type: ignore[method-assign]
        yield handed
    finally:
        for name, original in saved.items():
            setattr(torch, name, original)
        Tensor.new_empty = saved_new  # type: ignore[method-assign]


def _guarded(plain: Tensor, poison: Poison, empty: Callable[..., Tensor]) -> Buffer:
    guard = GUARD_BYTES // plain.dtype.itemsize
    strides = plain.stride() if plain.numel() else tuple(contiguous_strides(plain.shape))
    extent = 1 + sum((n - 1) * s for n, s in zip(plain.shape, strides, strict=True)) if plain.numel() else 0
    storage = empty(extent + 2 * guard, dtype=plain.dtype, device=plain.device)
    raw = bits(storage)
    raw.fill_(pattern(plain.dtype, poison))
    view = torch.as_strided(storage, plain.shape, strides, guard)
    return Buffer("allocated", view, raw, ((0, raw.numel()),))


def overrun(buffers: list[Buffer], poison: Poison) -> int:
    """How many guard elements around the handed-out buffers were overwritten."""
    total = 0
    for buffer in buffers:
        guard = buffer.view.storage_offset()
        expected = pattern(buffer.view.dtype, poison)
        for side in (buffer.storage[:guard], buffer.storage[buffer.storage.numel() - guard :]):
            total += int((side != expected).sum())
    return total
