"""How large a call may be that a case describes: what is built, or captured, and judged."""

TOKENS = 1 << 20
"""Keys of all requests together."""
REQUESTS = 1 << 12
HEADS = 1024
"""Key heads, and query heads for each of them."""
DIM = 4096
PAGE_SIZE = 4096
PARTS = 64
"""Partial states of a merge."""
SOFT_CAP = (1e-3, 1e6)
SCALE = (-1e3, 1e3)
