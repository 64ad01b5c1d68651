"""What `oracle.record` refuses `attn-oracle check` cannot read, and it refuses all that shows without the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import oracle
from fuzz import registry
from fuzz.buffers import Poison
from fuzz.call import expected_outputs
from fuzz.captured.call import OPERATIONS, understand
from fuzz.captured.load import RecordError, load
from fuzz.instance import build
from fuzz.plan import Plan
from fuzz.space import Space
from oracle.capturable import complaint
from oracle.capture import CaptureError, Record, trimmed, write
from oracle.convention import Window, WindowMeaning
from oracle.declare import Declaration, parameters
from oracle.kinds import KVLayout
from suites.fuzz.captured.calls import given, target

Call = dict[str, Any]
OUTPUTS = ("out", "lse")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode(cache: tuple[int, ...], v_cache: tuple[int, ...] | None = None) -> Call:
    """Two requests over four pages of 16 tokens, of two heads."""
    made = {"q": drawn(2, 4, 32), "k_cache": drawn(*cache), "v_cache": drawn(*(v_cache or cache)), "scale": 0.25}
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    return made | {"page_table": table, "lengths": integers(20, 30), "window": 3, "sinks": None, "out": drawn(2, 4, 32)}


def extend(**more: Any) -> Call:
    made = {"q": drawn(6, 4, 32), "k": drawn(6, 2, 32), "v": drawn(6, 2, 16), "out": drawn(6, 4, 16)}
    return made | {"q_indptr": integers(0, 2, 6), "kv_indptr": integers(0, 2, 6), "causal": True} | more


def of_layout(layout: KVLayout) -> Declaration:
    own = target("portable.shuffle_5d.decode")
    window = Window(meaning=WindowMeaning.KEYS, off=(0, -1))
    return replace(own, convention=replace(own.convention, kv_layout=layout, window=window))


POOL = {"k_cache": drawn(64, 2, 32), "v_cache": drawn(64, 2, 16), "slots": integers(5, 9, 63)}
CALLS: dict[str, tuple[Declaration, Call]] = {
    "nhd": (of_layout(KVLayout.NHD), decode((4, 16, 2, 32))),
    "hnd": (of_layout(KVLayout.HND), decode((4, 2, 16, 32))),
    "shuffle_5d": (of_layout(KVLayout.SHUFFLE_5D), decode((4, 2, 8, 16, 4), (4, 2, 4, 32, 4))),
    "linear": (of_layout(KVLayout.LINEAR), decode((64, 2, 32)) | {"page_size": 16}),
    "extend": (target("torch.sdpa"), extend()),
    "prefix": (target("sglang.triton.extend"), extend(kv_indptr=integers(0, 1, 3), scale=0.25) | POOL),
    "merge": (
        target("sglang.merge_state"),
        {"outs": drawn(2, 6, 4, 32), "lses": drawn(2, 6, 4), "out": drawn(6, 4, 32)},
    ),
}
SCALARS = (None, -3, -1, 0, 3, 2.5, -2.5, 1e7, float("nan"), True, (3, 0), (1, 2, 3), torch.tensor(float("nan")))


def odd_values(name: str, value: Any) -> Iterator[Any]:
    """Things to put in place of an argument, right and wrong ones."""
    yield from SCALARS
    yield from (drawn(1), drawn(2), drawn(3), drawn(4), drawn(4, dtype=torch.bfloat16), drawn(4, 2, 16))
    yield integers(0, 2, 6).long()
    if not isinstance(value, torch.Tensor):
        return
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.int64):
        yield value.to(dtype)
    for axis, size in enumerate(value.shape):
        yield value.narrow(axis, 0, size - 1)
        yield torch.cat([value, value], axis)
        yield value.flip(axis)
    yield value.unsqueeze(0)
    if not value.is_floating_point():
        yield from (value + 1, value - 1, value * 100)


def fields() -> Iterator[tuple[str, str]]:
    """The arguments of each call, and the options that it could have."""
    for name, (declaration, call) in CALLS.items():
        own = parameters(declaration.operation, declaration.convention)
        page = ("page_size",) if "k_cache" in call else ()
        yield from ((name, field) for field in (*own, *page))


def only_the_target_knows(field: str, said: str) -> bool:
    """Whether what `check` says of a call is of its target's layout, window, default scale or results."""
    return field in ("window", "k_cache", "v_cache") or said.startswith(("out: ", "lse: ", "scale: missing"))


@pytest.mark.parametrize("name", CALLS)
def test_a_right_call_is_taken_and_read(name: str, tmp_path: Path) -> None:
    declaration, call = CALLS[name]
    assert oracle.record(tmp_path / "a", strict=True, **call)
    understand(load(tmp_path / "a"), declaration)


@pytest.mark.parametrize(("name", "field"), list(fields()))
def test_record_and_check_refuse_the_same(name: str, field: str, tmp_path: Path) -> None:
    declaration, right = CALLS[name]
    refused = 0
    for value in odd_values(field, right.get(field)):
        call = right | {field: value}
        outputs = {key: call[key] for key in OUTPUTS if key in call}
        whole = Record({key: x for key, x in call.items() if key not in OUTPUTS}, outputs)
        said, heard = "", ""
        try:
            oracle.record(tmp_path / "a", strict=True, **call)
        except CaptureError as error:
            said = str(error)
        try:
            write(tmp_path / "a", trimmed(whole))
            understand(load(tmp_path / "a"), declaration)
        except (CaptureError, RecordError) as error:
            heard = str(error)
        assert "\n" not in said
        if said:
            assert heard, (said, value)
            refused += 1
        else:
            assert not heard or only_the_target_knows(field, heard), (heard, value)
    assert refused


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_no_call_that_a_target_declares_is_refused(count: int) -> None:
    declared = [d for d in registry.load().values() if d.operation in OPERATIONS and not d.convention.keys_in_pool]
    assert len(declared) > 20
    for declaration in declared:
        for case in islice(Plan(Space(declaration, 300), 4), count):
            call = given(declaration, case)
            if case.kv_layout == "linear" and case.index_form == "page_table":
                call["page_size"] = case.page_size
            expected = expected_outputs(build(case, Poison.POSITIVE, "cpu"), declaration)
            outputs = {
                name: torch.zeros(shape, dtype=dtype or torch.float32) for name, (shape, dtype) in expected.items()
            }
            assert complaint(call, outputs) is None, (declaration.name, case)
