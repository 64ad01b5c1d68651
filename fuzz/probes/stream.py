"""Counter streams of a seed, one for each kind of value."""

from __future__ import annotations

from enum import IntEnum


class Stream(IntEnum):
    """Which counter stream of a seed each kind of value is drawn from. Numbers are part of the format."""

    PAGES = 0
    SKIP = 1
    SLOT_MAP = 2
    Q = 3
    K = 4
    V = 5
    SINKS = 6
    HOLES = 7
    K_DESCALE = 8
    V_DESCALE = 9
    EARLIER = 16
    """and the following, one for each earlier call"""
    SIGNS = 32
    BLOCKS = 33
    PICKS = 34
    UNUSED_K = 35
    UNUSED_V = 36
