"""Attention over keys in pages or in a row, written after the oracle's definition. Everything is float32 but the
inputs and the output.

``attend`` leaves, for each query row and each split of its keys, the largest logit, the sum of exponentials and the
weighted values beneath it; ``combine`` merges the splits and adds the sink. Several launches of ``attend`` may fill
different splits of one row, each from a cache of its own.
"""

import triton
import triton.language as tl


@triton.jit
def decoded(raw, table, FP8: tl.constexpr):
    """Stored elements as float32; bytes of fp8 through the 256 values of their format."""
    if FP8:
        return tl.load(table + raw.to(tl.int32))
    return raw.to(tl.float32)


@triton.jit
def capped(logits, cap):
    """cap * tanh(logits / cap)."""
    x = logits / cap
    shrunk = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - shrunk) / (1.0 + shrunk)
    return cap * tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def attend(
    q,  # [Tq, Hq, D]
    k,  # element (page, head, d // KX, offset, d % KX)
    v,  # element (page, head, offset // VX, d, offset % VX)
    index,  # PAGED: pages [R, most]; else slots, those of request r from starts[r] on
    q_indptr,  # [R + 1]
    starts,  # [R]
    counts,  # [R] keys listed in index
    firsts,  # [R] position of the first of them
    contexts,  # [R] keys of the request in all
    k_descale,  # [Hkv]
    v_descale,  # [Hkv]
    table,  # [256] values of the fp8 format
    tops,  # [Tq, Hq, all_splits]
    sums,  # [Tq, Hq, all_splits]
    accs,  # [Tq, Hq, all_splits, DV]
    scale,
    cap,
    window,
    q_token,
    q_head,
    k_page,
    k_head,
    k_outer,
    k_offset,
    v_page,
    v_head,
    v_outer,
    v_dim,
    v_offset,
    index_row,
    first_split,
    splits,
    all_splits,
    kv_heads,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    KX: tl.constexpr,
    VX: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One request, one tile of its query rows, one kv head, one split."""
    request = tl.program_id(0)
    head = tl.program_id(2) % kv_heads
    split = tl.program_id(2) // kv_heads
    q_start = tl.load(q_indptr + request).to(tl.int64)
    queries = (tl.load(q_indptr + request + 1) - q_start).to(tl.int32)
    first_row = tl.program_id(1) * BLOCK_M
    if first_row >= queries * GROUP:
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    query, q_heads = rows // GROUP, head * GROUP + rows % GROUP
    in_use = query < queries
    past = tl.load(contexts + request).to(tl.int32) - queries
    position = past + query
    dims, v_dims, lanes = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)
    q_at = (q_start + query[:, None]) * q_token + q_heads[:, None] * q_head + dims[None, :]
    queried = tl.load(q + q_at, mask=in_use[:, None] & (dims[None, :] < D), other=0.0).to(tl.float32)
    factor = scale * tl.load(k_descale + head)

    # This split's keys, less those that no row of the tile sees.
    count, first = tl.load(counts + request).to(tl.int32), tl.load(firsts + request).to(tl.int32)
    index_start = tl.load(starts + request).to(tl.int64)
    share = tl.cdiv(count, splits * BLOCK_N) * BLOCK_N
    begin, end = split * share, tl.minimum((split + 1) * share, count)
    if CAUSAL:
        last_query = tl.minimum((first_row + BLOCK_M - 1) // GROUP, queries - 1)
        end = tl.minimum(end, past + last_query + 1 - first)
    if WINDOWED:
        oldest = tl.maximum(past + first_row // GROUP - window + 1 - first, 0)
        begin = tl.maximum(begin, oldest // BLOCK_N * BLOCK_N)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + lanes
        given = key < end
        if PAGED:
            page = tl.load(index + request.to(tl.int64) * index_row + key // PAGE, mask=given, other=0).to(tl.int64)
            offset = key % PAGE
        else:
            slot = tl.load(index + index_start + key, mask=given, other=0).to(tl.int64)
            page, offset = slot // PAGE, slot % PAGE
        visible = in_use[:, None] & given[None, :]
        if CAUSAL:
            visible &= first + key[None, :] <= position[:, None]
        if WINDOWED:
            visible &= first + key[None, :] > position[:, None] - window

        k_at = page * k_page + head * k_head + offset * k_offset
        k_mask = given[None, :] & (dims[:, None] < D)
        raw = tl.load(k + k_at[None, :] + (dims[:, None] // KX) * k_outer + dims[:, None] % KX, mask=k_mask, other=0)
        logits = tl.dot(queried, decoded(raw, table, FP8), input_precision="ieee") * factor
        if CAPPED:
            logits = capped(logits, cap)
        logits = tl.where(visible, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        # Rows that have seen no key yet: -inf minus -inf is not a number.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(logits - base[:, None])
        kept = tl.exp(top - base)

        # A key that no row sees is not read: whatever is stored there, zero times it may not be zero.
        seen = tl.max(visible.to(tl.int32), 0) > 0
        v_at = page * v_page + head * v_head + (offset // VX) * v_outer + (offset % VX) * v_offset
        v_mask = seen[:, None] & (v_dims[None, :] < DV)
        raw = tl.load(v + v_at[:, None] + v_dims[None, :] * v_dim, mask=v_mask, other=0)
        acc = acc * kept[:, None] + tl.dot(weights, decoded(raw, table, FP8), input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        top = new_top

    place = ((q_start + query) * (kv_heads * GROUP) + q_heads) * all_splits + first_split + split
    tl.store(tops + place, top, mask=in_use)
    tl.store(sums + place, total, mask=in_use)
    acc *= tl.load(v_descale + head)
    tl.store(accs + place[:, None] * DV + v_dims[None, :], acc, mask=in_use[:, None] & (v_dims[None, :] < DV))


@triton.jit
def combine(
    tops,  # [Tq, Hq, splits]
    sums,  # [Tq, Hq, splits]
    accs,  # [Tq, Hq, splits, DV]
    sinks,  # [Hq], -inf: none
    out,  # [Tq, Hq, DV]
    lse,  # [Tq, Hq]
    out_token,
    out_head,
    splits,
    heads,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One query token, one head: its splits become an output and a log-sum-exp without the sink."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    there = lanes < splits
    place = (token * heads + head) * splits + lanes
    top = tl.load(tops + place, mask=there, other=float("-inf"))
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp(top - base)
    total = tl.sum(share * tl.load(sums + place, mask=there, other=0.0), 0)
    parts = tl.load(accs + place[:, None] * DV + dims[None, :], mask=there[:, None] & (dims[None, :] < DV), other=0.0)
    weighted = tl.sum(share[:, None] * parts, 0)
    tl.store(lse + token * heads + head, tl.where(total > 0, tl.log(total) + base, float("-inf")))

    sink = tl.load(sinks + head)
    peak = tl.where(total > 0, tl.maximum(base, sink), 0.0)
    shrunk = tl.exp(base - peak)
    denominator = tl.where(total > 0, total * shrunk + tl.exp(sink - peak), 1.0)
    result = weighted * shrunk / denominator
    tl.store(out + token * out_token + head * out_head + dims, result.to(out.dtype.element_ty), mask=dims < DV)
