"""JSON files of long runs: written in one step, read with a message of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fuzz.errors import Exit, Stop
from fuzz.whole import write_whole


def write(path: Path, data: dict[str, Any]) -> None:
    """Replace the file, so that it is never half there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, separators=(",", ":")) + "\n")


def read(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises `Stop` naming it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Stop(Exit.USAGE, f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise Stop(Exit.USAGE, f"{path}: not JSON") from None
    if not isinstance(data, dict):
        raise Stop(Exit.USAGE, f"{path}: allowed is a JSON object")
    return data
