"""Kernels that use single features of the language. Loaded as source by the tests, never imported."""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

SCALE: tl.constexpr = tl.constexpr(3)


@triton.jit
def block_pointers(a, b, out, M, N, K, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """A matrix product, tile by tile, over matrices whose sizes are no multiple of a tile."""
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    left = tl.make_block_ptr(a, (M, K), (K, 1), (row, 0), (BLOCK, BLOCK), (1, 0))
    right = tl.make_block_ptr(b, (K, N), (N, 1), (0, column), (BLOCK, BLOCK), (1, 0))
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for _ in tl.range(0, K, BLOCK, num_stages=3, flatten=True, warp_specialize=False):
        x = tl.load(left, boundary_check=(0, 1), padding_option=PAD)
        y = tl.load(right, boundary_check=(0, 1), padding_option=PAD)
        total = tl.dot(x, y, acc=total, input_precision="ieee")
        left = tl.advance(left, (0, BLOCK))
        right = tl.advance(right, (BLOCK, 0))
    target = tl.make_block_ptr(out, (M, N), (N, 1), (row, column), (BLOCK, BLOCK), (1, 0))
    tl.store(target, total, boundary_check=(0, 1))


@triton.jit
def descriptors(source, target, M, N, BLOCK: tl.constexpr):
    """Copy through a host descriptor and one made in the kernel."""
    made = tl.make_tensor_descriptor(target, shape=[M, N], strides=[N, 1], block_shape=[BLOCK, BLOCK])
    offsets = [tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK]
    made.store(offsets, source.load(offsets) * 2)


def describe(tensor, block):
    return TensorDescriptor.from_tensor(tensor, [block, block])


@triton.jit
def running_best(value_a, index_a, value_b, index_b):
    later = value_b >= value_a
    return tl.where(later, value_b, value_a), tl.where(later, index_b, index_a)


@triton.jit
def scans(x, sums, best, place, ordered, N: tl.constexpr):
    lanes = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.load(x + lanes)
    tl.store(sums + lanes, tl.cumsum(row, 0))
    top, where_ = tl.associative_scan((row, tl.arange(0, N)), 0, running_best)
    tl.store(best + lanes, top)
    tl.store(place + lanes, where_)
    tl.store(ordered + lanes, tl.sort(row))


@triton.jit
def undefined_scan(x, out, n, ORDER: tl.constexpr):
    """The last lanes of a masked load have no meaning: whatever they reach has none either."""
    lanes = tl.arange(0, 8)
    row = tl.load(x + lanes, mask=lanes < n)
    result = tl.sort(row) if ORDER else tl.cumsum(row, 0)
    tl.store(out + lanes, result)


@triton.jit
def spin(lock, total, x):
    """Mutual exclusion by compare-and-swap around a read-modify-write."""
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) + tl.load(x + tl.program_id(0)))
    tl.atomic_xchg(lock, 0)


@triton.jit
def typed(out, wide: tl.int64, narrow: tl.int32, factor: tl.float32):
    """Annotated scalars: the product of `wide` does not wrap."""
    tl.store(out, wide * 65536 * 65536)
    tl.store(out + 1, narrow.to(tl.int64) * SCALE)
    tl.store(out + 2, (factor * 8).to(tl.int64))


@triton.jit
def first_negative(x, n):
    """A helper that returns from within a loop, and a tuple."""
    found = -1
    for i in range(n):
        value = tl.load(x + i)
        if value < 0 and found < 0:
            found = i
    return found, n - found


@triton.jit
def helpers(x, out, n, STRICT: tl.constexpr):
    tl.static_assert(STRICT or True, "never")
    tl.static_print("compiled for", STRICT)
    tl.device_assert(n >= 0, "negative")
    tl.assume(n >= 0)
    place, rest = first_negative(x + tl.program_id(0) * n, n)
    tl.store(out + 2 * tl.program_id(0), place)
    tl.store(out + 2 * tl.program_id(0) + 1, rest)


@triton.jit
def device_functions(x, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    row = tl.load(x + lanes)
    tl.store(out + lanes, libdevice.tanh(row) + tl.math.exp2(row) + libdevice.isnan(row))


def _early(configs, arguments, **_):
    return [config for config in configs if config.kwargs["BLOCK"] <= arguments["n"]]


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=8), triton.Config({"BLOCK": 8}, num_stages=1)],
    key=["n"],
    prune_configs_by={"early_config_prune": _early},
)
@triton.heuristics({"HALF": lambda a: a["BLOCK"] // 2, "EVEN": lambda a: a["HALF"] % 2 == 0})
@triton.jit
def pruned(out, n, BLOCK: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr):
    tl.store(out, BLOCK * 100 + HALF * 10 + EVEN)


def later(n):
    """Host code that imports when it runs."""
    import triton
    from triton.language import float32

    return triton.cdiv(n, 4), float32, triton.__version__
