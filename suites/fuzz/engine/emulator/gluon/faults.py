"""Small Gluon kernels, each with one planted fault and a clean twin. Loaded as source by the tests, never imported.

A comment `fault: name` marks the line that a finding must name.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LINE = gl.constexpr(gl.BlockedLayout([1], [64], [4], [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def read_before_store(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [8], FLAT)
    values = shared.load(LINE)  # fault: read_before_store
    shared.store(gl.load(x + lanes))
    gl.store(out + lanes, values, mask=lanes < 0)


@gluon.jit
def read_after_store(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [8], FLAT)
    shared.store(gl.load(x + lanes))
    values = shared.load(LINE)
    gl.store(out + lanes, values)


@gluon.jit
def half_stored(x, out, n):
    lanes = gl.arange(0, 4, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [8], FLAT)
    shared.slice(0, 4).store(gl.load(x + lanes))
    values = shared.slice(2, 4).load(LINE)  # fault: half_stored
    gl.store(out + lanes, values, mask=lanes < 2)


@gluon.jit
def both_halves_stored(x, out, n):
    lanes = gl.arange(0, 4, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [8], FLAT)
    shared.slice(0, 4).store(gl.load(x + lanes))
    shared.slice(4, 4).store(gl.load(x + lanes))
    values = shared.slice(2, 4).load(LINE)
    gl.store(out + lanes, values)


@gluon.jit
def copy_not_awaited(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [8], FLAT, gl.load(x + lanes))
    gl.amd.cdna4.async_copy.buffer_load_to_shared(shared, x, lanes)
    gl.amd.cdna4.async_copy.commit_group()
    gl.amd.cdna4.async_copy.wait_group(1)
    values = shared.load(LINE)  # fault: copy_not_awaited
    gl.store(out + lanes, values, mask=lanes < 0)


@gluon.jit
def copy_awaited(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [8], FLAT, gl.load(x + lanes))
    gl.amd.cdna4.async_copy.buffer_load_to_shared(shared, x, lanes)
    gl.amd.cdna4.async_copy.commit_group()
    gl.amd.cdna4.async_copy.wait_group(0)
    gl.store(out + lanes, shared.load(LINE))


@gluon.jit
def store_wide(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    values = gl.amd.cdna3.buffer_load(x, lanes)
    gl.amd.cdna3.buffer_store(values.to(gl.int64), out, lanes, mask=lanes < n)  # fault: store_wide


@gluon.jit
def store_cast(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    values = gl.amd.cdna3.buffer_load(x, lanes)
    gl.amd.cdna3.buffer_store(values.to(out.dtype.element_ty), out, lanes, mask=lanes < n)


@gluon.jit
def buffer_past_end(x, out, n):
    lanes = gl.arange(0, 16, layout=LINE)
    values = gl.amd.cdna4.buffer_load(x, lanes)  # fault: buffer_past_end
    gl.amd.cdna4.buffer_store(values, out, lanes, mask=lanes < n)


@gluon.jit
def buffer_masked(x, out, n):
    lanes = gl.arange(0, 16, layout=LINE)
    values = gl.amd.cdna4.buffer_load(x, lanes, mask=lanes < n)
    gl.amd.cdna4.buffer_store(values + (lanes >= n).to(gl.int32), out, lanes, mask=lanes < 8)


@gluon.jit
def copy_past_end(x, out, n):
    lanes = gl.arange(0, 16, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [16], FLAT)
    gl.amd.cdna4.async_copy.global_load_to_shared(shared, x + lanes)  # fault: copy_past_end
    gl.amd.cdna4.async_copy.wait_group(0)
    gl.store(out + lanes, shared.load(LINE), mask=lanes < n)


@gluon.jit
def copy_masked(x, out, n):
    lanes = gl.arange(0, 16, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [16], FLAT)
    gl.amd.cdna4.async_copy.global_load_to_shared(shared, x + lanes, mask=lanes < n, other=0)
    gl.amd.cdna4.async_copy.wait_group(0)
    gl.store(out + lanes, shared.load(LINE), mask=lanes < n)


@gluon.jit
def wrapped_offset(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    values = gl.amd.cdna3.buffer_load(x, lanes + n * 536870912)  # fault: wrapped_offset
    gl.store(out + lanes, values, mask=lanes < 0)


@gluon.jit
def wide_offset(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    values = gl.load(x + (lanes + n.to(gl.int64) * 536870912) % 8)
    gl.store(out + lanes, values)


@gluon.jit
def undefined_through_shared(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [8], FLAT, gl.load(x + lanes, mask=lanes < 5))
    gl.store(out + lanes, shared.load(LINE))  # fault: undefined_through_shared


@gluon.jit
def defined_through_shared(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [8], FLAT, gl.load(x + lanes, mask=lanes < 5, other=0))
    gl.store(out + lanes, shared.load(LINE))


@gluon.jit
def wide_offsets(x, out, n):
    lanes = gl.arange(0, 8, layout=LINE).to(gl.int64)
    gl.amd.cdna3.buffer_store(gl.amd.cdna3.buffer_load(x, lanes), out, lanes)


@gluon.jit
def unknown_name(x, out, n):
    gl.store(out, gl.frobnicate(x))  # fault: unknown_name


@gluon.jit
def unknown_vendor_name(x, out, n):
    gl.store(out, gl.amd.cdna4.frobnicate(x))  # fault: unknown_vendor_name


@gluon.jit
def given_layout(out, layout: gl.constexpr, SIZE: gl.constexpr):
    lanes = gl.arange(0, SIZE, layout=layout)
    gl.store(out + lanes, lanes)


@gluon.jit
def given_block(out, layout: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    gl.store(out, gl.sum(gl.sum(gl.zeros([M, N], gl.int32, layout=layout), axis=0), axis=0))


@gluon.jit
def given_shared(out, layout: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    gl.allocate_shared_memory(gl.int32, [M, N], layout)


@gluon.jit
def copied_and_sliced(x, out, n):
    lanes = gl.arange(0, 4, layout=LINE)
    shared = gl.allocate_shared_memory(gl.int32, [2, 8], FLAT)
    whole = gl.arange(0, 8, layout=LINE)
    gl.amd.cdna4.async_copy.buffer_load_to_shared(shared.index(0), x, whole, mask=whole < n)
    gl.amd.cdna4.async_copy.wait_group(0)
    gl.store(out + lanes, shared.index(0).slice(2, 4).load(LINE))
