"""A captured call is judged as the call itself is: by the same problem, the same budget and the same target."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import oracle
from fuzz.captured.call import understand
from fuzz.captured.judge import judge_here, judge_recorded, run_here
from fuzz.captured.load import RecordError, load
from fuzz.case import Case
from fuzz.check.run import values_of
from fuzz.plan import Plan
from fuzz.space import Space
from oracle.capture import CaptureError, Record, write
from suites.fuzz.captured.calls import EMULATOR, capture, given, returned, target

DECLARED = ("context_lens", "query_lens", "num_kv_heads", "group_size", "v_head_dim", "dtype", "kv_dtype", "window")
DECLARED += ("soft_cap", "causal", "sinks", "index_dtype", "prefix")
TARGETS = (
    *("planted.extend.clean", "planted.extend.key", "sglang.merge_state", "portable.shuffle_5d.decode"),
    *("sglang.triton.decode", "sglang.triton.extend", "portable.linear.extend"),
)


def cases(name: str, count: int) -> list[Case]:
    return list(islice(Plan(Space(target(name), 300, False), 2), count))


def judged_alike(name: str, tmp_path: Path, count: int) -> int:
    """Compares what a record says with what the call says; how many of the calls fail."""
    declaration, failing = target(name), 0
    for index, case in enumerate(cases(name, count)):
        run = returned(declaration, case)
        path = tmp_path / f"{index}.safetensors"
        extra = {"page_size": case.page_size} if case.kv_layout == "linear" and case.index_form == "page_table" else {}
        assert oracle.record(path, strict=True, **extra, **given(declaration, case), **run.outputs)
        captured = understand(load(path), declaration)
        merge = case.operation == "lse_merge"
        for field in DECLARED:
            if not (merge and field in ("context_lens", "index_dtype")) and field != "sinks":
                assert getattr(captured.case, field) == getattr(case, field), field
        assert (captured.case.sinks == "none") == (case.sinks == "none")
        wanted, recorded = values_of(declaration, run), judge_recorded(declaration, captured)
        here = judge_here(declaration, captured, run_here(declaration, captured, EMULATOR, lambda phase: None))
        for found in (recorded, here):
            assert (found.verdict, found.worst_ratio) == (wanted.verdict, wanted.worst_ratio)
            assert found.elements == wanted.elements
        failing += bool(wanted.failures)
    return failing


@pytest.mark.parametrize("name", TARGETS)
def test_a_record_is_judged_as_the_call_is(name: str, tmp_path: Path) -> None:
    judged_alike(name, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_records_are_judged_as_the_calls_are(name: str, tmp_path: Path) -> None:
    failing = judged_alike(name, tmp_path, 30)
    assert (failing > 0) == (name in ("planted.extend.key", "sglang.merge_state", "sglang.triton.extend"))


def decode(**changes: Any) -> Case:
    """A decode with a window over pages, of the portable target."""
    found = next(
        case
        for case in cases("portable.shuffle_5d.decode", 40)
        if len(case.context_lens) > 1 and case.kv_dtype in ("bf16", "fp16") and case.window is not None
    )
    return type(found)(**{name: getattr(found, name) for name in found.__dataclass_fields__} | changes)


def test_a_diagnosis_comes_with_a_record(tmp_path: Path) -> None:
    """What the target returns for a window one key wider is recorded as its answer."""
    name, case = "portable.shuffle_5d.decode", decode(context_lens=(40, 70), query_lens=(1, 1), window=9)
    wide = returned(target(name), decode(context_lens=(40, 70), query_lens=(1, 1), window=10)).outputs
    captured = understand(load(capture(tmp_path / "a", name, case, **wide)), target(name))
    (failure, *_) = judge_recorded(target(name), captured).failures
    assert failure.evidence["diagnosis"]["kind"] == "window"
    assert "10 keys where 9 keys are asked for" in failure.evidence["diagnosis"]["detail"]


def test_only_pages_that_are_named_are_kept(tmp_path: Path) -> None:
    name, case = "portable.shuffle_5d.decode", decode(context_lens=(40, 70), query_lens=(1, 1), pool="spare")
    whole = given(target(name), case)
    captured = load(capture(tmp_path / "a", name, case))
    used = sum(-(-n // case.page_size) for n in case.context_lens)
    assert whole["k_cache"].shape[0] > used
    assert captured.arguments["k_cache"].shape[0] <= used + 2  # poison may name a page
    assert captured.about["pool"] == whole["k_cache"].shape[0]
    result = judge_recorded(target(name), understand(captured, target(name)))
    assert not result.failures


def test_rows_lie_as_far_apart_as_they_did(tmp_path: Path) -> None:
    name = "planted.extend.clean"
    case = next(case for case in cases(name, 40) if case.strided and sum(case.query_lens) > 1)
    captured = understand(load(capture(tmp_path / "a", name, case)), target(name))
    assert captured.case.strided
    q = given(target(name), case)["q"]
    assert captured.instance.buffers["q"].view.stride() == q.stride()
    assert torch.equal(captured.instance.buffers["q"].view, q)


# ------------------------------------------------------------------- refusals


def _refusals() -> Any:
    yield {"q": torch.zeros(3, 4)}, "q: fp32 [3, 4]; allowed: [tokens heads dim]"
    yield {"q": torch.zeros(26, 4, 32, dtype=torch.int32)}, "q: int32"
    yield {"q_indptr": torch.tensor([0, 9, 25])}, "q_indptr: ends at 25; allowed: 26, the number of rows of q"
    yield {"q_indptr": torch.tensor([0, 30, 26])}, "q_indptr: allowed: 0, then integers that never fall"
    yield {"kv_indptr": torch.tensor([0, 9, 20])}, "kv_indptr: ends at 20; allowed: 26, the number of rows of k"
    yield {"k": None}, "k: missing; planted.extend.clean takes a tensor of that name"
    yield {"k": torch.zeros(26, 3, 32)}, "q: 4 heads; allowed: a multiple of the 3 of the keys"
    yield {"v": torch.zeros(25, 2, 32)}, "v: torch.float32 [25, 2, 32]; allowed: the rows, heads and dtype of k"
    yield {"out": torch.zeros(26, 4, 31)}, "out: torch.float32 [26, 4, 31]; allowed: torch.float32 [26, 4, 32]"
    yield {"out": torch.zeros(26, 4, 32).bfloat16()}, "out: torch.bfloat16 [26, 4, 32]; allowed: torch.float32"
    yield {"lse": torch.zeros(4, 26)}, "lse: torch.float32 [4, 26]; allowed: torch.float32 [26, 4]"
    yield {"out": None}, "out: missing; allowed: what the call returned"
    yield {"window": (3, 0)}, "window: (3, 0); allowed: an integer"
    yield {"window": ()}, "window: (); allowed: an integer"
    yield {"window": -7}, "window: -7; allowed: "
    yield {"scale": "big"}, "nothing"
    yield {"more": 3}, "more: unknown to planted.extend.clean; allowed: q, k, v"
    yield {"soft_cap": -1.0}, "case.soft_cap: -1.0; allowed: a number"
    yield {"sinks": torch.zeros(3)}, "sinks: 3; allowed: 4, one a query head"
    yield {"k_descale": torch.ones(3)}, "k_descale: [3]; allowed: [1], [2] or"


@pytest.mark.parametrize(
    ("changes", "said"), list(_refusals()), ids=lambda value: None if isinstance(value, dict) else ""
)
def test_what_does_not_fit_the_target_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    from suites.fuzz.cases import extend_case

    case = extend_case(context_lens=(9, 17), query_lens=(9, 17), head_dim=32, v_head_dim=32, window=5)
    declaration = target("planted.extend.clean")
    call = given(declaration, case) | returned(declaration, case).outputs | changes
    if said == "nothing":
        with pytest.raises(ValueError, match="scale: allowed are a tensor, a number"):
            oracle.record(tmp_path / "a", strict=True, **call)
        return
    outputs = {name: call.pop(name) for name in ("out", "lse")}
    write(tmp_path / "a", Record(call, {name: x for name, x in outputs.items() if x is not None}))
    with pytest.raises(RecordError) as error:
        understand(load(tmp_path / "a"), declaration)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_indices_outside_of_the_pool_are_named(tmp_path: Path) -> None:
    name, case = "portable.shuffle_5d.decode", decode(context_lens=(40, 70), query_lens=(1, 1))
    call = given(target(name), case)
    table, lengths = call["page_table"].clone(), call["lengths"].clone()
    table[1, 0], lengths[0] = 999, 10_000
    for change, said in (
        ({"page_table": table}, r"page_table\[1\]: entry 0 is 999; allowed: 0 to \d+, the pool's"),
        ({"lengths": lengths}, r"lengths\[0\]: 10000; allowed: 0 to \d+, what the page table has room for"),
    ):
        with pytest.raises(CaptureError, match=said):
            capture(tmp_path / "a", name, case, **change)
        write(tmp_path / "a", Record(call | change, {"out": call["q"]}))
        with pytest.raises(RecordError, match=said):
            understand(load(tmp_path / "a"), target(name))


def test_a_target_that_copies_has_no_records() -> None:
    record = load_nothing()
    with pytest.raises(RecordError, match="kv_gather; allowed: paged_decode, varlen_extend, lse_merge"):
        understand(record, target("planted.gather.clean"))


def load_nothing() -> Any:
    return Record({}, {})
