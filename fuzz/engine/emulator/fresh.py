"""Memory that was handed out unwritten, and which of it still is."""

from __future__ import annotations

import torch
from torch import Tensor

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FreshMemory:
    """One storage. Kernels clear the marks of what they store; what the host wrote is inferred at each launch.

    An element is unwritten while it holds the pattern that it was handed out with, and no kernel stored to it. A narrow
    element may hold the pattern by chance: once the host has written to the tensor (torch counts in-place changes), one
    of less than four bytes counts as unwritten only where its whole word of four bytes holds the pattern.
    """

    def __init__(self, tensor: Tensor, pattern: int | None) -> None:
        self.tensor = tensor
        self.version = _version(tensor)
        size, storage = tensor.element_size(), tensor.untyped_storage()
        self.pattern = None if pattern is None else _signed(pattern, size)
        self._held = torch.zeros(0, dtype=_RAW[size])
        self._held.set_(storage, 0, (storage.nbytes() // size,))  # type: ignore[call-overload]
        self._marks = torch.full((storage.nbytes(),), 255, dtype=torch.uint8)

    def marks(self) -> Tensor | None:
        """A byte for each byte of the storage, not 0 where nobody has written; None if all is written."""
        held, marks = self._held, self._marks.view(self._held.dtype)
        version = _version(self.tensor)
        touched = version is None or version != self.version
        self.version = version
        if touched and self.pattern is None:
            self._marks.zero_()
        elif self.pattern is not None:
            other = held != self.pattern
            marks.masked_fill_(_in_words(other, held.element_size()) if touched else other, 0)
        return self._marks if bool(self._marks.any()) else None


def _in_words(flags: Tensor, element_size: int) -> Tensor:
    """Flags bool [N] of elements, spread over their words of four bytes; a short last word counts as flagged."""
    width = max(1, 4 // element_size)
    whole = len(flags) // width * width
    words = flags[:whole].view(-1, width).any(1)
    return torch.cat([words.repeat_interleave(width), torch.ones_like(flags[whole:])])


def _version(tensor: Tensor) -> int | None:
    """How often torch changed the tensor in place; None where it does not count."""
    return None if tensor.is_inference() else int(tensor._version)


def _signed(pattern: int, size: int) -> int:
    """The pattern as the integer type that views the storage has it: one byte unsigned, wider ones signed."""
    pattern %= 1 << 8 * size
    return pattern - (1 << 8 * size) if size > 1 and pattern >> (8 * size - 1) else pattern
