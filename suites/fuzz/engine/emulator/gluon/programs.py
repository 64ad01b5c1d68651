"""Gluon kernels that put the dialect's parts together. Loaded as source by the tests, never imported."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MFMA = gl.constexpr(gl.amd.AMDMFMALayout(version=4, instr_shape=[16, 16, 32], transposed=True, warps_per_cta=[4, 1]))
LHS = gl.constexpr(gl.DotOperandLayout(0, MFMA, k_width=8))
RHS = gl.constexpr(gl.DotOperandLayout(1, MFMA, k_width=8))
LOAD = gl.constexpr(gl.BlockedLayout([1, 8], [16, 4], [4, 1], [1, 0]))
BLOCK = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[512, 8]], [16, 32], [1, 0]))
WORDS = gl.constexpr(16)
assert WORDS.value == 16


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def max(x, axis):  # the module's own, which `max(...)` below means
    return gl.reduce(x, axis, larger)


@gluon.jit
def larger_and_sum(a, b, c, d):
    return gl.maximum(a, c), b + d


@gluon.constexpr_function
def checked(size):
    assert size in (16, 32), "size is 16 or 32"
    return size


@gluon.aggregate
class Strides:
    row: gl.constexpr
    column: gl.constexpr

    @gluon.jit
    def offsets(self, row, column):
        return row * self.row + column * self.column


@gluon.aggregate
class Tile:
    strides: Strides
    base: gl.tensor
    count: gl.tensor

    @gluon.constexpr_function
    def __init__(self, strides, base, count):
        self.strides = strides
        self.base = base
        self.count = count

    @gluon.jit
    def create(strides, base):
        return Tile(strides, base, 16)

    @gluon.jit
    def load(self, rows, columns):
        mask = (rows < self.count) & (columns >= 0)
        return gl.amd.cdna4.buffer_load(self.base, self.strides.offsets(rows, columns), mask=mask)


@gluon.jit
def incomplete(out):
    gl.store(out, Lacking(1).kept)


@gluon.aggregate
class Lacking:
    kept: gl.tensor
    forgotten: gl.tensor

    @gluon.constexpr_function
    def __init__(self, kept):
        self.kept = kept


@gluon.jit
def compile_time_check(out, SIZE: gl.constexpr):
    gl.store(out, checked(SIZE))


@gluon.jit
def pipelined_product(a, b, tiles, out, K: gl.constexpr):
    """out[program] = sum over its own number of tiles of a[tile] @ b[tile]: double-buffered copies."""
    program = gl.program_id(0)
    count = gl.load(tiles + program)
    if count == 0:
        return
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, LOAD))[:, None]
    columns = gl.arange(0, 32, layout=gl.SliceLayout(0, LOAD))[None, :]
    left = gl.allocate_shared_memory(gl.float16, [2, 16, 32], BLOCK)
    right = gl.allocate_shared_memory(gl.float16, [2, 16, 32], BLOCK)
    acc = gl.zeros([16, 16], gl.float32, layout=MFMA)
    for step in range(count + 1):
        if step < count:
            place = (step * 16 + rows) * 32 + columns
            gl.amd.cdna4.async_copy.buffer_load_to_shared(left.index(step % 2), a, place)
            gl.amd.cdna4.async_copy.buffer_load_to_shared(right.index(step % 2), b, place)
            gl.amd.cdna4.async_copy.commit_group()
        if step > 0:
            with gl.amd.warp_pipeline_stage("product", priority=1):
                if step < count:
                    gl.amd.cdna4.async_copy.wait_group(1)
                else:
                    gl.amd.cdna4.async_copy.wait_group(0)
                x = left.index((step - 1) % 2).load(LHS)
                y = right.index((step - 1) % 2).permute([1, 0]).load(RHS)
                acc = gl.amd.cdna4.mfma(x, y, acc)
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, MFMA))[:, None]
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, MFMA))[None, :]
    gl.amd.cdna4.buffer_store(acc, out, (program * 16 + rows) * 16 + columns)


@gluon.jit
def rows_summarised(x, out):
    """out[program, row] = greatest and sum of a row of x, from one reduction of a pair."""
    program = gl.program_id(0)
    tile = Tile.create(Strides(32, 1), x + program * 512)
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, LOAD))
    columns = gl.arange(0, 32, layout=gl.SliceLayout(0, LOAD))
    block = tile.load(rows[:, None], columns[None, :])
    greatest, total = gl.reduce((block, block), 1, larger_and_sum)
    greatest = gl.where(greatest == max(block, 1), greatest, 0.0)
    gl.store(out + (program * 16 + rows) * 2, greatest)
    gl.store(out + (program * 16 + rows) * 2 + 1, total)


@gluon.aggregate
class Shifted:
    by: gl.tensor

    @gluon.constexpr_function
    def __init__(self, by):
        self.by = by


@gluon.jit
def shared_in_regions(x, kinds, counts, out, UNUSED: gl.constexpr):
    """Shared memory and a class of the kernel, in branches and loops that not all programs take."""
    pid = gl.program_id(0)
    line = gl.BlockedLayout([1], [64], [4], [0])
    lanes = gl.arange(0, 64, layout=line)
    kind, count = gl.load(kinds + pid), gl.load(counts + pid)
    memory = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    memory.store(gl.load(x + lanes))
    shifted = Shifted(pid + 1)
    for step in range(count):
        row = memory.load(line)
        if kind > step:
            memory.store(row * 2 + shifted.by)
        else:
            memory.slice(0, 32).store(gl.load(x + 64 + gl.arange(0, 32, layout=line)))
        if kind == 3:
            shifted = Shifted(shifted.by + step)
    gl.store(out + pid * 64 + lanes, memory.load(line) + shifted.by)


@gluon.jit
def copies_around_regions(x, kinds, out, INSIDE: gl.constexpr):
    """A copy is under way while programs part ways; with INSIDE some of them wait for it there."""
    pid = gl.program_id(0)
    line = gl.BlockedLayout([1], [64], [4], [0])
    lanes = gl.arange(0, 64, layout=line)
    memory = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.amd.cdna4.async_copy.global_load_to_shared(memory, x + pid * 64 + lanes)
    gl.amd.cdna4.async_copy.commit_group()
    factor = 1
    if gl.load(kinds + pid) > 0:
        factor = 2
        if INSIDE:
            gl.amd.cdna4.async_copy.wait_group(0)
    gl.amd.cdna4.async_copy.wait_group(0)
    gl.store(out + pid * 64 + lanes, memory.load(line) * factor)
