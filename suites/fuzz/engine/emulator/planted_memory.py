"""Small kernels with a planted fault of memory or order, and their clean twins. Loaded by the tests as source.

A comment `fault: name` marks the line that a finding must name.
"""

import triton
import triton.language as tl


@triton.jit
def scratch_to_output(scratch, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(scratch + lanes)  # read: scratch_to_output
    tl.store(out + tl.program_id(0) * BLOCK + lanes, values * 2)  # fault: scratch_to_output


@triton.jit
def scratch_selected(scratch, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(scratch + lanes)
    tl.store(out + tl.program_id(0) * BLOCK + lanes, tl.where(lanes < n, values, 0))


@triton.jit
def scratch_sum(scratch, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    masked = tl.load(scratch + lanes, mask=lanes < n + 1)
    tl.store(out + tl.program_id(0), tl.sum(tl.where(lanes < n + 1, masked, 0), axis=0))  # fault: scratch_sum


@triton.jit
def scratch_address(scratch, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    places = tl.load(scratch + lanes)
    tl.store(out + places, tl.program_id(0))  # fault: scratch_address


@triton.jit
def scratch_branch(scratch, out, n):
    if tl.load(scratch + n) > 0:  # fault: scratch_branch
        tl.store(out, 1)


@triton.jit
def fill(out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, lanes, mask=lanes < n)


@triton.jit
def different_values(out, n):
    tl.store(out, tl.program_id(0))  # fault: different_values


@triton.jit
def same_value(out, n):
    tl.store(out, n)


@triton.jit
def own_place(out, n):
    tl.store(out + tl.program_id(0), n)
    tl.store(out + tl.program_id(0), tl.load(out + tl.program_id(0)) + tl.program_id(0))


@triton.jit
def read_of_neighbour(x, out, n):
    pid = tl.program_id(0)
    tl.store(x + pid, pid + 1)
    tl.store(out + pid, tl.load(x + (pid + 1) % n))  # fault: read_of_neighbour


@triton.jit
def read_before_neighbour(x, out, n):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(out, tl.load(x + n - 1))
    else:
        tl.store(x + pid, pid)  # fault: read_before_neighbour


@triton.jit
def last_one_sums(x, out, count, n, BLOCK: tl.constexpr):
    """The program that takes the last ticket reads what the others stored before they took theirs."""
    pid = tl.program_id(0)
    tl.store(x + pid, pid + 1)
    if tl.atomic_add(count, 1) == n - 1:
        lanes = tl.arange(0, BLOCK)
        tl.store(out, tl.sum(tl.load(x + lanes, mask=lanes < n, other=0), axis=0))
        tl.store(count, 0)


@triton.jit
def last_one_sums_relaxed(x, out, count, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(x + pid, pid + 1)
    if tl.atomic_add(count, 1, sem="relaxed") == n - 1:
        lanes = tl.arange(0, BLOCK)
        tl.store(out, tl.sum(tl.load(x + lanes, mask=lanes < n, other=0), axis=0))  # fault: last_one_sums_relaxed


@triton.jit
def ticket_too_early(x, out, count, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    ticket = tl.atomic_add(count, 1)
    tl.store(x + pid, pid + 1)
    if ticket == n - 1:
        lanes = tl.arange(0, BLOCK)
        tl.store(out, tl.sum(tl.load(x + lanes, mask=lanes < n, other=0), axis=0))  # fault: ticket_too_early


@triton.jit
def atomics_alone(out, n, BLOCK: tl.constexpr):
    tl.atomic_add(out + tl.arange(0, BLOCK), tl.program_id(0))


@triton.jit
def atomic_and_plain(out, n, BLOCK: tl.constexpr):
    tl.atomic_add(out + tl.arange(0, BLOCK), 1)
    tl.store(out + n, tl.program_id(0) * 5 + 7)  # fault: atomic_and_plain


@triton.jit
def wrapped_out_of_bounds(x, out, row, stride, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(x + (row * stride + lanes))  # fault: wrapped_out_of_bounds
    tl.store(out + lanes, values)  # follows: wrapped_out_of_bounds


@triton.jit
def out_of_bounds_stored(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(x + lanes)  # fault: out_of_bounds_stored
    more = tl.load(x + lanes, mask=lanes > 0)
    tl.store(out + lanes, values)  # follows: out_of_bounds_stored
    tl.store(out + BLOCK + lanes, more)  # other: out_of_bounds_stored


@triton.jit
def divided_stored(x, out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, 7 // tl.load(x + lanes))  # fault: divided_stored


@triton.jit
def scripted(memory, ops, places, values, out, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program follows its row of a script: 0 nothing, 1 load a block, 2 store one."""
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for step in range(STEPS):
        op = tl.load(ops + pid * STEPS + step)
        place = tl.load(places + pid * STEPS + step)
        value = tl.load(values + pid * STEPS + step)
        if op == 1:
            total += tl.load(memory + place + lanes)
        elif op == 2:
            tl.store(memory + place + lanes, value)
    tl.store(out + pid * BLOCK + lanes, total)
