"""Kernels of the coverage tests, loaded as source. Comments name the lines that the tests ask about."""

import triton
import triton.language as tl


@triton.jit
def helper(x):
    """A docstring is no statement."""
    if x > 100:  # line: helper_if
        return x  # line: helper_true
    return x + 1


@triton.jit
def branches(x, out, n, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    mask = (
        lanes  # line: inside
        < n
    )
    values = tl.load(x + lanes, mask=mask, other=0)  # line: load
    total = tl.sum(values, axis=0)
    for i in range(0, tl.load(x + pid)):  # line: for
        total += i
    while total > 1000:  # line: while
        total = total // 2
    if FLAG:  # line: if_flag
        tl.store(out + lanes, values, mask=mask)  # line: flagged
    elif n > 3 and n < 100:  # line: elif
        tl.store(out + pid, helper(total))  # line: store
    for _ in range(3):  # line: broken
        if total > 0:  # line: if_last
            break
