"""JSON files of long runs: written in one step, read with a message of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fuzz.errors import Exit, Stop
from fuzz.plain import read_json
from fuzz.whole import write_whole


def write(path: Path, data: dict[str, Any]) -> None:
    """Replace the file, so that it is never half there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, separators=(",", ":")) + "\n")


def read(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises `Stop` naming it."""
    return read_json(path, _object)


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise Stop(Exit.USAGE, "allowed is a JSON object")
    return data
