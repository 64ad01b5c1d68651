"""Files that are there whole or not at all, whatever ends the process or fills the disk meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside ``path`` and rename, so that what was there before stays until all is written. Raises ``OSError``.

    Text is UTF-8. For files in a folder of ours: one that the user names may be a pipe or a device.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
