"""Physical tensors: bit-identical again, poison everywhere that is not data, nothing shared."""

from __future__ import annotations

import os
import sys
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz import engine as engines
from fuzz import registry
from fuzz.buffers import DTYPES, Poison, empty_buffer, huge_buffer, pattern
from fuzz.check.run import check_case
from fuzz.instance import build
from fuzz.instance.copies import write_expected
from fuzz.instance.operands import keys_and_values
from fuzz.instance.pool import geometry, num_blocks, pages, slots_of
from fuzz.plan import Plan
from fuzz.probes import design
from fuzz.space import Space
from fuzz.strategies import cases
from oracle.bits import bits
from oracle.declare import FEATURES
from oracle.kinds import Engine, Operation, Role
from oracle.layout import read_slots
from oracle.rounding import widen
from suites.fuzz.cases import backend_case, decode_case, extend_case, gather_case, index_case, merge_case, write_case

SPACES = [Space(target, most_tokens=80) for target in registry.load().values()]


@given(data=st.data())
def test_a_case_is_rebuilt_bit_for_bit(data: st.DataObject) -> None:
    case = data.draw(cases(data.draw(st.sampled_from(SPACES))))
    first = build(case, Poison.NAN)
    forget()
    second = build(case, Poison.NAN)
    assert first.buffers.keys() == second.buffers.keys()
    for name, buffer in first.buffers.items():
        assert torch.equal(buffer.image(), second.buffers[name].image())


def forget() -> None:
    """The next build draws every value again."""
    for cached in (design, keys_and_values, slots_of):
        cached.cache_clear()


@pytest.mark.parametrize("name", ["torch.sdpa_with_lse", "sglang.triton.extend", "sglang.shuffle_5d.write"])
def test_judging_a_case_writes_to_none_of_its_values(name: str) -> None:
    """They are kept for the next build of the case."""
    engines.start(Engine.EMULATOR)
    target = registry.load()[name]
    for case in islice(Plan(Space(target, most_tokens=80), 1), 4):
        forget()
        images = {n: b.image() for n, b in build(case, Poison.POSITIVE).buffers.items()}
        check_case(target, case, Engine.EMULATOR, lambda phase: None)
        kept = {n: b.image() for n, b in build(case, Poison.POSITIVE).buffers.items()}
        assert images.keys() == kept.keys()
        assert all(torch.equal(image, kept[n]) for n, image in images.items())


@given(data=st.data())
def test_poison_changes_only_what_is_no_data(data: st.DataObject) -> None:
    case = data.draw(cases(data.draw(st.sampled_from(SPACES))))
    one, other = build(case, Poison.POSITIVE), build(case, Poison.NEGATIVE)
    for name, buffer in one.buffers.items():
        # What two poisons leave alike is data, and every element that differs holds its own poison, unless it is in
        # the pool and the probe's design says what unused slots hold under the positive one.
        a, b = buffer.storage, other.buffers[name].storage
        differ = a != b
        assert bool((b[differ] == pattern(buffer.view.dtype, Poison.NEGATIVE)).all())
        by_slot = name in ("k_cache", "v_cache", "page_table", "req_to_token") or (
            name in ("k_descale", "v_descale") and buffer.view.dim() == 3
        )
        poisoned = a[differ] == pattern(buffer.view.dtype, Poison.POSITIVE)
        assert bool(poisoned.all()) or (name in ("k_cache", "v_cache") and design(case).unused is not None)
        assert int((a[: buffer.view.storage_offset()] != pattern(buffer.view.dtype, Poison.POSITIVE)).sum()) == 0
        if not by_slot:
            assert torch.equal(bits(buffer.view), bits(other.buffers[name].view))


@given(data=st.data())
def test_no_page_is_shared_and_slots_are_distinct(data: st.DataObject) -> None:
    case = data.draw(cases(SPACES[0]))
    table = pages(case)
    assert len(set(table)) == len(table)
    assert all(0 <= page < num_blocks(case) for page in table)
    slots = slots_of(case)
    assert len(slots.unique()) == len(slots) == sum(case.context_lens)


def test_the_pool_holds_the_linear_rows_and_poison() -> None:
    case = gather_case()
    instance = build(case, Poison.NAN)
    for role, linear in instance.linear.items():
        cache = instance.buffers[f"{role.value}_cache"].view
        assert torch.equal(bits(read_slots(cache, instance.slots, geometry(case, role))), bits(linear))
        held = bits(cache).flatten()
        assert int((held == pattern(cache.dtype, Poison.NAN)).sum()) == cache.numel() - linear.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_large_or_nan(dtype: str) -> None:
    for poison in Poison:
        buffer = empty_buffer("x", (4,), DTYPES[dtype], poison, device="cpu")
        value = buffer.view[0].double() if buffer.view.is_floating_point() else None
        if value is not None:
            assert bool(value.isnan()) == (poison is Poison.NAN)
            if poison is not Poison.NAN:
                assert abs(float(value)) >= 128
                assert (float(value) < 0) == (poison is Poison.NEGATIVE)


def test_guards_lie_on_both_sides_and_positions_are_named() -> None:
    buffer = empty_buffer("x", (3, 4), torch.float32, Poison.POSITIVE, device="cpu", strides=(10, 1))
    assert buffer.view.stride() == (10, 1)
    assert buffer.view.storage_offset() > 0
    before = buffer.image()
    torch.as_strided(buffer.view, (1,), (1,), buffer.view.storage_offset() - 1).zero_()
    changed = (buffer.image() != before).nonzero().flatten()
    assert [buffer.where(int(c)) for c in changed] == [-1]


def test_a_huge_pool_touches_its_own_pages_only() -> None:
    case = gather_case(pool="huge", context_lens=[1, 1], head_dim=64, v_head_dim=64, dtype="uint8", kv_dtype="uint8")
    instance = build(case, Poison.POSITIVE)
    cache = instance.buffers["k_cache"]
    assert cache.view.numel() > 1 << 31
    assert sum(high - low for low, high in cache.watched) < 1 << 16
    assert int(instance.slots.max()) * 64 * 2 >= 1 << 31


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system promises no more memory than it has")
def test_a_huge_pool_may_be_larger_than_memory() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    blocks = 2 * memory // (1 << 14)
    buffer = huge_buffer("k_cache", (blocks, 1 << 12), torch.float32, Poison.NAN, device="cpu", blocks=[0, blocks - 1])
    assert buffer.view.numel() * 4 > memory
    assert buffer.view[[0, 1, -2, -1]].isnan().all()


def test_skipped_tokens_are_negative_and_stay_out() -> None:
    case = write_case(skip="some", context_lens=[40])
    instance = build(case, Poison.POSITIVE)
    listed = instance.buffers["slots"].view
    assert 0 < int((listed < 0).sum()) < 40
    assert instance.slots is not None
    assert torch.equal(listed, instance.slots)
    before = instance.buffers["k_cache"].image()
    write_expected(instance)
    changed = int((instance.buffers["k_cache"].image() != before).sum())
    assert changed <= int((listed >= 0).sum()) * 2 * 32


def test_a_slot_map_leads_to_the_sub_pool() -> None:
    case = write_case(slot_map="holes", context_lens=[40])
    instance = build(case, Poison.POSITIVE)
    slots, slot_map = instance.buffers["slots"].view, instance.buffers["slot_map"].view
    assert torch.equal(slot_map[slots], instance.slots)
    assert 0 < int((instance.slots < 0).sum()) < 40


def test_attention_instances_pose_their_problem() -> None:
    instance = build(extend_case(), Poison.POSITIVE)
    assert instance.problem is not None
    assert instance.problem.q_lens == (17, 2)
    assert instance.problem.scale == 32**-0.5
    assert torch.equal(instance.buffers["q_indptr"].view, torch.tensor([0, 17, 19]))


@pytest.mark.parametrize("operation", FEATURES)
def test_every_operation_that_can_be_declared_can_be_built(operation: Operation) -> None:
    makers = {
        Operation.KV_WRITE: write_case,
        Operation.KV_GATHER: gather_case,
        Operation.VARLEN_EXTEND: extend_case,
        Operation.PAGED_DECODE: decode_case,
        Operation.LSE_MERGE: merge_case,
        Operation.INDEX_BUILD: index_case,
        Operation.BACKEND: backend_case,
    }
    assert build(makers[operation](), Poison.NAN).buffers


def test_a_page_table_is_as_wide_as_needed_and_poisoned_past_each_request() -> None:
    instance = build(decode_case(index_form="page_table", index_dtype="int32"), Poison.POSITIVE)
    table = instance.buffers["page_table"].view
    assert table.shape == (2, 2)
    assert int(table[1, 1]) == pattern(torch.int32, Poison.POSITIVE)
    assert instance.buffers["lengths"].view.tolist() == [17, 3]


def test_a_pooled_prefix_holds_only_what_comes_before_the_queries() -> None:
    instance = build(extend_case(prefix="pool", pool="spare"), Poison.NAN)
    assert instance.buffers["kv_indptr"].view.tolist() == [0, 0, 1]
    assert instance.buffers["k"].view.shape[0] == 19
    assert len(instance.buffers["slots"].view) == 1
    assert instance.problem is not None
    assert instance.problem.kv_lens == (17, 3)


def test_descales_are_unequal_and_not_one() -> None:
    instance = build(decode_case(k_descale="head", v_descale="tensor", num_kv_heads=8), Poison.NAN)
    k, v = instance.buffers["k_descale"].view, instance.buffers["v_descale"].view
    assert len(k.unique()) > 1
    assert k.shape == (8,)
    assert v.shape == (1,)
    assert 1.0 not in k.tolist() + v.tolist()


def test_descales_of_tokens_lie_in_the_pool_as_their_keys_do() -> None:
    case = decode_case(
        k_descale="token", v_descale="token", kv_dtype="e4m3fn", dtype="bf16", num_kv_heads=2, pool="spare"
    )
    instance = build(case, Poison.POSITIVE)
    held, problem = instance.buffers["k_descale"].view, instance.problem
    assert problem is not None
    assert isinstance(problem.k_descale, torch.Tensor)
    slots = slots_of(case)
    own = held[slots // case.page_size, :, slots % case.page_size]
    assert torch.equal(own, problem.k_descale)
    assert len(own.unique()) > 10
    poisoned = bits(held) == pattern(torch.float32, Poison.POSITIVE)
    assert int(poisoned.sum()) == held.numel() - own.numel()


def test_descales_of_a_pool_leave_the_keys_that_are_passed_alone() -> None:
    changes = {"prefix": "pool", "pool": "spare", "dtype": "bf16", "kv_dtype": "e4m3fn"}
    case = extend_case(context_lens=[9, 4], query_lens=[2, 1], k_descale="tensor", v_descale="head", **changes)
    instance = build(case, Poison.POSITIVE)
    problem, buffers = instance.problem, instance.buffers
    assert problem is not None
    assert isinstance(problem.k_descale, torch.Tensor)
    assert (buffers["k"].view.dtype, buffers["k_cache"].view.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    passed = (problem.k_descale == 1).all(1)
    assert passed.tolist() == [False] * 7 + [True] * 2 + [False] * 3 + [True]
    assert torch.equal(problem.k[passed], buffers["k"].view.double())
    held = read_slots(buffers["k_cache"].view, slots_of(case)[~passed], geometry(case, Role.K))
    assert torch.equal(problem.k[~passed], widen(held))


def test_strided_operands_lie_apart_each_by_a_stride_of_its_own() -> None:
    for case in (write_case(strided=True), extend_case(strided=True, group_size=1)):
        strides = [b.view.stride(0) for b in build(case, Poison.POSITIVE).buffers.values() if b.view.dim() == 3]
        assert len(set(strides)) == len(strides) > 1
    close = build(write_case(), Poison.POSITIVE).buffers
    assert close["key"].view.stride() == close["value"].view.stride()
