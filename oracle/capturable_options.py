"""What the options of a captured call can be, whatever the target: numbers, window, sinks, factors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from oracle import limits

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_WINDOW = -1
"""Below it no convention has a value that means that there is no window."""


def options(arguments: Mapping[str, Any], heads: int) -> Iterator[str]:
    """What no target reads, one line each. `heads`: of the queries."""
    if type(arguments.get("causal", True)) is not bool:
        yield f"causal: {shown(arguments['causal'])}; allowed: True or False"
    yield from _number("scale", arguments.get("scale"), *limits.SCALE)
    cap = number(arguments.get("soft_cap"))
    if cap != 0:
        yield from _number("soft_cap", arguments.get("soft_cap"), *limits.SOFT_CAP, off=" or 0")
    window = arguments.get("window")
    if window is not None and not _is_window(window):
        yield f"window: {shown(window)}; allowed: None, an integer from {_LEAST_WINDOW}, or a pair of them"
    sinks = arguments.get("sinks")
    if sinks is not None and not (
        isinstance(sinks, Tensor) and sinks.dtype in FLOATS and tuple(sinks.shape) == (heads,)
    ):
        yield f"sinks: {shown(sinks)}; allowed: None or floats [{heads}], one a query head"
    for name in ("k_descale", "v_descale"):
        value = arguments.get(name)
        if value is not None and number(value) is None and not isinstance(value, Tensor):
            yield f"{name}: {shown(value)}; allowed: None, a number or a tensor of torch.float32"
        if isinstance(value, Tensor) and value.dtype != torch.float32:
            yield f"{name}: {value.dtype}; allowed: torch.float32"
    if arguments.get("q_descale") is not None:
        yield f"q_descale: {shown(arguments['q_descale'])}; allowed: None, as no record with it can be judged yet"


def number(value: object) -> float | None:
    """A number, or the only one of a tensor, as a number; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _number(name: str, value: object, low: float, high: float, off: str = "") -> Iterator[str]:
    found = number(value)
    if value is not None and (found is None or not low <= found <= high):
        yield f"{name}: {shown(value)}; allowed: None{off}, or a number from {low:g} to {high:g}"


def _is_window(value: object) -> bool:
    both = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value,)
    return all(type(one) is int and one >= _LEAST_WINDOW for one in both)


def shown(value: object) -> str:
    """A value on one line."""
    if not isinstance(value, Tensor):
        return repr(value)[:60]
    return str(value.item()) if value.numel() == 1 else f"{value.dtype} {list(value.shape)}"
