"""Kernels whose programs part ways and meet again, for the emulator."""

import triton
import triton.language as tl


@triton.jit
def _longer(total, step):
    if step % 3 == 0:
        total = total * 2
    return total + step


@triton.jit
def regions(x, kinds, counts, out, spare, BLOCK: tl.constexpr, DEEP: tl.constexpr):
    """Branches in loops in loops; variables that are kept, carried, dropped; a helper; a `while`; a load in an arm."""
    pid = tl.program_id(0)
    kind, count = tl.load(kinds + pid), tl.load(counts + pid)
    lanes = tl.arange(0, BLOCK)
    total, best = tl.zeros([BLOCK], dtype=tl.float32), 0
    pair = (pid, total)
    earlier = tl.load(x + lanes)
    for step in range(count):
        row = tl.load(x + (pid + step) * BLOCK + lanes)
        if kind % 4 == 1:
            scaled = row * 3
            total += scaled
        elif kind % 4 == 2:
            total -= row
            for inner in range(step % 3):
                total = _longer(total, inner)
            best += 1
        else:
            pair = (step, total)
        if DEEP:
            total += earlier
            earlier = row
    left = kind
    while left > 1:
        left = left // 2
        best += left
    if kind > 2:
        tl.store(spare + pid, best)
    value = total + pair[1] * pair[0] + best
    tl.store(out + pid * BLOCK + lanes, value)


@triton.jit
def undefined_in_some(x, kinds, out, n, BLOCK: tl.constexpr):
    """Lanes without meaning come from one arm, and reach memory behind it."""
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    row = tl.load(x + lanes)
    if tl.load(kinds + pid) > 0:
        row = tl.load(x + lanes, mask=lanes < n)
    tl.store(out + pid * BLOCK + lanes, row)


@triton.jit
def other_types(x, kinds, out):
    """What the arms leave in `value` has no one type."""
    pid = tl.program_id(0)
    value = tl.load(x + pid)
    if tl.load(kinds + pid) > 0:
        value = pid
    tl.store(out + pid, value * 2)


@triton.jit
def leaving_early(kinds, out):
    """A region that programs leave half way is none."""
    pid = tl.program_id(0)
    if tl.load(kinds + pid) > 0:
        tl.store(out + pid, 1)
        return
    tl.store(out + pid, 2)
