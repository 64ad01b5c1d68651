"""Reading back which keys were attended to: planted key sets come out exactly, ambiguous ones are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuzz.bench.launches import Remote, counted
from fuzz.buffers import Poison
from fuzz.case import Probe
from fuzz.instance import build
from fuzz.instance.pool import own_pages
from oracle.attention import solve
from oracle.diagnose.decode import Key, RowKeys, decode, lines
from oracle.diagnose.decoded import Change
from oracle.problem import Problem, ProblemError
from oracle.rounding import round_to, widen
from suites.fuzz.cases import decode_case, extend_case

CODES = (Probe.CODE, Probe.GATE, Probe.SIGNATURES, Probe.VALUE_NEEDLE)


@dataclass(frozen=True)
class Setting:
    """A problem, and what the decoder may know of the pool."""

    problem: Problem
    pages: list[list[int]]
    pool_k: Tensor
    pool_v: Tensor

    def decode(self, out: Tensor, **more: Any) -> tuple[RowKeys, ...]:
        """Decode with everything known."""
        known = {"page_size": self.pool_k.shape[1], "pages": self.pages, "pool_k": self.pool_k, "pool_v": self.pool_v}
        return decode(self.problem, out, **(known | more))


def setting(**changes: Any) -> Setting:
    """A paged decode of two requests under a code."""
    given = {
        "context_lens": [150, 70],
        "query_lens": [2, 2],
        "head_dim": 64,
        "v_head_dim": 64,
        "dtype": "bf16",
        "kv_dtype": "bf16",
        "kv_layout": "nhd",
        "sinks": "normal",
        "probe": "code",
    }
    case = decode_case(**(given | changes))
    instance = build(case, Poison.POSITIVE)
    assert instance.problem is not None
    pool_k, pool_v = (instance.buffers[f"{role}_cache"].view for role in "kv")
    return Setting(instance.problem, own_pages(case), pool_k, pool_v)


def attended(at: Setting, row: int, changes: dict[Key, int]) -> Tensor:
    """Output [Hq, D_v], float64, of a row that counts some keys so many times more than it should. Plain float64."""
    problem = at.problem
    request = next(r for r in range(problem.requests) if row < problem.q_starts[r + 1])
    length = problem.kv_lens[request]
    query = length - problem.q_lens[request] + row - problem.q_starts[request]
    times: Counter[tuple[int, int]] = Counter()
    for position in range(length):
        if position <= query and (problem.window is None or position > query - problem.window):
            times[request, position] = 1
    for own, n in changes.items():
        if own.request >= 0:
            times[own.request, own.position] += n
    stored = []
    for (r, position), n in times.items():
        at_key = problem.kv_starts[r] + position
        stored.append((widen(problem.k[at_key]), widen(problem.v[at_key]), n))
    g = at.pool_k.shape[1]
    for key, n in changes.items():
        if key.request < 0:
            stored.append((*(widen(x[key.slot // g, key.slot % g]) for x in (at.pool_k, at.pool_v)), n))
    k, v = (torch.stack([s[i] for s in stored]).repeat_interleave(problem.group, 1) for i in (0, 1))
    weights = torch.tensor([float(s[2]) for s in stored], dtype=torch.float64).log()
    logits = (widen(problem.q[row]) * k).sum(-1).T * problem.scale + weights
    if problem.sinks is not None:
        logits = torch.cat([logits, problem.sinks.double()[:, None]], 1)
    p = logits.softmax(1)[:, : len(stored)]
    return torch.einsum("hn,nhd->hd", p, v)


def returned(at: Setting, row: int, changes: dict[Key, int], heads: list[int] | None = None) -> Tensor:
    """Outputs of all rows, bf16, right but for some heads of ``row``."""
    out = round_to(solve(at.problem).out, torch.bfloat16)
    own = list(range(out.shape[1])) if heads is None else heads
    out[row, own] = round_to(attended(at, row, changes), torch.bfloat16)[own]
    return out


def key(at: Setting, request: int, position: int) -> Key:
    """A key of a request with its slot."""
    g = at.pool_k.shape[1]
    return Key(request, position, at.pages[request][position // g] * g + position % g)


def planted(decoded: tuple[RowKeys, ...]) -> dict[Key, int]:
    """What the only row that came back counted otherwise."""
    assert len(decoded) == 1
    assert decoded[0].changes is not None, lines(decoded)
    return {change.key: change.count - change.expected for change in decoded[0].changes}


SETTINGS = {probe: setting(probe=probe, pool="spare") for probe in CODES}


@pytest.mark.parametrize("probe", CODES)
def test_a_right_output_has_nothing_to_decode(probe: Probe) -> None:
    at = SETTINGS[probe]
    assert at.decode(round_to(solve(at.problem).out, torch.bfloat16)) == ()
    # The planted outputs below come from a computation that agrees with the oracle where nothing is planted.
    torch.testing.assert_close(attended(at, 1, {}), solve(at.problem).out[1], atol=1e-12, rtol=0)


@st.composite
def few_changes(draw: st.DrawFn, at: Setting) -> dict[Key, int]:
    """Up to three keys of request 0 lost or doubled, keys of request 1 and unused slots read."""
    found: dict[Key, int] = {}
    g = at.pool_k.shape[1]
    used = {own.slot for r, n in enumerate(at.problem.kv_lens) for own in (key(at, r, p) for p in range(n))}
    free = [slot for slot in range(at.pool_k.shape[0] * g) if slot not in used]
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("lost", "double", "foreign", "stale")))
        if kind == "foreign":
            found[key(at, 1, draw(st.integers(0, 69)))] = 1
        elif kind == "stale":
            found[Key(-1, -1, draw(st.sampled_from(free)))] = 1
        else:
            found[key(at, 0, draw(st.integers(0, 148)))] = -1 if kind == "lost" else 1
    return found


@settings(max_examples=40)
@given(data=st.data())
def test_planted_keys_come_out_exactly(data: st.DataObject) -> None:
    at = SETTINGS[Probe.CODE]
    changes = data.draw(few_changes(at))
    decoded = at.decode(returned(at, 1, changes), rows=[1])
    assert planted(decoded) == changes
    assert decoded[0].row == 1
    assert decoded[0].all_heads
    assert set(decoded[0].missing) == {k for k, n in changes.items() if n < 0}
    assert set(decoded[0].extra) == {k for k, n in changes.items() if n > 0}
    for change in decoded[0].changes or ():
        assert abs(change.weight - change.count) < 0.25


@settings(max_examples=20)
@given(probe=st.sampled_from(CODES), data=st.data())
def test_every_code_gives_back_the_truth_or_refuses(probe: Probe, data: st.DataObject) -> None:
    """A single key: closed gates and unnamed keys cannot be told from each other, and are never misnamed."""
    at = SETTINGS[probe]
    changes = {key(at, 0, data.draw(st.integers(0, 148))): -1}
    decoded = at.decode(returned(at, 0, changes), rows=[0])
    if not decoded:
        out = round_to(solve(at.problem).out, torch.bfloat16)
        assert float((attended(at, 0, changes) - widen(out[0])).abs().max()) < 0.02
        return
    for row in decoded:
        if row.changes is not None:
            assert {c.key: c.count - c.expected for c in row.changes} == changes


def test_what_lies_on_a_gpu_is_decoded_on_the_cpu() -> None:
    given = setting(context_lens=[60, 30], sinks="none")
    problem = given.problem
    out = round_to(solve(problem).out, torch.bfloat16)
    out[0] = out[0].roll(1, 0)
    expected = given.decode(out)
    assert expected
    with counted():
        names = ("q", "k", "v")
        there = replace(problem, **{name: Remote.of(getattr(problem, name)) for name in names})
        pools = {f"pool_{x}": Remote.of(getattr(given, f"pool_{x}")) for x in "kv"}
        assert (
            replace(given, problem=there).decode(Remote.of(out), noise=Remote.of(out.double() * 0), **pools) == expected
        )
        with pytest.raises(RuntimeError, match="on the device and on the CPU"):
            torch.cat([there.q, problem.q])


def test_a_gate_names_the_key_that_one_head_lost() -> None:
    at = SETTINGS[Probe.GATE]
    decoded = at.decode(returned(at, 0, {key(at, 0, 148): -1}, heads=[3]))
    assert [(row.row, row.heads, row.all_heads) for row in decoded] == [(0, (3,), False)]
    assert lines(decoded) == ["row 0, head 3 misses key 148"]


def test_a_code_at_8k_names_the_key() -> None:
    at = setting(context_lens=[8187], query_lens=[2], window=8000)
    assert lines(at.decode(returned(at, 0, {key(at, 0, 255): -1}))) == ["row 0 misses key 255"]
    edge = 8186 - 8000
    assert lines(at.decode(returned(at, 1, {key(at, 0, edge): 1}))) == [
        f"row 1 counts key {edge}, which it may not see"
    ]


def page_keys(at: Setting, request: int, number: int) -> list[Key]:
    """Keys of one whole page of a request."""
    g = at.pool_k.shape[1]
    return [key(at, request, p) for p in range(number * g, (number + 1) * g)]


def test_a_page_read_in_place_of_another_is_named() -> None:
    at = SETTINGS[Probe.CODE]
    lost, read = page_keys(at, 0, 7), page_keys(at, 1, 2)
    changes = dict.fromkeys(lost, -1) | dict.fromkeys(read, 1)
    decoded = at.decode(returned(at, 0, changes))
    assert planted(decoded) == changes
    right, wrong = at.pages[0][7], at.pages[1][2]
    assert lines(decoded, 16) == [f"row 0: page {wrong} read where page {right} belongs"]
    assert lines(decode(at.problem, returned(at, 0, changes), page_size=16), 16) == [
        "row 0: page 2 of request 1 read where page 7 of request 0 belongs"
    ]


def test_a_stale_page_read_in_place_of_another_is_named() -> None:
    at = SETTINGS[Probe.CODE]
    free = next(p for p in range(at.pool_k.shape[0]) if p not in at.pages[0] + at.pages[1])
    stale = [Key(-1, -1, free * 16 + i) for i in range(16)]
    changes = dict.fromkeys(page_keys(at, 0, 3), -1) | dict.fromkeys(stale, 1)
    decoded = at.decode(returned(at, 1, changes))
    assert lines(decoded, 16) == [f"row 1: page {free} read where page {at.pages[0][3]} belongs"]


def test_a_shifted_window_is_a_run_of_keys() -> None:
    at = setting(window=100)
    first = 149 - 100 + 1
    lost = {key(at, 0, first + i): -1 for i in range(12)}
    assert lines(at.decode(returned(at, 1, lost))) == [f"row 1 misses keys {first} to {first + 11}"]
    more = {key(at, 0, first - 1 - i): 1 for i in range(9)}
    assert lines(at.decode(returned(at, 1, more))) == [
        f"row 1 counts keys {first - 9} to {first - 1}, which it may not see"
    ]


def test_doubles_foreign_keys_and_slots_are_worded() -> None:
    at = SETTINGS[Probe.CODE]
    assert lines(at.decode(returned(at, 0, {key(at, 0, 9): 1}))) == ["row 0 counts key 9 twice"]
    assert lines(at.decode(returned(at, 0, {key(at, 1, 4): 1}))) == ["row 0 counts key 4 of request 1"]
    slot = key(at, 1, 69).slot + 1
    assert lines(at.decode(returned(at, 2, {Key(-1, -1, slot): 1}))) == [f"row 2 counts unused slot {slot}"]


def test_equal_values_are_refused() -> None:
    """Two keys of one value: which of them is missing cannot be told."""
    at = setting(probe="constant_v")
    decoded = at.decode(returned(at, 0, {key(at, 0, 9): -1}))
    assert all(row.changes is None for row in decoded)
    twins = setting(probe="code")
    twins.problem.v[20] = twins.problem.v[40]
    decoded = decode(twins.problem, returned(twins, 0, {key(twins, 0, 20): -1}))
    assert [row.changes for row in decoded] == [None] * len(decoded)
    assert decoded
    assert lines(decoded)[0].endswith("what it attended to cannot be told")


def test_what_no_key_set_explains_is_refused() -> None:
    at = SETTINGS[Probe.CODE]
    out = round_to(solve(at.problem).out, torch.bfloat16)
    out[0] = round_to(widen(out[0]) * 1.5 + 0.01, torch.bfloat16)
    assert all(row.changes is None for row in at.decode(out))
    out[0, 0, 0] = float("nan")
    assert all(row.changes is None for row in at.decode(out))


def test_rows_without_keys_are_passed_over() -> None:
    case = extend_case(context_lens=[3], query_lens=[5], probe="code", dtype="bf16", kv_dtype="bf16", v_head_dim=64)
    problem = build(case, Poison.POSITIVE).problem
    assert problem is not None
    out = round_to(solve(problem).out, torch.bfloat16)
    out[:2] = 7.0
    assert decode(problem, out) == ()


def test_a_problem_that_leaves_keys_out_is_refused() -> None:
    at = SETTINGS[Probe.CODE]
    part = at.problem.subset(torch.arange(at.problem.k.shape[0]) % 2 == 0)
    with pytest.raises(ProblemError, match="kv_positions"):
        decode(part, round_to(solve(part).out, torch.bfloat16))


def test_descales_and_noise_are_taken_into_account() -> None:
    at = setting(k_descale="head", v_descale="head", num_kv_heads=2)
    factors = at.problem.v_descale
    assert isinstance(factors, Tensor)
    out = round_to(solve(at.problem).out, torch.bfloat16)
    plain = attended(at, 0, {key(at, 0, 33): -1})
    out[0] = round_to(plain * factors[0].double().repeat_interleave(2)[:, None], torch.bfloat16)
    assert lines(at.decode(out)) == ["row 0 misses key 33"]
    assert at.decode(out, noise=1.0) == ()


def in_order(*heads: tuple[int, ...]) -> list[RowKeys]:
    """Six keys over pages 3, 1, 4 of two slots, of which pages 0, 1, 2 are read."""
    lost = [Change(Key(0, position, slot), 0, 1, 0.0) for position, slot in ((0, 6), (1, 7), (4, 8), (5, 9))]
    more = [Change(Key(-1, -1, slot), 1, 0, 1.0) for slot in (0, 1, 4, 5)]
    return [RowKeys(0, 0, own, False, (*lost, *more)) for own in heads]


def test_pages_that_are_read_in_order_are_said_first() -> None:
    first = "the pool's pages 0, 1, ... are read in order: the page table is not followed"
    decoded = in_order((0, 1))
    assert lines(decoded, 2, [[3, 1, 4]])[0] == first
    assert first not in lines(decoded, 2, [[3, 0, 4]])
    assert first not in lines(decoded, 2, [[3, 4]])
    assert first not in lines(decoded, 2)


def test_heads_that_counted_the_same_share_a_line() -> None:
    assert {line.split(":")[0] for line in lines(in_order((0, 1), (2, 3)), 2)} == {"row 0, heads 0 to 3"}
    apart = {line.split(":")[0] for line in lines(in_order((0, 1), (4, 5)), 2)}
    assert apart == {"row 0, heads 0 to 1", "row 0, heads 4 to 5"}
