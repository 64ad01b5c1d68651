"""Tensors as bit patterns: comparing and moving values without interpreting them."""

import torch
from torch import Tensor

_INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """A view of `tensor` (any shape, any strides) as integers of the same width, sharing its memory.

    One byte is seen as uint8, wider elements as signed integers. Raises TypeError for elements that have no
    integer type of their width (complex128).
    """
    integer = _INTEGER_OF_WIDTH.get(tensor.element_size())
    if integer is None:
        raise TypeError(f"no integer type is as wide as {tensor.dtype}")
    return tensor.view(integer)


def bit_equal(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: same bit pattern. +0 and -0 differ, a NaN equals itself when its payload does.

    Returns bool of the common shape. Raises TypeError when the dtypes differ, ValueError when the shapes do.
    """
    if a.dtype != b.dtype:
        raise TypeError(f"cannot compare the bits of {a.dtype} with those of {b.dtype}")
    if a.shape != b.shape:
        raise ValueError(f"cannot compare the bits of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return bits(a) == bits(b)
