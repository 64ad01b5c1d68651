"""Key ranges and blocks, against the definition of visibility written out pair by pair."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.masking import KeyBlock, KeyRanges, QueryBlock, key_order, key_ranges, plan_blocks

LENGTHS = st.tuples(st.integers(0, 9), st.integers(0, 40))  # queries, context of one request


def visible(q_len: int, context: int, keys: list[int], causal: bool, window: int | None) -> list[list[bool]]:
    """The definition: queries at context - q_len + i, keys at the positions given."""
    at = [context - q_len + i for i in range(q_len)]
    return [[(not causal or j <= p) and (window is None or p - window < j) for j in keys] for p in at]


def dense(ranges: KeyRanges, request: int, keys: int) -> Tensor:
    key = torch.arange(keys)
    return (key >= ranges.lo[request, :, None]) & (key < ranges.hi[request, :, None])


def check_blocks(plan: list[QueryBlock], ranges: KeyRanges, keys: int, block_q: int, block_k: int) -> None:
    """Blocks tile the queries, hold every visible pair once, and are unmasked only where everything is
    visible.
    """
    seen = torch.stack([dense(ranges, b, keys) for b in range(ranges.lo.shape[0])])
    covered = torch.zeros_like(seen, dtype=torch.int64)
    at = 0
    for block in plan:
        assert block.start == at < block.stop <= at + block_q
        at = block.stop
        for part in block.keys:
            assert 0 <= part.start < part.stop <= min(keys, part.start + block_k)
            pairs = (slice(None), slice(block.start, block.stop), slice(part.start, part.stop))
            covered[pairs] += 1
            assert part.masked or bool(seen[pairs].all())
    assert at == ranges.lo.shape[1]
    assert int(covered.max()) <= 1 if covered.numel() else True
    assert bool((covered[seen] == 1).all())


@settings(deadline=None)
@given(
    st.lists(LENGTHS, min_size=1, max_size=3),
    st.booleans(),
    st.none() | st.integers(1, 45),
    st.integers(1, 6),
    st.integers(1, 50),
)
def test_ranges_and_blocks_agree_with_the_definition(
    lengths: list[tuple[int, int]], causal: bool, window: int | None, block_q: int, block_k: int
) -> None:
    q_lens, contexts = [q for q, _ in lengths], [c for _, c in lengths]
    ranges = key_ranges(q_lens, contexts, contexts, causal=causal, window=window)
    for b, (q_len, context) in enumerate(lengths):
        expected = torch.tensor(visible(q_len, context, list(range(context)), causal, window)).view(q_len, context)
        actual = dense(ranges, b, context)
        assert torch.equal(actual[:q_len], expected)
        assert not actual[q_len:].any()
    check_blocks(plan_blocks(ranges, block_q, block_k), ranges, max(contexts), block_q, block_k)


@settings(deadline=None)
@given(
    st.lists(st.tuples(LENGTHS, st.randoms()), min_size=1, max_size=3),
    st.booleans(),
    st.none() | st.integers(1, 45),
)
def test_ranges_of_some_keys_agree_with_the_definition(
    requests: list[tuple[tuple[int, int], random.Random]], causal: bool, window: int | None
) -> None:
    keys = [sorted(r.sample(range(c), r.randint(0, c))) for (_, c), r in requests]
    q_lens, contexts = [q for (q, _), _ in requests], [c for (_, c), _ in requests]
    ranges = key_ranges(
        q_lens,
        [len(k) for k in keys],
        contexts,
        causal=causal,
        window=window,
        positions=[torch.tensor(k, dtype=torch.int64) for k in keys],
    )
    for b, (given_keys, q_len) in enumerate(zip(keys, q_lens, strict=True)):
        expected = torch.tensor(visible(q_len, contexts[b], given_keys, causal, window)).view(q_len, len(given_keys))
        assert torch.equal(dense(ranges, b, len(given_keys))[:q_len], expected)


def test_causal_blocks_are_masked_on_the_diagonal_only() -> None:
    plan = plan_blocks(key_ranges([256], [256], [256], causal=True, window=None), 64, 64)
    assert plan[2].keys == (
        KeyBlock(0, 64, masked=False),
        KeyBlock(64, 128, masked=False),
        KeyBlock(128, 192, masked=True),
    )


def test_keys_before_the_window_are_skipped() -> None:
    plan = plan_blocks(key_ranges([256], [256], [256], causal=True, window=32), 64, 64)
    assert min(part.start for part in plan[3].keys) == 192 - 31


def test_a_decode_step_needs_no_mask() -> None:
    assert plan_blocks(key_ranges([1], [100], [100], causal=True, window=None), 8, 64) == [
        QueryBlock(0, 1, (KeyBlock(0, 64, masked=False), KeyBlock(64, 100, masked=False)))
    ]


def test_a_block_of_empty_rows_has_no_keys() -> None:
    plan = plan_blocks(key_ranges([6], [2], [2], causal=True, window=None), 4, 64)
    assert plan == [QueryBlock(0, 4, ()), QueryBlock(4, 6, (KeyBlock(0, 2, masked=True),))]


def test_span_and_shift_leave_out_keys_that_nobody_sees() -> None:
    ranges = key_ranges([2], [10], [10], causal=True, window=3)
    assert ranges.span() == (6, 10)
    assert ranges.shifted(6).lo.tolist() == [[0, 1]]
    assert ranges.shifted(6).hi.tolist() == [[3, 4]]
    assert key_ranges([2], [0], [0], causal=True, window=None).span() == (0, 0)
    assert key_ranges([], [], [], causal=True, window=None).span() == (0, 0)


@settings(deadline=None)
@given(st.lists(st.permutations(range(6)), max_size=3))
def test_key_order_sorts_each_request(parts: list[list[int]]) -> None:
    positions = torch.tensor([p for part in parts for p in part], dtype=torch.int64)
    order = key_order(positions, [6] * len(parts))
    ordered = positions if order is None else positions[order]
    assert ordered.tolist() == list(range(6)) * len(parts)
    assert (order is None) == (positions.tolist() == list(range(6)) * len(parts))
