"""Capturing one call in a production process: its tensors and options in a file that `attn-oracle check` judges.

    oracle.record("/tmp/bad.safetensors", q=q, k_cache=k_cache, v_cache=v_cache, page_table=page_table,
                  lengths=lengths, scale=scale, window=window, out=out, lse=lse)

The names are those of the target's parameters (`oracle.declare.parameters`; `docs/operations.md` gives shapes), in
the target's own layout and convention, with its results `out` and `lse`. Of a pool only pages that the page table
names are written, or slots that a list names in a pool without pages, and the indices count those.

A production process must not end, nor slow down for long, because a capture failed: whatever goes wrong is one
warning of the logger `attn_oracle` and False, unless `strict` asks for the exception. So it is with a call that
`attn-oracle check` could not read, as far as that shows without its target (`oracle.capturable`). Tensors are copied to
the host (which waits for the device: not while a CUDA graph is captured) and are not changed. The file is complete or
not there. It holds the values of the model's activations: treat it as the data that it is made of.

The file: safetensors, `in.NAME` and `out.NAME`; formats of 8 bits as their bytes. The metadata `attn_oracle` is JSON:
`schema`, `arguments` (what is no tensor), `dtypes`, `strides` (of the tensors as they were), `about`.
"""

import errno
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.capturable import complaint

SCHEMA = 1
KEY = "attn_oracle"
MOST_BYTES = 1 << 30
"""A capture that would be larger is not written."""
OUTPUTS = ("out", "lse")

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CACHES = ("k_cache", "v_cache")
_PER_SLOT = ("k_descale", "v_descale")

_log = logging.getLogger(KEY)


class CaptureError(ValueError):
    """What cannot be captured. The message names the argument and what is allowed."""


@dataclass(frozen=True, eq=False)
class Record:
    """One call: its arguments by the target's parameter names, its outputs, and what is known of where it ran."""

    arguments: Mapping[str, Any]
    outputs: Mapping[str, Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)


def record(
    path: str | os.PathLike[str],
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    most_bytes: int = MOST_BYTES,
    strict: bool = False,
    **arguments: Any,
) -> bool:
    """Write one call to `path`; whether that went well. See above for what it costs and what it never does.

    arguments: tensors, numbers, bools, None, and pairs of integers, by the target's parameter names. most_bytes: a
    larger capture is refused. strict: raise CaptureError, or OSError, instead of a warning.
    """
    try:
        outputs = {name: value for name, value in (("out", out), ("lse", lse)) if value is not None}
        about = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "torch": str(torch.__version__)}
        devices = {str(value.device) for value in arguments.values() if isinstance(value, Tensor)}
        about["devices"] = ", ".join(sorted(devices))
        whole = Record(dict(arguments), outputs, about)
        _check_names_and_shapes(whole)
        made = trimmed(whole)
        _check_size(made, most_bytes)
        write(Path(path), made)
    except Exception as error:  # whatever it is, the caller's process goes on
        if strict:
            raise
        _log.warning("nothing captured in %s: %s", path, error)
        return False
    return True


def _check_size(made: Record, most: int) -> None:
    tensors = [value for value in (*made.arguments.values(), *made.outputs.values()) if isinstance(value, Tensor)]
    total = sum(math.prod(value.shape) * value.dtype.itemsize for value in tensors)
    if total > most:
        raise CaptureError(f"most_bytes: the call has {total} bytes, allowed are {most}")


def _check_names_and_shapes(made: Record) -> None:
    for name, value in (*made.arguments.items(), *made.outputs.items()):
        _check_kind(name, value)
    said = complaint(made.arguments, made.outputs)
    if said is not None:
        raise CaptureError(said)


def _check_kind(name: str, value: object) -> None:
    """Raises CaptureError unless the file can hold the value."""
    if not isinstance(value, Tensor):
        _plain(name, value)
    elif value.dtype not in _NAMES or value.layout is not torch.strided:
        raise CaptureError(f"{name}: allowed are {', '.join(DTYPES)}, got {value.dtype}")


# ------------------------------------------------------------------- trimming


def trimmed(made: Record) -> Record:
    """The record without the pages, or slots, that no index names. The order of the others stays."""
    arguments = dict(made.arguments)
    caches = [arguments[name] for name in _CACHES if isinstance(arguments.get(name), Tensor)]
    name = "page_table" if isinstance(arguments.get("page_table"), Tensor) else "slots"
    index = arguments.get(name)
    if not caches or not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        return made
    if any(cache.ndim < 3 for cache in caches) or len({cache.shape[0] for cache in caches}) != 1:
        return made
    rows = caches[0].shape[0]
    linear = [cache.ndim == 3 for cache in caches]
    page = arguments.get("page_size", 1) if any(linear) else 1
    if type(page) is not int or page < 1 or rows % page or (name == "slots" and (not all(linear) or page > 1)):
        return made  # among others, slots of pages whose size only the target knows
    pages = rows // page
    named = index[(index >= 0) & (index < pages)].unique().long()
    if len(named) == pages:
        return made
    place = torch.full((pages,), -1, dtype=index.dtype, device=index.device)
    place[named] = torch.arange(len(named), dtype=index.dtype, device=index.device)
    valid = (index >= 0) & (index < pages)
    arguments[name] = torch.where(valid, place[index.clamp(0, pages - 1).long()], index)
    for own in (*_CACHES, *_PER_SLOT):
        value = arguments.get(own)
        if isinstance(value, Tensor) and value.ndim >= 3 and value.shape[0] in (rows, pages):
            arguments[own] = _kept(value, named, value.shape[0] // pages)
    about = dict(made.about) | {"pool": pages, "kept": named.tolist() if len(named) <= 4096 else len(named)}
    return Record(arguments, made.outputs, about)


def _kept(value: Tensor, pages: Tensor, page: int) -> Tensor:
    """Those pages of a tensor that has `page` rows for each."""
    rows = _raw(value).unflatten(0, (-1, page))
    kept: Tensor = rows[pages.to(value.device)].flatten(0, 1).view(value.dtype)
    return kept


def _raw(value: Tensor) -> Tensor:
    """A tensor of an 8-bit format as its bytes; others as they are."""
    return value.view(torch.uint8) if value.dtype.itemsize == 1 else value


# ----------------------------------------------------------------------- file


def write(path: Path, made: Record) -> None:
    """Write a record. Raises CaptureError and OSError; the file is complete or not there."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    strides: dict[str, list[int]] = {}
    for name, value in made.arguments.items():
        if isinstance(value, Tensor):
            tensors[f"in.{name}"] = value
        else:
            plain[name] = _plain(name, value)
    tensors |= {f"out.{name}": value for name, value in made.outputs.items()}
    stored = {}
    for name, value in tensors.items():
        _check_kind(name, value)
        dtypes[name] = _NAMES[value.dtype]
        strides[name] = list(value.stride())
        # A copy of its own: the file refuses tensors that share memory.
        host = value.detach().to("cpu", copy=True).contiguous()
        stored[name] = _raw(host)
    text = json.dumps(
        {"schema": SCHEMA, "arguments": plain, "dtypes": dtypes, "strides": strides, "about": dict(made.about)}
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(stored, partial, metadata={KEY: text})
        os.replace(partial, path)
    except SafetensorError as error:  # its only way to say that the disk is full
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from None
    finally:
        partial.unlink(missing_ok=True)


def _plain(name: str, value: object) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (tuple, list)) and all(type(one) is int for one in value):
        return list(value)
    raise CaptureError(f"{name}: allowed are a tensor, a number, a bool, None or integers, got {type(value).__name__}")
