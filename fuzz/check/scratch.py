"""Poison under what a target allocates for itself: outputs and scratch that nobody has written yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fuzz.buffers import Buffer, Poison, empty_buffer, pattern

_NAMES = ("empty", "empty_like", "empty_strided")


def _nobody(tensor: Tensor, pattern: int) -> None:
    """Hears of an allocation and does nothing."""


@contextmanager
def poisoned_allocations(poison: Poison, allocated: Callable[[Tensor, int], None] = _nobody) -> Iterator[list[Buffer]]:
    """Within the block ``torch.empty`` and its kin return poisoned memory between guards.

    Yields the list of buffers handed out, so that their guards can be checked; ``allocated`` hears of each as it is
    handed out, with the poison's bits that it holds. Only what Python code
    allocates by these names is seen; kernels inside torch keep their own memory.
    """
    handed: list[Buffer] = []

    def wrapped(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            plain = original(*args, **kwargs)
            if plain.layout is not torch.strided or plain.dtype.is_complex or plain.dtype is torch.bool:
                return plain
            strides = plain.stride() if plain.numel() else None
            buffer = empty_buffer(
                "allocated", plain.shape, plain.dtype, poison, device=str(plain.device), strides=strides
            )
            handed.append(buffer)
            allocated(buffer.view, pattern(plain.dtype, poison))
            return buffer.view

        return allocate

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


def overrun(buffers: list[Buffer], poison: Poison) -> int:
    """How many guard elements around the handed-out buffers were overwritten."""
    total = 0
    for buffer in buffers:
        guard = buffer.view.storage_offset()
        expected = pattern(buffer.view.dtype, poison)
        for side in (buffer.storage[:guard], buffer.storage[buffer.storage.numel() - guard :]):
            total += int((side != expected).sum())
    return total
