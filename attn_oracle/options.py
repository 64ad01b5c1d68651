"""The options of a search, and what each may be. Needs the standard library only: the plugin reads it at once."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.dependencies import said_of

ENGINES = ("auto", "emulator", "cuda", "hip")
_DEVICES = ("cuda", "hip")
DEFAULT_CASES = 50
DEFAULT_OUT = ".attn-oracle"
TIMEOUT_S = 120.0
"""Of one case, which runs its kernel three or four times; beyond it, the case hangs."""


class OptionError(ValueError):
    """A value that an option does not take. One line: the option, the value, what is allowed."""


def _integer(low: int, high: int) -> Callable[[Any], int]:
    """The bounds are those of the command line's `--cases` and `--seed`."""

    def parse(value: Any) -> int:
        text = _digits(value) if type(value) is int else str(value).strip()
        # Bounded before it is read: int() refuses texts of thousands of digits in words of its own.
        whole = not isinstance(value, bool) and len(text) <= 30 and re.fullmatch(r"[+-]?\d+", text)
        if not whole or not low <= int(text) <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return int(text)

    return parse


def _digits(value: int) -> str:
    """The digits of an integer; Python has no text for one of thousands."""
    return str(value) if value.bit_length() < 1000 else f"an integer of {value.bit_length()} bits"


def _shown(value: Any) -> str:
    if type(value) is int:
        return _digits(value)
    return repr(value[:57] + "..." if isinstance(value, str) and len(value) > 60 else value)


def _seconds(value: Any) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
    seconds = 0.0 if match is None else float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if not 0 < seconds <= 1e7:
        raise ValueError("a time such as 90s, 10m or 2h")
    return seconds


def _engine(value: Any) -> str:
    if value not in ENGINES:
        raise ValueError(", ".join(ENGINES))
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a name")
    return value


def _folder(value: Any) -> str:
    if not isinstance(value, str) or not value or (os.path.exists(value) and not os.path.isdir(value)):
        raise ValueError("a folder, which need not exist")
    return value


def _findings(value: Any) -> str:
    if not isinstance(value, str) or not value or not os.path.exists(value):
        raise ValueError("the file of a finding, or a folder of them, that exists")
    path = Path(value)
    if path.is_dir():
        if next(path.rglob("finding-*.json"), None) is None:
            raise ValueError("a folder that holds finding-*.json, or one of these files")
        return value
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or not {"target", "case"} <= data.keys():
        raise ValueError("the file of a finding: a JSON object with target and case")
    return value


def missing_device(engine: str) -> str | None:
    """Why an engine cannot run here, one line; None if it can. Imports torch for an engine that needs a device."""
    if engine not in _DEVICES:
        return None
    try:
        import torch
    except ModuleNotFoundError as error:
        if (said := said_of(error)) is None:
            raise
        return f"attn-oracle {said}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    built = "hip" if torch.version.hip else "cuda"
    return None if engine == built else f"torch {torch.__version__} is built for {built}"


def unwritable(folder: str) -> str | None:
    """Why nothing can be written to a folder, one line; None if it can: then it is there, as its findings will be."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        return f"{folder}: cannot be written: {error.strerror}"
    return None


def _modules(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one for one in value):
        raise ValueError("a list of module names and of .py files")
    return tuple(value)


PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "cases": _integer(1, 10**9),
    "time": _seconds,
    "seed": _integer(0, (1 << 63) - 1),
    "engine": _engine,
    "out": _folder,
    "replay": _findings,
    "target": _text,
    "modules": _modules,
}

MARKER = ("target", "cases", "time", "seed", "engine", "modules")
"""The keywords of the marker, which are those of `check`."""


def parse(shown: str, name: str, value: Any) -> Any:
    """The value of an option. shown: how the user knows it, such as `--attn-cases`. Raises ``OptionError``."""
    try:
        return PARSERS[name](value)
    except ValueError as error:
        raise OptionError(f"{shown}: {_shown(value)}; allowed: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to search. A field that is None was not given."""

    cases: int | None = None
    time: float | None = None
    seed: int | None = None
    engine: str | None = None
    out: str | None = None
    replay: str | None = None
    target: str | None = None
    modules: tuple[str, ...] | None = None

    def over(self, other: Options) -> Options:
        """These options, and those of `other` where these say nothing. Cases and time take the place of each other."""
        names = list(self.__dataclass_fields__)
        if self.cases is not None or self.time is not None:
            other = Options(**{**{n: getattr(other, n) for n in names}, "cases": None, "time": None})
        own = {n: getattr(self, n) for n in names}
        return Options(**{n: getattr(other, n) if value is None else value for n, value in own.items()})

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__dataclass_fields__)
