"""The index side of sglang's decode context parallel, over stepped ranks: lengths, indices, plans, gathered keys.

Judged by ``oracle.dcp`` and by plain copies. Which functions there are depends on the version that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuzz import engine as engines
from oracle import dcp, philox
from oracle.bits import bit_equal
from oracle.budget.merge import merge_bounds
from oracle.kinds import Engine, LseBase
from oracle.merge import merge_states
from oracle.rounding import round_to
from suites.targets import ranks, sglang_dcp, sglang_dcp_modules, sglang_wheel

MISSING = sglang_dcp_modules.missing(Engine.EMULATOR)
pytestmark = [pytest.mark.dcp, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

LATER = sglang_dcp_modules.later()
"""Later than 0.5.16: indices stay widened until they are read, and blocks of several positions go round."""
later = pytest.mark.skipif(not LATER, reason="this version of sglang has no such function")

RANKS = st.sampled_from([2, 3, 4, 5, 8])
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TRANSFORM_INDEX = ("kernels/ops/attention/dsa/transform_index.py",)
KV_INDICES = ("srt/layers/attention/triton_ops/kv_indices.py", "kernels/ops/attention/kv_indices.py")


@pytest.fixture(autouse=True)
def _emulator() -> None:
    engines.start(Engine.EMULATOR)


@pytest.fixture(scope="module")
def layout() -> ModuleType:
    engines.start(Engine.EMULATOR)
    return sglang_dcp_modules.layout()


@st.composite
def around(draw: st.DrawFn, *steps: int) -> int:
    """A length at a multiple of one of the steps, or one off."""
    return max(0, draw(st.sampled_from(steps)) * draw(st.integers(0, 3)) + draw(st.integers(-1, 1)))


def on_each(count: int, work: Callable[[int], Tensor]) -> list[Tensor]:
    """What each rank makes of its number, while sglang takes itself for that rank."""

    def one(rank: int, group: ranks.Group) -> Tensor:
        with sglang_dcp_modules.as_rank(group):
            return work(rank)

    return ranks.stepped([partial(one, rank) for rank in range(count)])


def owned(first: int, length: int, rank: int, count: int, interleave: int = 1) -> list[int]:
    """Positions first .. first + length - 1 of a rank."""
    return [p for p in range(first, first + length) if dcp.owner(p, count, interleave) == rank]


def widened(seed: int, length: int, count: int) -> Tensor:
    """Slots of positions 0 .. length - 1 of a request whose rows lie anywhere: each congruent to its position."""
    rows = philox.permutation(seed, 0, length // count + 5).to(torch.int64)
    position = torch.arange(length)
    return rows[position // count] * count + position % count


# ------------------------------------------------------------------- lengths


@FEW
@given(st.data(), RANKS)
def test_lengths_of_every_rank(layout: ModuleType, data: st.DataObject, count: int) -> None:
    lengths = data.draw(st.lists(around(count, 16 * count), min_size=1, max_size=4))
    for rank in range(count):
        found = layout.get_dcp_lens(torch.tensor(lengths), count, rank)
        assert found.tolist() == [dcp.local_length(n, rank, count) for n in lengths]


@FEW
@given(st.data(), RANKS)
def test_lengths_of_a_range_that_starts_later(layout: ModuleType, data: st.DataObject, count: int) -> None:
    lengths = data.draw(st.lists(around(count, 16 * count), min_size=1, max_size=4))
    first = data.draw(st.lists(st.integers(0, 3 * count), min_size=len(lengths), max_size=len(lengths)))
    for rank in range(count):
        found = layout.get_dcp_lens(torch.tensor(lengths), count, rank, torch.tensor(first))
        assert found.tolist() == [len(owned(f, n, rank, count)) for f, n in zip(first, lengths, strict=True)]


@later
@FEW
@given(st.data(), RANKS, st.sampled_from([1, 2, 3, 16]))
def test_lengths_of_interleaved_blocks(layout: ModuleType, data: st.DataObject, count: int, interleave: int) -> None:
    length = data.draw(around(interleave, interleave * count))
    first = data.draw(around(interleave, interleave * count))
    for rank in range(count):
        options = {"interleave_size": interleave}
        whole = layout.get_dcp_lens(torch.tensor([length]), count, rank, **options)
        ranged = layout.get_dcp_lens(torch.tensor([length]), count, rank, torch.tensor([first]), **options)
        assert whole.tolist() == [dcp.local_length(length, rank, count, interleave)]
        assert ranged.tolist() == [len(owned(first, length, rank, count, interleave))]


@FEW
@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), RANKS)
def test_lengths_in_place(layout: ModuleType, lengths: list[int], count: int) -> None:
    def work(rank: int) -> Tensor:
        own = torch.tensor(lengths)
        layout.update_local_kv_lens_for_dcp(own)
        return own

    for rank, found in enumerate(on_each(count, work)):
        assert found.tolist() == [dcp.local_length(n, rank, count) for n in lengths]


# ------------------------------------------------------------------- indices


def own_part(slots: Tensor, rank: int, count: int) -> list[int]:
    """What a rank lists of a request's slots: rows up to 0.5.16, then widened slots, collapsed when they are read."""
    own = [int(s) for s in slots if dcp.slot_owner(int(s), count) == rank]
    return own if LATER else [dcp.slot_row(s, count) for s in own]


@FEW
@given(st.integers(0, 2**31), st.data(), RANKS)
def test_filtered_indices(layout: ModuleType, seed: int, data: st.DataObject, count: int) -> None:
    slots = widened(seed, data.draw(around(count, 16 * count)), count)
    for rank, found in enumerate(on_each(count, lambda _: layout.filter_dcp_local_kv_indices(slots))):
        assert found.tolist() == own_part(slots, rank, count)


@pytest.mark.xfail(strict=True, reason="-1 modulo the ranks is the last rank: it lists the sentinel as its own")
def test_a_sentinel_is_no_ranks_own(layout: ModuleType) -> None:
    slots = torch.tensor([4, 5, -1, -1])
    found = on_each(2, lambda _: layout.filter_dcp_local_kv_indices(slots))
    assert [x.tolist() for x in found] == [own_part(slots[:2], rank, 2) for rank in range(2)]


@later
@FEW
@given(st.data(), RANKS, st.sampled_from([1, 2, 16]))
def test_localized_indices_keep_sentinels(layout: ModuleType, data: st.DataObject, count: int, interleave: int) -> None:
    indices = data.draw(st.lists(st.one_of(st.just(-1), st.integers(0, 5000)), min_size=1, max_size=20))

    def local(index: int, rank: int) -> int:
        mine = index >= 0 and dcp.owner(index, count, interleave) == rank
        return dcp.local_index(index, count, interleave) if mine else -1

    for rank in range(count):
        expected = [local(i, rank) for i in indices]
        asked = torch.tensor([indices], dtype=torch.int32)
        assert layout.localize_dcp_indices(asked, count, rank, interleave).tolist() == [expected]
        packed = [i for i in expected if i >= 0]
        packed += [-1] * (len(indices) - len(packed))
        assert layout.remap_dcp_sparse_indices(asked, count, rank, interleave).tolist() == [packed]


@later
@pytest.mark.xfail(strict=True, reason="indices go through float32, which has no odd integers beyond 2**24")
def test_sparse_indices_beyond_float32(layout: ModuleType) -> None:
    index = 2**24 + 1
    found = layout.remap_dcp_sparse_indices(torch.tensor([[index]]), 2, 1)
    assert found.tolist() == [[dcp.local_index(index, 2)]]


@later
@FEW
@given(st.integers(0, 2**31), st.data(), RANKS)
def test_strided_and_chunked_indices(layout: ModuleType, seed: int, data: st.DataObject, count: int) -> None:
    slots = widened(seed, data.draw(around(count, 16 * count)), count)
    for rank in range(count):
        rows = [dcp.slot_row(int(s), count) for s in slots[rank::count]]
        assert layout.maybe_dcp_kernel_indices(slots, count, rank).tolist() == rows
    # Two chunks: the second begins wherever the first ends.
    cut = data.draw(st.integers(0, len(slots)))
    starts, lengths = torch.tensor([0, cut]), torch.tensor([cut, len(slots) - cut])
    for rank, found in enumerate(
        on_each(count, lambda _: layout.filter_dcp_local_chunk_kv_indices(slots, starts, lengths))
    ):
        assert found.tolist() == own_part(slots, rank, count)


@later
@FEW
@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(1, 4), RANKS, st.sampled_from([1, 4]))
def test_lengths_of_a_speculative_chain(
    layout: ModuleType, totals: list[int], tokens: int, count: int, interleave: int
) -> None:
    seen = [max(0, n - tokens + i + 1) if n >= tokens else 0 for n in totals for i in range(tokens)]
    for rank in range(count):
        found = layout.get_dcp_chain_spec_lens(torch.tensor(totals), tokens, count, rank, interleave)
        assert found.tolist() == [dcp.local_length(n, rank, count, interleave) for n in seen]


@later
@FEW
@given(st.data(), RANKS, st.integers(1, 3), st.integers(0, 3))
def test_sparse_page_tables_keep_a_ranks_own_slots_in_order(
    data: st.DataObject, count: int, rows: int, gap: int
) -> None:
    """``transform_index_page_table_dcp``: rows of own slots, packed, then the sentinel; the table may be a view."""
    width = data.draw(st.integers(1, 40))
    slot = st.one_of(st.just(-1), st.integers(0, 2**31 - 1))
    lists = data.draw(st.lists(st.lists(slot, min_size=width, max_size=width), min_size=rows, max_size=rows))
    table = torch.full((rows, width + gap), 7, dtype=torch.int32)[:, :width]
    table.copy_(torch.tensor(lists))
    module = sglang_wheel.load(TRANSFORM_INDEX, {})
    for rank in range(count):
        found, counts = module.transform_index_page_table_dcp(table, count, rank)
        for row, own, number in zip(lists, found.tolist(), counts.tolist(), strict=True):
            expected = [dcp.slot_row(s, count) for s in row if s >= 0 and dcp.slot_owner(s, count) == rank]
            assert number == len(expected)
            assert own == expected + [-1] * (width - number)


# --------------------------------------------------------------------- plans


@settings(FEW, max_examples=10)
@given(st.integers(0, 2**31), st.data(), RANKS)
def test_plan_of_a_decode_step(seed: int, data: st.DataObject, count: int) -> None:
    lengths = data.draw(st.lists(around(count, 128 * count), min_size=1, max_size=3))
    requests = [widened(seed + i, n, count) for i, n in enumerate(lengths)]

    def work(rank: int) -> Tensor:
        kv_lens = torch.tensor(lengths, dtype=torch.int32)
        indptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        indices = torch.cat(requests).to(torch.int32)
        sglang_dcp_modules.planner().plan_dcp_decode_metadata(kv_lens, indptr, indices, False, {}, len(lengths))
        return torch.cat([kv_lens, indptr, indices[: int(indptr[-1])]])

    for rank, found in enumerate(on_each(count, work)):
        local = [dcp.local_length(n, rank, count) for n in lengths]
        ends = torch.tensor([0, *local]).cumsum(0).tolist()
        listed = [slot for request in requests for slot in own_part(request, rank, count)]
        assert found.tolist() == local + ends + listed


@settings(FEW, max_examples=10)
@given(st.integers(0, 2**31), st.data(), RANKS)
def test_plan_of_an_extend_step(seed: int, data: st.DataObject, count: int) -> None:
    # Later versions take prefixes to be whole rounds of the ranks, as their allocator makes them.
    round_ = count if LATER else 1
    prefixes = [round_ * n for n in data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))]
    news = data.draw(st.lists(st.integers(1, 20), min_size=len(prefixes), max_size=len(prefixes)))
    totals = [p + n for p, n in zip(prefixes, news, strict=True)]
    requests = [widened(seed + i, n, count) for i, n in enumerate(totals)]
    table = torch.full((len(totals), max(totals)), -1, dtype=torch.int32)
    for row, own in zip(table, requests, strict=True):
        row[: len(own)] = own
    chunked = sglang_wheel.load(KV_INDICES, {}).create_chunked_prefix_cache_kv_indices

    def work(rank: int) -> Tensor:
        plan = sglang_dcp_modules.planner().prepare_decode_context_parallel_metadata(
            torch.tensor(totals),
            torch.tensor(prefixes),
            prefixes,
            torch.tensor(news),
            torch.arange(len(totals)),
            table,
            sum(totals),
            torch.Size((100, 1, 8)),
            torch.bfloat16,
            "cpu",
            chunked,
        )
        assert tuple(plan.dcp_kv_buffer.shape) == (sum(totals), 1, 8)
        assert plan.dcp_extend_prefix_lens_sum == sum(prefixes)
        return torch.cat([plan.dcp_kv_indptr, plan.dcp_kv_indices, plan.dcp_local_prefix_kv_indices])

    gathered, before, new = [], 0, sum(prefixes)
    for p, n in zip(prefixes, news, strict=True):
        gathered += [*range(before, before + p), *range(new, new + n)]
        before, new = before + p, new + n
    for rank, found in enumerate(on_each(count, work)):
        slots = [int(s) for own, p in zip(requests, prefixes, strict=True) for s in own[:p]]
        rows = [dcp.slot_row(s, count) for s in slots if dcp.slot_owner(s, count) == rank]
        assert found.tolist() == torch.tensor([0, *totals]).cumsum(0).tolist() + gathered + rows


# ------------------------------------------------------------- gathered keys

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(FEW, max_examples=8)
@given(st.integers(0, 2**31), st.data(), RANKS)
def test_keys_are_gathered_in_the_order_of_positions(
    dtype: torch.dtype, seed: int, data: st.DataObject, count: int
) -> None:
    lengths = data.draw(st.lists(around(count, 16 * count), min_size=1, max_size=3))
    first = data.draw(st.lists(st.integers(0, 2 * count), min_size=len(lengths), max_size=len(lengths)))
    width = 6 * dtype.itemsize
    raw = philox.uniform_int(seed, 0, (sum(lengths), 1, width), 0, 256).to(torch.uint8)
    keys = raw.view(dtype)
    position = torch.tensor([p for f, n in zip(first, lengths, strict=True) for p in range(f, f + n)])

    def work(rank: int) -> Tensor:
        own = keys[position % count == rank]
        gathered: Tensor = sglang_dcp_modules.comm().all_gather_kv_cache_for_dcp(
            own[..., :4], own[..., 4:], torch.tensor(lengths), torch.tensor(first)
        )
        return gathered

    for found in on_each(count, work):
        assert bool(bit_equal(found, keys).all())


def test_a_prefix_without_starts_begins_at_the_first_rank() -> None:
    keys = torch.arange(7.0).view(7, 1, 1).repeat(1, 1, 6)

    def work(rank: int) -> Tensor:
        own = keys[rank::3]
        gathered: Tensor = sglang_dcp_modules.comm().all_gather_kv_cache_for_dcp(
            own[..., :4], own[..., 4:], torch.tensor([7])
        )
        return gathered

    assert all(torch.equal(found, keys) for found in on_each(3, work))


# ------------------------------------------------- forms of correct_attn_out


def corrected(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Every rank's output corrected, and their sum: [B, H, D], with the merged log-sum-exp."""
    outs = outs.squeeze(2) if outs.ndim == 5 else outs
    return sglang_dcp._corrected(outs, lses, None)


def states(count: int, rows: int, heads: int) -> tuple[Tensor, Tensor]:
    """Outputs [N, B, H, 16] and log-sum-exps [N, B, H]."""
    return philox.normal(3, 0, (count, rows, heads, 16)), 4 * philox.normal(3, 1, (count, rows, heads))


def assert_merged(outs: Tensor, lses: Tensor, found: tuple[Tensor, Tensor]) -> None:
    """Within the budget of the float32 kernel."""
    outs, lses = outs.double(), lses.double()
    out, lse = merge_states(outs, lses, LseBase.TWO)
    bounds = merge_bounds(outs, lses, out, lse, sglang_dcp.IN_FLOAT32, LseBase.TWO)
    assert bool(((found[0].double() - out).abs() <= bounds.out).all())
    alive = lse > -torch.inf
    assert bool(((found[1].double() - lse).abs()[alive] <= bounds.lse[alive]).all())
    assert torch.equal(found[1][~alive].double(), lse[~alive])


def test_the_assertion_notices_a_wrong_merge() -> None:
    outs, lses = (x.float() for x in states(2, 3, 4))
    out, lse = corrected(outs, lses)
    with pytest.raises(AssertionError):
        assert_merged(outs, lses, (out * 1.001, lse))
    with pytest.raises(AssertionError):
        assert_merged(outs, lses, (out, lse + 1e-3))


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other": lambda x: torch.stack([x, x + 100], -1).flatten(2)[..., ::2],
    "ranks last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "[N, B, H, 1]": lambda x: x.unsqueeze(-1),
    "[N, 1, B, H]": lambda x: x.unsqueeze(1),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_log_sum_exp(form: str) -> None:
    outs, lses = (x.float() for x in states(4, 3, 5))
    assert_merged(outs, lses, corrected(outs, FORMS[form](lses)))


@pytest.mark.parametrize("form", ["heads first", "every other", "ranks last"])
def test_a_shared_context_keeps_the_strides_of_its_first_call(form: str) -> None:
    """As the ledger says of its shape and dtypes: a stride of 1 is compiled in. A context of its own is right."""
    outs, lses = (x.float() for x in states(4, 3, 5))
    context = sglang_dcp_modules.kernels().CPTritonContext()
    for _ in range(2):
        assert_merged(outs, lses, sglang_dcp._corrected(outs, lses, context))
    found = sglang_dcp._corrected(outs, FORMS[form](lses), context)
    with pytest.raises(AssertionError):
        assert_merged(outs, lses, found)
    assert_merged(outs, lses, corrected(outs, FORMS[form](lses)))


@pytest.mark.xfail(strict=True, reason="with one head [N, 1, B, 1] loses its last axis, and B is taken for the heads")
def test_a_single_head_with_a_second_axis_of_one() -> None:
    outs, lses = (x.float() for x in states(2, 3, 1))
    assert_merged(outs, lses, corrected(outs, lses.unsqueeze(1)))


@pytest.mark.parametrize("axis", [1, 2])
def test_log_sum_exps_of_stride_0(axis: int) -> None:
    outs, lses = (x.float() for x in states(4, 3, 5))
    same = lses.narrow(axis, 0, 1).expand_as(lses)
    assert same.stride(axis) == 0
    assert_merged(outs, same.contiguous(), corrected(outs, same))


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_special_log_sum_exps_of_a_rank_read_as_empty(special: float) -> None:
    outs, lses = (x.float() for x in states(4, 3, 5))
    lses[1, 0] = special
    lses[:, 2] = special
    read = lses.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    assert_merged(outs, read, corrected(outs, lses))


# ------------------------------------------------ buffers of an all-to-all


@later
@settings(FEW, max_examples=8)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=3), st.sampled_from([torch.bfloat16, torch.float32]))
def test_buffers_of_an_all_to_all_serve_smaller_batches(rows: list[int], dtype: torch.dtype) -> None:
    """``dcp_a2a_lse_reduce`` with buffers for the largest batch: what earlier ones left there is nobody's."""
    count, heads, width = 2, 4, 16
    given_ = [states(count, n, heads) for n in rows]

    def work(rank: int, group: ranks.Group) -> Tensor:
        words = 4 // dtype.itemsize
        shape = (count, max(rows), heads // count, width + words)
        buffers = {name: torch.full(shape, torch.nan, dtype=dtype) for name in ("send_combined", "recv_combined")}
        comm, found = sglang_dcp_modules.comm(), []
        for outs, lses in given_:
            own = round_to(outs[rank].double(), dtype), lses[rank].float()
            fresh = comm.dcp_a2a_lse_reduce(*own, group)
            again = comm.dcp_a2a_lse_reduce(*own, group, cuda_graph_buffers=buffers)
            found.append(torch.stack([fresh, again]))
        return torch.cat(found, 1)

    for found in ranks.stepped([partial(work, rank) for rank in range(count)]):
        assert not found.isnan().any()
        assert torch.equal(found[0], found[1])
