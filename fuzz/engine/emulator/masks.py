"""Masks of booleans, the quick way: torch has vector code for bytes, and none for booleans."""

from __future__ import annotations

import torch
from torch import Tensor

_BYTE = torch.uint8


def some(mask: Tensor) -> bool:
    """Whether any element of a boolean tensor is true."""
    return bool(mask.numel()) and bool(_bytes(mask).amax())


def every(mask: Tensor) -> bool:
    """Whether all elements of a boolean tensor are true."""
    return not mask.numel() or bool(_bytes(mask).amin())


def both(a: Tensor, b: Tensor) -> Tensor:
    """`a & b` of booleans. Masks that carry more than their elements answer for themselves."""
    if type(a) is Tensor and type(b) is Tensor:
        return (a.view(_BYTE) & b.view(_BYTE)).view(torch.bool)
    return a & b


def either(a: Tensor, b: Tensor) -> Tensor:
    """`a | b`, likewise."""
    if type(a) is Tensor and type(b) is Tensor:
        return (a.view(_BYTE) | b.view(_BYTE)).view(torch.bool)
    return a | b


def one_of(a: Tensor, b: Tensor) -> Tensor:
    """`a ^ b`, likewise."""
    if type(a) is Tensor and type(b) is Tensor:
        return (a.view(_BYTE) ^ b.view(_BYTE)).view(torch.bool)
    return a ^ b


def _bytes(mask: Tensor) -> Tensor:
    return (mask if type(mask) is Tensor else mask.as_subclass(Tensor)).view(_BYTE)
