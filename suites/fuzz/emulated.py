"""A clean target that launches a small kernel in the emulator. Loaded by name, as a user's own targets are."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.engine import emulator
from oracle import declare
from oracle.precision import EXACT_COPY
from suites.fuzz.planted import COPIES, COPY, gather_rows

SOURCE = """
import triton
import triton.language as tl

@triton.jit
def copy_bytes(x, out, n, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    if start > 1000000:
        start = 0
    lanes = start + tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes, mask=lanes < n), mask=lanes < n)
"""


def _copied(x: Tensor) -> Tensor:
    kernels = emulator.load_text(SOURCE, "copies")
    out = torch.empty(x.shape, dtype=x.dtype)
    count = x.numel() * x.element_size()
    kernels.copy_bytes[(-(-count // 256),)](x.view(torch.uint8), out.view(torch.uint8), count, 256)
    return out


@declare.kv_gather(name="emulated.gather", convention=COPY, precision=EXACT_COPY, supports=COPIES)
def gather(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """A gather whose results one more kernel copies."""
    key, value = gather_rows(k_cache, v_cache, slots)
    return _copied(key), _copied(value)
