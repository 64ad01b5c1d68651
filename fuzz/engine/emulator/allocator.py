"""The C library's allocator, told to keep what values give back: each operator makes a tensor of a few megabytes.

By default glibc returns such memory to the system at once and gets it back page by page, which takes longer than
the operators do.
"""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_KEPT = 256 << 20  # bytes at the top of the heap
_LARGEST = 32 << 20  # bytes of a block from the heap; glibc takes no more


@cache
def keep_memory() -> bool:
    """Once a process. False where the C library is another one."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
