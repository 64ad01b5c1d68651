"""Keys, queries and page tables that the ranks of sglang's decode context parallel gather, bit for bit."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuzz import engine as engines
from oracle import dcp, philox
from oracle.bits import bit_equal
from oracle.kinds import Engine
from suites.fuzz.test_dcp_layout import LATER, around, later, on_each
from suites.targets import ranks, sglang_dcp_backend, sglang_dcp_modules

MISSING = sglang_dcp_modules.missing(Engine.EMULATOR)
pytestmark = [pytest.mark.dcp, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RANKS = st.sampled_from([2, 3, 4, 8])
SEEDS = st.integers(0, 2**31)
LATENT, ROPE = 6, 2
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.fixture(autouse=True)
def _emulator() -> None:
    engines.start(Engine.EMULATOR)


def raw(seed: int, stream: int, tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[tokens, 1, width] of any bits, NaN among them."""
    drawn = philox.uniform_int(seed, stream, (tokens, 1, width * dtype.itemsize), 0, 256)
    return drawn.to(torch.uint8).view(dtype)


class Pool:
    """Keeps each position's latent keys in the row of its index; a rank is given its own rows, in order."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def get_mla_kv_buffer(
        self, layer: object, rows: Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Latent part and rotary part."""
        return self.keys[rows, :, :LATENT], self.keys[rows, :, LATENT:]


def positions_of(prefixes: list[int], rank: int, count: int) -> Tensor:
    """Rows, in the pool above, of the positions that a rank owns of every prefix."""
    starts = torch.tensor([0, *prefixes]).cumsum(0).tolist()
    own = [start + p for start, n in zip(starts, prefixes, strict=False) for p in dcp.local_positions(n, rank, count)]
    return torch.tensor(own, dtype=torch.int64)


@FEW
@given(SEEDS, st.data(), RANKS)
def test_prefixes_and_new_tokens_take_turns(seed: int, data: st.DataObject, count: int) -> None:
    """``all_gather_kv_cache_for_mha_extend``: of each request first the prefix, from all ranks, then its own tokens."""
    prefixes = data.draw(st.lists(around(count, 16 * count), min_size=1, max_size=3))
    news = data.draw(st.lists(st.integers(1, 5), min_size=len(prefixes), max_size=len(prefixes)))
    keys, new = raw(seed, 0, sum(prefixes), LATENT + ROPE), raw(seed, 1, sum(news), LATENT + ROPE)

    def work(rank: int) -> Tensor:
        latent, rope = sglang_dcp_modules.comm().all_gather_kv_cache_for_mha_extend(
            Pool(keys),
            None,
            positions_of(prefixes, rank, count),
            torch.tensor([p + n for p, n in zip(prefixes, news, strict=True)]),
            torch.tensor(prefixes),
            prefixes,
            torch.tensor(news),
            new[:, 0, :LATENT],
            new[..., LATENT:],
        )
        return torch.cat([latent.unsqueeze(1), rope], -1)

    parts = zip(keys.split(prefixes), new.split(news), strict=True)
    expected = torch.cat([part for pair in parts for part in pair])
    assert all(bool(bit_equal(found, expected).all()) for found in on_each(count, work))


@FEW
@given(SEEDS, st.data(), RANKS)
def test_all_prefixes_come_before_all_new_tokens(seed: int, data: st.DataObject, count: int) -> None:
    """``all_gather_kv_cache_for_mla_extend``, into the buffer of the step."""
    prefixes = data.draw(st.lists(around(count, 16 * count), min_size=1, max_size=3))
    news = data.draw(st.integers(1, 9))
    keys, new = raw(seed, 0, sum(prefixes), LATENT + ROPE), raw(seed, 1, news, LATENT + ROPE)

    def work(rank: int) -> Tensor:
        buffer = torch.zeros(sum(prefixes) + news, 1, LATENT + ROPE, dtype=keys.dtype)
        sglang_dcp_modules.comm().all_gather_kv_cache_for_mla_extend(
            Pool(keys),
            None,
            prefixes,
            positions_of(prefixes, rank, count),
            sum(prefixes),
            buffer,
            LATENT,
            new[..., :LATENT],
            new[..., LATENT:],
        )
        return buffer

    expected = torch.cat([keys, new])
    assert all(bool(bit_equal(found, expected).all()) for found in on_each(count, work))


@FEW
@given(SEEDS, st.data(), RANKS)
def test_chunks_of_a_prefix(seed: int, data: st.DataObject, count: int) -> None:
    """``all_gather_kv_cache_for_mha_chunk_extend``: a chunk begins wherever the one before has ended."""
    lengths = data.draw(st.lists(around(count, 16 * count), min_size=1, max_size=3))
    first = data.draw(st.lists(st.integers(0, 2 * count), min_size=len(lengths), max_size=len(lengths)))
    keys = raw(seed, 0, sum(lengths), LATENT + ROPE)
    position = torch.tensor([p for f, n in zip(first, lengths, strict=True) for p in range(f, f + n)])

    def work(rank: int) -> Tensor:
        own = keys[position % count == rank]
        latent, rope = sglang_dcp_modules.comm().all_gather_kv_cache_for_mha_chunk_extend(
            own[:, 0, :LATENT], own[..., LATENT:], torch.tensor(lengths), torch.tensor(first)
        )
        return torch.cat([latent.unsqueeze(1), rope], -1)

    assert all(bool(bit_equal(found, keys).all()) for found in on_each(count, work))


@FEW
@given(SEEDS, st.integers(1, 5), st.integers(1, 3), RANKS)
def test_every_rank_gets_all_queries(seed: int, tokens: int, heads: int, count: int) -> None:
    """``all_gather_q_for_mla_decode``: the heads of all ranks, in the order of the ranks."""
    q = raw(seed, 0, tokens * heads * count, LATENT + ROPE).view(tokens, heads * count, LATENT + ROPE)

    def work(rank: int) -> Tensor:
        own = q[:, rank * heads : (rank + 1) * heads]
        latent, rope = sglang_dcp_modules.comm().all_gather_q_for_mla_decode(own[..., :LATENT], own[..., LATENT:])
        return torch.cat([latent, rope], -1)

    assert all(bool(bit_equal(found, q).all()) for found in on_each(count, work))


def gathered_fp8(keys: Tensor, rank: int, group: ranks.Group) -> Tensor:
    """All keys as bytes, on one of the ranks."""
    own = keys[rank :: group.world_size]
    with sglang_dcp_modules.as_rank(group):
        found: Tensor = sglang_dcp_modules.comm().all_gather_kv_cache_for_dcp(
            own[..., :LATENT], own[..., LATENT:], torch.tensor([len(keys)])
        )
    return found.view(torch.uint8)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_keys_between_processes(dtype: torch.dtype) -> None:
    """gloo, as sglang's own wrapper of NCCL, knows no fp8: what is not sent as bytes is refused."""
    keys = raw(7, 0, 5, LATENT + ROPE, dtype)
    work = [partial(gathered_fp8, keys, rank) for rank in range(2)]
    if LATER and dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert all(torch.equal(found, keys.view(torch.uint8)) for found in ranks.over_gloo(work))
        return
    with pytest.raises(ranks.RankError, match="RuntimeError: Invalid scalar type"):
        ranks.over_gloo(work)


# ---------------------------------------------------------------- page tables


@later
@FEW
@given(SEEDS, st.data(), RANKS, st.sampled_from([1, 2, 16]), st.booleans())
def test_page_tables_of_a_rank(seed: int, data: st.DataObject, count: int, page: int, translated: bool) -> None:
    """``create_mla_kv_page_table_for_dcp``: one entry for each page of a rank's own keys; -1 becomes page 0."""
    lengths = data.draw(st.lists(around(count, page, count * page), min_size=1, max_size=3))
    most = max(lengths) // (page * count) + 1
    pages = philox.permutation(seed, 0, len(lengths) * most).view(len(lengths), most)
    position = torch.arange(most * page * count)
    table = pages[:, position // (page * count)] * (page * count) + position % (page * count)
    lost = data.draw(st.booleans())
    if lost:
        table[-1] = -1
    physical = philox.permutation(seed, 1, len(lengths) * most)
    physical[0] = 0
    for rank in range(count):
        local = torch.tensor([dcp.local_length(n, rank, count) for n in lengths], dtype=torch.int32)
        found = torch.full((len(lengths), most), -7, dtype=torch.int32)
        sglang_dcp_modules.kernels().create_mla_kv_page_table_for_dcp[(len(lengths), 1)](
            table.to(torch.int32),
            torch.arange(len(lengths), dtype=torch.int32),
            local,
            found,
            physical if translated else None,
            table.stride(0),
            found.stride(0),
            PHYSICAL_PAGE_SIZE=page,
            DCP_SIZE=count,
            DCP_RANK=rank,
            PAGES_PER_BLOCK=1 << most.bit_length(),
            HAS_V2P=translated,
        )
        for request, own in enumerate(local.tolist()):
            expected = pages[request, : -(-own // page)].clone()
            if lost and request == len(lengths) - 1:
                expected.zero_()
            if translated:
                expected = physical[expected]
            assert found[request].tolist() == [*expected.tolist(), *[-7] * (most - len(expected))]


@later
@FEW
@given(SEEDS, st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 3))
def test_tables_of_drafts_to_verify(seed: int, lengths: list[int], queries: int) -> None:
    """``compact_dcp_verify_token_table_to_ragged``: one run a request; an empty one keeps one slot, row 0."""
    table = philox.uniform_int(seed, 0, (len(lengths) * queries, 12), 1, 1000).to(torch.int32)
    starts = torch.tensor([0, *(max(n, 1) for n in lengths)]).cumsum(0).to(torch.int32)
    found = torch.full((int(starts[-1]),), -7, dtype=torch.int32)
    sglang_dcp_modules.kernels().compact_dcp_verify_token_table_to_ragged[(len(lengths),)](
        table, torch.tensor(lengths, dtype=torch.int32), starts, found, 12, Q_LEN=queries, BLOCK_SIZE=4
    )
    expected = [own for i, n in enumerate(lengths) for own in (table[i * queries, :n].tolist() or [0])]
    assert found.tolist() == expected


# --------------------------------------------------------------------- misuse


@FEW
@given(SEEDS, st.integers(4, 40), RANKS)
def test_misuse_slots_that_are_not_congruent_to_their_positions(seed: int, length: int, count: int) -> None:
    """Random slots break what widened slots promise: the ways to a rank's list part.

    By position a rank lists rows of slots that others own; by slot it lists fewer or more than its length says.
    """
    slots = philox.permutation(seed, 0, 4 * length)[:length]
    congruent = bool((slots % count == torch.arange(length) % count).all())
    by_slot = on_each(count, lambda _: sglang_dcp_modules.layout().filter_dcp_local_kv_indices(slots))
    rows = [found // count if LATER else found for found in by_slot]
    by_position = []
    for rank in range(count):
        local = torch.tensor([dcp.local_length(length, rank, count)])
        out = torch.empty(int(local), dtype=torch.int64)
        sglang_dcp_modules.kernels().create_triton_kv_indices_for_dcp_triton[(1,)](
            slots.to(torch.int32)[None],
            torch.zeros(1, dtype=torch.int32),
            local,
            torch.zeros(1, dtype=torch.int32),
            None,
            out,
            length,
            count,
            rank,
        )
        by_position.append(out)
        assert out.tolist() == [dcp.slot_row(int(s), count) for s in slots[rank::count]]
    agree = all(a.tolist() == b.tolist() for a, b in zip(rows, by_position, strict=True))
    assert agree == congruent
    # Every key is read once all the same, but by another rank than the one that holds it.
    assert sum(len(own) for own in rows) == sum(len(own) for own in by_position) == length


# --------------------------------------------------------------------- writes


@FEW
@given(SEEDS, st.integers(1, 40), RANKS, st.booleans())
def test_every_token_is_stored_by_its_owner_alone(seed: int, tokens: int, count: int, scaled: bool) -> None:
    """``_set_kv_buffer``: the rows, and the mask of those that are a rank's own."""
    first = seed % 5
    position = torch.arange(first, first + tokens)
    slots = philox.permutation(seed, 0, tokens + 9)[:tokens] * count + position % count
    stored: dict[int, int] = {}
    for rank in range(count):
        asked: list[tuple[Tensor, Tensor]] = []

        def keep(layer: object, loc: object, k: object, v: object, *scales: object, dcp_kv_mask: Tensor) -> None:
            asked.append((getattr(loc, "loc", loc), dcp_kv_mask))  # noqa: B023 - called within the loop

        pool = SimpleNamespace(set_kv_buffer=keep)
        backend = SimpleNamespace(dcp_size=count, dcp_rank=rank, token_to_kv_pool=pool)
        batch = SimpleNamespace(out_cache_loc=slots, positions=position, out_cache_loc_is_physical=False)
        scales = (2.0, 2.0) if scaled else (None, None)
        methods = sglang_dcp_backend.module().TritonAttnBackend
        methods._set_kv_buffer(backend, batch, None, None, None, None, *scales)
        rows, own = asked[0]
        for token in own.nonzero().flatten().tolist():
            assert token not in stored
            stored[token] = rank
            assert int(rows[token]) == dcp.slot_row(int(slots[token]), count)
    assert stored == {token: dcp.owner(int(p), count) for token, p in enumerate(position)}
