"""`oracle.record`: one line in a production process, which it neither ends nor changes."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import oracle
from fuzz.captured.load import load
from oracle.bits import bits
from oracle.capture import DTYPES, CaptureError, Record, trimmed, write


def call(**changes: Any) -> dict[str, Any]:
    """A decode of two requests over a pool of nine pages, of which four are named."""
    made = {
        "q": torch.randn(2, 4, 8),
        "k_cache": torch.randn(9, 16, 2, 8),
        "v_cache": torch.randn(9, 16, 2, 8),
        "page_table": torch.tensor([[7, 2, -1], [4, 8, 400]], dtype=torch.int32),
        "lengths": torch.tensor([20, 30], dtype=torch.int32),
        "scale": 0.25,
        "window": (3, 0),
        "sinks": None,
        "out": torch.randn(2, 4, 8),
    }
    return {name: value for name, value in (made | changes).items() if value is not _LEFT_OUT}


def test_a_prefill_and_a_merge_are_taken(tmp_path: Path) -> None:
    assert oracle.record(tmp_path / "a", strict=True, **call(**_extend(causal=True, lse=torch.randn(4, 6))))
    outs, lses = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)
    assert oracle.record(tmp_path / "b", strict=True, outs=outs, lses=lses, out=outs[0], lse=lses[0])
    with pytest.raises(CaptureError, match="lses: "):
        oracle.record(tmp_path / "c", strict=True, outs=outs, lses=lses[:2], out=outs[0])


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    given = call()
    assert oracle.record(tmp_path / "a", **given)
    found = load(tmp_path / "a")
    assert torch.equal(found.arguments["q"], given["q"])
    assert torch.equal(found.outputs["out"], given["out"])
    assert {name: found.arguments[name] for name in ("scale", "window", "sinks")} == {
        "scale": 0.25,
        "window": (3, 0),
        "sinks": None,
    }
    assert found.about["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 2**32))
def test_every_bit_of_every_dtype_is_kept(
    tmp_path_factory: pytest.TempPathFactory, name: str, shape: list[int], seed: int
) -> None:
    dtype = DTYPES[name]
    raw = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    value = raw.view(dtype).squeeze(-1) if shape else raw.view(dtype)[0]
    path = tmp_path_factory.mktemp("record") / "a"
    write(path, Record({"x": value}, {}))
    found = load(path).arguments["x"]
    assert found.dtype == dtype
    assert found.shape == value.shape
    assert torch.equal(bits(found), bits(value))


def test_pages_that_nobody_names_are_left_out_and_the_table_still_holds() -> None:
    given = call()
    made = trimmed(Record({name: value for name, value in given.items() if name != "out"}, {}))
    assert made.arguments["k_cache"].shape[0] == 4
    assert made.arguments["page_table"].tolist() == [[2, 0, -1], [1, 3, 400]]
    assert made.about["kept"] == [2, 4, 7, 8]
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        before = given["k_cache"][given["page_table"][row, column]]
        assert torch.equal(made.arguments["k_cache"][made.arguments["page_table"][row, column]], before)


@pytest.mark.parametrize("named", [[3, 1], [3, 1, -1], [0]])
def test_a_page_table_names_pages_of_a_pool_of_slots(named: list[int]) -> None:
    cache, factors = torch.randn(64, 2, 8), torch.randn(4, 2, 16)
    given = {"k_cache": cache, "v_cache": cache, "k_descale": factors, "page_table": torch.tensor([named])}
    made = trimmed(Record(given | {"page_size": 16}, {})).arguments
    pages, used = cache.unflatten(0, (4, 16)), [page for page in named if page >= 0]
    places = made["page_table"][0, : len(used)]
    assert made["k_cache"].shape == (16 * len(used), 2, 8)
    assert torch.equal(made["k_cache"].unflatten(0, (-1, 16))[places], pages[used])
    assert torch.equal(made["k_descale"][places], factors[used])


def test_slots_of_a_pool_without_pages_are_left_out() -> None:
    cache = torch.randn(50, 2, 8)
    made = trimmed(Record({"k_cache": cache, "v_cache": cache, "slots": torch.tensor([40, 3, 11])}, {}))
    assert made.arguments["k_cache"].shape[0] == 3
    assert torch.equal(made.arguments["k_cache"][made.arguments["slots"]], cache[[40, 3, 11]])


def test_slots_of_pages_of_unknown_size_stay() -> None:
    cache = torch.randn(5, 16, 2, 8)
    record = Record({"k_cache": cache, "v_cache": cache, "slots": torch.tensor([40, 3, 11])}, {})
    assert trimmed(record) is record


def test_tensors_that_share_memory_or_have_gaps_are_written(tmp_path: Path) -> None:
    both = torch.randn(6, 3, 2, 8)
    starts = torch.tensor([0, 6])
    call = {"q": both[:, 0], "k": both[:, 1], "v": both[:, 1], "q_indptr": starts, "kv_indptr": starts}
    assert oracle.record(tmp_path / "a", strict=True, out=both[:, 2], **call)
    assert torch.equal(load(tmp_path / "a").arguments["v"], both[:, 1])


def _wrong() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"q": object()}, "q: allowed are a tensor, a number"
    yield {"window": (3, 0.5)}, "window: allowed are"
    yield {"q": torch.zeros(3, dtype=torch.complex64)}, "q: allowed are fp32"
    yield {"q": torch.zeros(3, 3).to_sparse()}, "q: allowed are fp32"
    yield {"most_bytes": 100}, "most_bytes: the call has"
    yield {"out": None}, "out: missing; allowed: what the call returned"
    yield {"windows": 3}, "windows: unknown; allowed: causal, k, k_cache"
    yield {"causal": True}, "causal: not among the arguments of one operation; allowed: q, k_cache"
    yield {"lengths": None}, "lengths: missing; allowed: a tensor, beside q, k_cache, v_cache, page_table, lengths"
    yield {"lengths": torch.tensor([20, -1])}, "lengths: a negative one"
    yield {"lengths": torch.tensor([20])}, "lengths of 1 requests, page_table of 2 requests; allowed: as many in each"
    yield {"out": torch.randn(1, 4, 8)}, "out: torch.float32 [1, 4, 8]; allowed: floats [2, 4, 8]"
    yield {"lse": torch.randn(2, 3)}, "lse: torch.float32 [2, 3]; allowed: floats [2, 4] or [4, 2]"
    yield {"q": torch.ones(2, 4, 8, dtype=torch.int32)}, "q: torch.int32; allowed: a float dtype"
    yield {"q": torch.randn(3, 4, 8), "out": torch.randn(3, 4, 8)}, "q: 3 rows for 2 requests"
    yield {"scale": float("nan")}, "scale: nan; allowed: a finite number"
    yield {"out": 3}, "out: 3; allowed: a tensor"
    yield {"lse": 2.5}, "lse: 2.5; allowed: a tensor"
    yield {"window": -3}, "window: -3; allowed: None, an integer from -1, or a pair of them"
    yield {"window": (3, -2)}, "window: (3, -2); allowed: None, an integer from -1"
    yield {"window": 2.5}, "window: 2.5; allowed: None, an integer from -1"
    yield {"soft_cap": -1.0}, "soft_cap: -1.0; allowed: None or 0, or a number from 0.001 to 1e+06"
    yield {"scale": True}, "scale: True; allowed: None, or a number from -1000 to 1000"
    yield {"scale": torch.tensor(torch.nan)}, "scale: nan; allowed: None, or a number"
    yield {"sinks": torch.zeros(2)}, "sinks: torch.float32 [2]; allowed: None or floats [4], one a query head"
    yield {"k_descale": torch.zeros(3)}, "k_descale: [3]; allowed: [1], [2] or, of a pool, [pages, 2, page size]"
    yield {"k_descale": torch.ones(1).double()}, "k_descale: "
    yield {"page_table": torch.zeros(2, 3)}, "page_table: torch.float32 [2, 3]; allowed: int32 or int64, 2 axes"
    yield {"page_table": torch.full((2, 3), 9)}, "page_table[0]: entry 0 is 9; allowed: 0 to 8, the pool's"
    yield {"lengths": torch.tensor([20, 300])}, "lengths[1]: 300; allowed: 0 to 48, what the page table has room for"
    yield {"v_cache": torch.randn(9, 16, 4, 8)}, "v_cache: torch.float32 [9, 16, 4, 8]; allowed: as many pages, heads"
    yield {"v_cache": torch.randn(9, 16, 2, 8).half()}, "of its dtype"
    yield {"k_cache": torch.randn(9, 16, 2, 6)}, "k_cache: 6 dimensions; allowed: 8, those of q"
    yield (
        _extend(k=torch.randn(6, 1, 8), v=torch.randn(6, 2, 8)),
        "v: torch.float32 [6, 2, 8]; allowed: the rows, heads",
    )
    yield _extend(v=torch.randn(6, 4, 8).half()), "v: torch.float16 [6, 4, 8]; allowed: the rows, heads and dtype of k"
    yield (
        _extend(k=torch.randn(6, 3, 8), v=torch.randn(6, 3, 8)),
        "q: 4 heads; allowed: a multiple of the 3 of the keys",
    )
    yield _extend(k=torch.randn(6, 4, 6)), "k: 6 dimensions; allowed: 8, those of q"
    yield _extend(causal=None), "causal: None; allowed: True or False"
    yield _extend(q_descale=2.0), "q_descale: 2.0; allowed: None"
    yield _extend(kv_indptr=torch.tensor([0, 4, 9])), "kv_indptr: ends at 9; allowed: 6, the rows of k"
    yield _extend(q_indptr=torch.tensor([0, 7, 6])), "q_indptr: allowed: 0, then integers that never fall"
    yield _extend(kv_indptr=torch.tensor([0, 6])), "q_indptr of 2 requests, kv_indptr of 1 requests"


def _extend(**changes: Any) -> dict[str, Any]:
    """A prefill of two requests instead of the decode."""
    rows, starts = torch.randn(6, 4, 8), torch.tensor([0, 2, 6])
    made = {"q": rows, "k": rows, "v": rows, "q_indptr": starts, "kv_indptr": starts, "out": rows}
    return dict.fromkeys(("k_cache", "v_cache", "page_table", "lengths"), _LEFT_OUT) | made | changes


_LEFT_OUT = object()


@pytest.mark.parametrize(("changes", "said"), list(_wrong()))
def test_production_goes_on_whatever_goes_wrong(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "attn_oracle"):
        assert oracle.record(tmp_path / "a", **call(**changes)) is False
    assert len(caplog.records) == 1
    assert said in caplog.text
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CaptureError, match=re.escape(said)):
        oracle.record(tmp_path / "a", strict=True, **call(**changes))


def test_a_folder_that_is_not_there_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert oracle.record(tmp_path / "no" / "such" / "a", **call()) is False
    assert "nothing captured in" in caplog.text


def test_a_failure_leaves_an_earlier_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert oracle.record(tmp_path / "a", **call())
    before = (tmp_path / "a").read_bytes()

    def full(stored: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert oracle.record(tmp_path / "a", **call()) is False
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_tensors_of_the_process_are_not_changed(tmp_path: Path) -> None:
    given = call()
    before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    assert oracle.record(tmp_path / "a", **given)
    assert all(torch.equal(given[name], value) for name, value in before.items())


def test_a_file_holds_data_and_no_code(tmp_path: Path) -> None:
    assert oracle.record(tmp_path / "a", **call())
    with safe_open(tmp_path / "a", "np") as file:
        assert json.loads(file.metadata()["attn_oracle"])["schema"] == 1
        assert "in.q" in file.keys()  # noqa: SIM118 - it is no mapping


def test_the_library_is_loaded_by_the_first_capture_alone(tmp_path: Path) -> None:
    script = (
        "import sys, torch, oracle; oracle.record; loaded = 'safetensors' in sys.modules; "
        "outs, lses = torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1); "
        f"oracle.record({str(tmp_path / 'a')!r}, outs=outs, lses=lses, out=outs[0], strict=True); "
        "print(loaded, 'safetensors' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
