"""What the command line's library says of options that cannot be, as the one line that all our errors are."""

from __future__ import annotations

from typing import Any

import typer

Refused: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What the library raises for bad usage. Depending on the release it is click's class, or a copy of it."""


def line(error: Any) -> str:
    """One line for an error of class ``Refused``; nothing where the help was shown in its place."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    context = getattr(error, "ctx", None)
    said = " ".join(str(error.format_message()).split())[:300].rstrip(".")
    return said if context is None else f"{said}; see {context.command_path} --help"
