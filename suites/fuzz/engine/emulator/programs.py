"""Kernels whose programs part ways or meet. Loaded as source by the tests, never imported."""

import triton
import triton.language as tl


@triton.jit
def divergent(x, lengths, out, width, BLOCK: tl.constexpr, LIMIT: tl.constexpr):
    """Branches, ragged loops, early return, `while`, and arithmetic that rounds."""
    pid = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    length = tl.load(lengths + pid)
    if length < 0:
        return
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    top = float("-inf")
    for start in range(0, length, BLOCK):
        mask = start + lanes < length
        row = tl.load(x + pid * width + start + lanes, mask=mask, other=0.0)
        best = tl.max(tl.where(mask, row, float("-inf")), axis=0)
        if best > top and start < LIMIT:
            total = total * tl.exp2(top - best) + tl.exp2(row - best)
            top = best
        else:
            total += tl.log2(1.0 + tl.exp(row - top))
    steps = length
    while steps > 7:
        steps = steps // 2
        total += tl.sin(total) / 3
    total += tl.sum(total, axis=0) * (steps + 1)
    tl.store(out + pid * BLOCK + lanes, total)


@triton.jit
def products(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    pid = tl.program_id(0)
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + pid * M * K + m[:, None] * K + k[None, :])
    right = tl.load(b + pid * N * K + n[:, None] * K + k[None, :])
    result = tl.dot(left, right.T)
    result = tl.dot(result.to(left.dtype), tl.trans(result).to(left.dtype))
    tl.store(out + pid * M * M + m[:, None] * M + m[None, :], result)


@triton.jit
def race(x, out, n, SECOND: tl.constexpr):
    """Programs write the same few places at two instructions; the last in grid order must win."""
    pid = tl.program_id(0)
    place = tl.load(x + pid)
    tl.store(out + place, pid)
    if SECOND:
        tl.store(out + (place + 1) % n, pid + 1000)


@triton.jit
def in_place(x, shift, n):
    """Each program reads its neighbour's place and writes its own: order shows unless `shift` is 0."""
    pid = tl.program_id(0)
    tl.store(x + pid, tl.load(x + (pid + shift) % n) * 3 + 1)


@triton.jit
def counter(x, tickets, total, BLOCK: tl.constexpr):
    """Each program takes a ticket; the block adds to few places, lanes meeting there."""
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    value = tl.load(x + pid)
    tl.store(tickets + pid, tl.atomic_add(total, value))
    tl.atomic_add(total + 1 + lanes % 2, lanes * value)


@triton.jit
def tally(x, out, BLOCK: tl.constexpr):
    """Each program counts its own items in its own bins: lanes meet, programs do not."""
    pid = tl.program_id(0)
    items = tl.load(x + pid * BLOCK + tl.arange(0, BLOCK))
    seen = tl.atomic_add(out + pid * 4 + items, 1, mask=items > 0)
    tl.store(x + pid * BLOCK + tl.arange(0, BLOCK), seen, mask=items > 0)


@triton.jit
def large(out, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    tl.store(out + pid, tl.sum(lanes * pid, axis=0))


@triton.jit
def reinterpret(x, out, flags, narrow, BLOCK: tl.constexpr):
    """Pointers to other types, booleans in memory, fp8 in memory."""
    lanes = tl.arange(0, BLOCK)
    halves = x.to(tl.pointer_type(tl.uint16), bitcast=True)
    tl.store(out + lanes, tl.load(halves + lanes).to(tl.int32))
    odd = tl.load(flags + lanes)
    tl.store(flags + lanes, (lanes > 1) == odd)
    tl.store(narrow + lanes, tl.where(odd, 3.0e5, -0.3))


@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % 2 == 0})
@triton.autotune(configs=[triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=["n"])
@triton.jit
def tuned(out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    tl.store(out, n * 100 + BLOCK * 10 + EVEN)


@triton.jit
def languages(out, flag, n, NAME: tl.constexpr = "x"):
    """Small points of the front end: assignments, boolean operators, min and max, compile time."""
    one = 1
    half = one / 2
    count: tl.constexpr = 3
    acc = 0
    for i in tl.static_range(count):
        acc += i
    both = n > 0 and n < 10 and not (n == 5)  # noqa: SIM201 - `not` is what is tried
    block = tl.arange(0, 4)
    odd = (block % 2 == 1) or (block == 0)
    tl.store(out + block, tl.where(odd, min(n, 4), max(n, 4)))
    tl.store(out + 4, acc if both else -acc)
    tl.store(out + 5, (half * 4).to(tl.int32))
    assert n > 1000000
    if flag is None:
        tl.store(out + 6, 60)
    if NAME == "x":
        tl.store(out + 7, -7 // 2 * 10 + -7 % 3)
    else:
        tl.store(out + 7, n // 2 * 10 + n % 3)
