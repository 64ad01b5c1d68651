"""Small kernels, each with one planted fault and a clean twin. Loaded as source by the tests, never imported.

A comment `fault: name` marks the line that a finding must name.
"""

import triton
import triton.language as tl


@triton.jit
def load_past_end(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(x + lanes)  # fault: load_past_end
    tl.store(out + lanes, values, mask=lanes < n)


@triton.jit
def load_within(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(x + lanes, mask=lanes < n)
    tl.store(out + lanes, values, mask=lanes < n)


@triton.jit
def store_past_end(out, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lanes, lanes)  # fault: store_past_end


@triton.jit
def store_within(out, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lanes, lanes, mask=lanes < n)


@triton.jit
def sum_of_undefined(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(x + lanes, mask=lanes < n)
    tl.store(out, tl.sum(values, axis=0) * 0)  # fault: sum_of_undefined


@triton.jit
def sum_of_selected(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(x + lanes, mask=lanes < n)
    values = tl.where(lanes < n, values, 0)
    tl.store(out, tl.sum(values, axis=0))


@triton.jit
def undefined_address(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    where_to = tl.load(x + lanes, mask=lanes < n)
    tl.store(out + where_to, lanes)  # fault: undefined_address


@triton.jit
def masked_address(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    where_to = tl.load(x + lanes, mask=lanes < n)
    tl.store(out + where_to, lanes, mask=lanes < n)


@triton.jit
def undefined_mask(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    flags = tl.load(x + lanes, mask=lanes < n)
    tl.store(out + lanes, lanes, mask=flags > 100)  # fault: undefined_mask


@triton.jit
def settled_mask(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    flags = tl.load(x + lanes, mask=lanes < n)
    tl.store(out + lanes, lanes, mask=(lanes < n) & (flags > 100))


@triton.jit
def undefined_branch(x, out, n):
    first = tl.load(x, mask=n > 0)
    if first > 0:  # fault: undefined_branch
        tl.store(out, 1)


@triton.jit
def defined_branch(x, out, n):
    first = tl.load(x, mask=n > 0, other=0)
    if first > 0:
        tl.store(out, 1)


@triton.jit
def wrapped_address(x, out, row, stride, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(x + (row * stride + lanes))  # fault: wrapped_address
    tl.store(out + lanes, values)


@triton.jit
def wide_address(x, out, row, stride, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.load(x + lanes * stride * row, mask=lanes == 0)
    values = tl.load(x + (row.to(tl.int64) * stride + lanes) % BLOCK)
    tl.store(out + lanes, values)


@triton.jit
def divide_by_zero(x, out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    divisor = tl.load(x + lanes)
    tl.store(out + lanes, 7 // divisor, mask=divisor != 0)  # fault: divide_by_zero


@triton.jit
def divide_by_nonzero(x, out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    divisor = tl.load(x + lanes)
    safe = tl.where(divisor == 0, 1, divisor)
    tl.store(out + lanes, 7 // safe, mask=divisor != 0)


@triton.jit
def unknown_name(out):
    tl.store(out, tl.frobnicate(1))  # fault: unknown_name


@triton.jit
def helper_load(pointer):
    return tl.load(pointer)  # fault: helper_load


@triton.jit
def load_through_helper(x, out, n):
    tl.store(out, helper_load(x + n), mask=n < 0)
