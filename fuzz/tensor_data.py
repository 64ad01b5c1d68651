"""Tensors as plain data, for answers between processes: every bit is kept, NaN payloads included."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuzz.buffers import DTYPE_NAMES, DTYPES
from oracle.bits import bits

_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def to_data(outputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors as plain data: dtype, shape, and the bytes in base64."""
    return {
        name: {
            "dtype": DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "bytes": base64.b64encode(bits(value).numpy().tobytes()).decode(),
        }
        for name, value in outputs.items()
    }


def from_data(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """Inverse of ``to_data``."""
    return {name: _tensor(DTYPES[one["dtype"]], one["shape"], one["bytes"]) for name, one in data.items()}


def _tensor(dtype: torch.dtype, shape: list[int], text: str) -> Tensor:
    raw = np.frombuffer(bytearray(base64.b64decode(text)), _INTEGERS[dtype.itemsize])
    return torch.from_numpy(raw).view(dtype).reshape(shape)
