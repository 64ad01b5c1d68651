"""Kernels for the compile gate's tests: loaded as source for one engine or another, never imported."""

import torch
import triton
import triton.language as tl


def lanes():
    """What a launcher may ask of the machine."""
    return torch.cuda.get_device_properties(0).warp_size


@triton.jit
def copy(source, target, count, scale, flag, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Clean, for any architecture."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + lanes, mask=lanes < count, other=0.0)
    if flag is not None:
        value += tl.load(flag)
    tl.store(target + lanes, (value * scale).to(DTYPE), mask=lanes < count)


@triton.jit
def _rows(COUNT: tl.constexpr):
    return tl.arange(0, COUNT)


@triton.jit
def total(source: torch.Tensor, target, COUNT: tl.constexpr):
    """Refused everywhere unless COUNT is a power of two, in a helper."""
    rows = tl.load(source + _rows(COUNT))
    tl.store(target, tl.sum(rows, axis=0))


@triton.jit
def narrow(source, target, BLOCK: tl.constexpr):
    """Converts to whatever `target` holds: not every architecture has every fp8 format."""
    lanes = tl.arange(0, BLOCK)
    tl.store(target + lanes, tl.load(source + lanes).to(target.dtype.element_ty))


@triton.jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Wants tiles of its inputs in shared memory."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right))


@triton.jit
def hoard(source, target, WIDTH: tl.constexpr):
    """Keeps more values than a lane has registers, when a program has few lanes."""
    lanes = tl.arange(0, WIDTH)
    a = tl.load(source + lanes)
    b = tl.load(source + WIDTH + lanes)
    for _ in range(3):
        tl.debug_barrier()
        c = a * b + tl.sum(b, axis=0)
        a, b = b, c
    tl.store(target + lanes, a)
    tl.store(target + WIDTH + lanes, b)


@triton.jit(do_not_specialize=["b"], do_not_specialize_on_alignment=["c"])
def flags(a, b, c, d: "i64", e: "fp32", f: "const", BLOCK: tl.constexpr):  # noqa: F821
    """One parameter of each kind that the launcher treats in its own way."""
