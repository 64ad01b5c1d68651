"""What options take, where the libraries that the commands need are not loaded yet."""

from __future__ import annotations

import re
from collections.abc import Callable

from fuzz.errors import Exit, Stop

LONGEST_S = 1e7
"""The longest time that an option takes; the operating system's timers end somewhere beyond."""

CASE_TIMEOUT_S = 120.0
"""One case runs a kernel three or four times; a cold compilation takes seconds. Beyond this it hangs."""


LEAST_TIMEOUT_S = 1.0
"""The shortest time for a case: much of it may be spent on what is ours, before the target's own call."""


def case_timeout(text: str) -> float:
    """Seconds that ``--timeout`` gives a case. Raises ``Stop``."""
    return duration("--timeout", text, least=LEAST_TIMEOUT_S)


def duration(option: str, text: str, zero: bool = False, least: float = 0.0) -> float:
    """Seconds in ``90s``, ``10m``, ``2h`` or a plain number of seconds, above zero and no less than ``least``.

    ``zero``: may be none. Raises ``Stop``.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    seconds = 0.0 if match is None else float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if not ((seconds > 0 and least <= seconds <= LONGEST_S) or (zero and match and not seconds)):
        shown = text if len(text) <= 60 else text[:57] + "..."
        lowest = f"at least {least:g} s" if least else "0s" if zero else "above zero"
        allowed = f"a time such as 90s, 10m or 2h, {lowest}, at most {LONGEST_S:.0f} s"
        raise Stop(Exit.USAGE, f"{option}: {shown!r}; allowed: {allowed}")
    return seconds


def integer(option: str, least: int, most: int) -> Callable[[object], int]:
    """What reads an integer within bounds, both included; it raises ``Stop``."""

    def read(value: object) -> int:
        text = str(value).strip()
        # Bounded before it is read: int() refuses texts of thousands of digits in words of its own.
        if len(text) > 30 or not re.fullmatch(r"[+-]?\d+", text) or not least <= int(text) <= most:
            shown = text if len(text) <= 60 else text[:57] + "..."
            raise Stop(Exit.USAGE, f"{option}: {shown!r}; allowed: an integer from {least} to {most}")
        return int(text)

    return read
