"""Reading a captured call: everything in the file is checked before anything is computed from it."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuzz.errors import Expected
from fuzz.plain import Fields, PlainError, shown
from oracle.capture import DTYPES, KEY, OUTPUTS, SCHEMA, Record

MOST_HEADER = 1 << 20
"""Bytes of a file's header, at most: a capture has a few hundred for each tensor."""
_MOST_RANK = 8


class RecordError(Expected, ValueError):
    """A file that is no captured call. One line: the field and what is allowed."""


def load(path: Path) -> Record:
    """Read a file that ``oracle.record`` wrote. Raises ``RecordError``, with the file's name in front."""
    try:
        return _load(path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (RecordError, PlainError) as error:
        raise RecordError(f"{path}: {error}") from None


def _load(path: Path) -> Record:
    from safetensors import SafetensorError, safe_open

    _check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise RecordError(f"not a safetensors file: {_one_line(error)}") from None
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, AttributeError) as error:
        # The library's own checks end in these, on files that nobody wrote on purpose.
        raise RecordError(f"not a readable safetensors file: {_one_line(error)}") from None
    if text is None:
        raise RecordError(f"metadata: no {KEY}; allowed: a file that oracle.record wrote")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"metadata.{KEY}: not JSON: {_one_line(error)}") from None
    return _record(Fields(about, KEY), tensors)


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:160]


def _check_header(path: Path) -> None:
    size = path.stat().st_size
    if path.is_dir():
        raise RecordError("a folder; allowed: a file")
    with path.open("rb") as file:
        start = file.read(8)
    if len(start) < 8:
        raise RecordError(f"{size} bytes; allowed: a safetensors file")
    (header,) = struct.unpack("<Q", start)
    if header > MOST_HEADER:
        raise RecordError(f"header: {header} bytes; allowed: at most {MOST_HEADER}")
    if header + 8 > size:
        raise RecordError(f"header: {header} bytes in a file of {size}; it is cut off, or no safetensors file")


def _record(own: Fields, tensors: dict[str, Tensor]) -> Record:
    own.schema(SCHEMA)
    dtypes, strides = own.fields("dtypes"), own.fields("strides")
    for fields_ in (dtypes, strides):
        if set(fields_.data) != set(tensors):
            odd = min(set(fields_.data) ^ set(tensors))
            raise RecordError(f"{fields_.where}.{shown(odd)}: names differ from those of the tensors")
    arguments: dict[str, Any] = {str(k): _plain(str(k), v) for k, v in own.fields("arguments").data.items()}
    outputs: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        side, _, short = name.partition(".")
        tensor = _tensor(name, stored, dtypes, strides)
        if side == "in" and short.isidentifier() and short not in arguments:
            arguments[short] = tensor
        elif side == "out" and short in OUTPUTS:
            outputs[short] = tensor
        else:
            allowed = f"in.PARAMETER once, {', '.join(f'out.{one}' for one in OUTPUTS)}"
            raise RecordError(f"{shown(name)}: unknown; allowed: {allowed}")
    return Record(arguments, outputs, dict(own.fields("about", {}).data))


def _tensor(name: str, stored: Tensor, dtypes: Fields, strides: Fields) -> Tensor:
    asked = dtypes.text(name)
    if asked not in DTYPES:
        raise RecordError(f"dtypes.{name}: {shown(asked)}; allowed: {', '.join(DTYPES)}")
    dtype = DTYPES[asked]
    kept = torch.uint8 if dtype.itemsize == 1 else dtype
    if stored.dtype != kept:
        raise RecordError(f"{name}: stored as {stored.dtype}; allowed: {kept} for {asked}")
    if stored.ndim > _MOST_RANK:
        raise RecordError(f"{name}: {stored.ndim} axes; allowed: at most {_MOST_RANK}")
    return _strided(stored.view(dtype), strides.integers(name, stored.ndim))


def _strided(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``value`` with its rows as far apart as they were, where that costs no more than four times its memory."""
    if value.ndim != 3 or not value.numel() or strides == value.stride():
        return value
    inner = value.stride()[1:]
    if strides[1:] != inner or not value.stride()[0] < strides[0] <= 4 * value.stride()[0]:
        return value
    room = torch.zeros(strides[0] * value.shape[0], dtype=value.dtype)
    apart = room.as_strided(value.shape, strides)
    apart.copy_(value)
    return apart


def _plain(name: str, value: object) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and abs(value) < 1 << 63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list) and len(value) <= 4 and all(type(one) is int and abs(one) < 1 << 63 for one in value):
        return tuple(value)
    raise RecordError(f"arguments.{shown(name)}: {shown(value)}; allowed: a finite number, a bool, null, some integers")
