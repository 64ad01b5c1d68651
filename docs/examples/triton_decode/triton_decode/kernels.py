"""One query a request over a paged cache [pages, page size, kv heads, D]."""

import triton
import triton.language as tl


@triton.jit
def decode(
    q,
    k,
    v,
    table,
    lengths,
    out,
    scale,
    window,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    dims = tl.arange(0, DIM)
    slots = tl.arange(0, PAGE)
    row = (request * HEADS + head) * DIM
    query = tl.load(q + row + dims).to(tl.float32)
    length = tl.load(lengths + request)
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    top = -float("inf")
    total = 0.0
    result = tl.zeros([DIM], dtype=tl.float32)
    for page in range(first // PAGE, (length + PAGE - 1) // PAGE):
        block = tl.load(table + request * table_stride + page).to(tl.int64)
        position = page * PAGE + slots
        seen = (position >= first) & (position < length)
        offset = ((block * PAGE + slots) * (HEADS // GROUP) + kv_head)[:, None] * DIM + dims[None, :]
        keys = tl.load(k + offset, mask=seen[:, None], other=0.0).to(tl.float32)
        values = tl.load(v + offset, mask=seen[:, None], other=0.0).to(tl.float32)
        scores = tl.sum(keys * query[None, :], axis=1) * scale
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=0))
        weights = tl.exp(scores - higher)
        rescale = tl.exp(top - higher)
        total = total * rescale + tl.sum(weights, axis=0)
        result = result * rescale + tl.sum(weights[:, None] * values, axis=0)
        top = higher
    tl.store(out + row + dims, (result / total).to(out.dtype.element_ty))
