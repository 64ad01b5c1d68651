"""Small Triton kernels of ours: what a compiler and the emulator must agree on bit for bit.

Loaded by file, through `fuzz.engine.loader`, for one engine or another; importing this module needs Triton.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def _convert(source, target, count, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    inside = offsets < count
    values = tl.load(source + offsets, mask=inside, other=0.0)
    tl.store(target + offsets, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _divide(numerator, denominator, quotient, remainder, count, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    inside = offsets < count
    a = tl.load(numerator + offsets, mask=inside, other=0)
    b = tl.load(denominator + offsets, mask=inside, other=1)
    tl.store(quotient + offsets, a // b, mask=inside)
    tl.store(remainder + offsets, a % b, mask=inside)


def convert(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`source` [N], float32, as `dtype`; the same dtype copies."""
    target = torch.empty_like(source, dtype=dtype)
    _convert[(triton.cdiv(source.numel(), BLOCK),)](source, target, source.numel(), block=BLOCK)
    return target


def divide(numerator: torch.Tensor, denominator: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quotient and remainder [N] of integers, as the language defines them for negative ones."""
    quotient, remainder = torch.empty_like(numerator), torch.empty_like(numerator)
    grid = (triton.cdiv(numerator.numel(), BLOCK),)
    _divide[grid](numerator, denominator, quotient, remainder, numerator.numel(), block=BLOCK)
    return quotient, remainder


@triton.jit
def _multiply(a, b, start, out, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr):
    row, column, k = tl.arange(0, rows), tl.arange(0, columns), tl.arange(0, depth)
    left = tl.load(a + row[:, None] * depth + k[None, :])
    right = tl.load(b + k[:, None] * columns + column[None, :])
    where = row[:, None] * columns + column[None, :]
    tl.store(out + where, tl.dot(left, right, acc=tl.load(start + where)))


def multiply(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor, warps: int) -> torch.Tensor:
    """start [m, n] + a [m, k] @ b [k, n], float32, in one product of the matrix unit; sizes are powers of two."""
    out = torch.empty_like(start)
    rows, depth = a.shape
    _multiply[(1,)](a, b, start, out, rows=rows, columns=b.shape[1], depth=depth, num_warps=warps)
    return out
