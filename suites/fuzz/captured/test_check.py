"""`attn-oracle check` on captured calls: what it says, how small it makes them, how it refuses bad files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz.captured.load import load
from fuzz.case import Case
from fuzz.cli import main
from suites.fuzz.captured.calls import capture, given, returned, target
from suites.fuzz.captured.test_judged import decode
from suites.fuzz.cases import extend_case

OPTIONS = ["--targets", "suites.fuzz.planted", "--engine", "emulator"]
KEY = "planted.extend.key"
PORTABLE = "portable.shuffle_5d.decode"


def extend(**changes: Any) -> Case:
    shapes = {"context_lens": (9, 17), "query_lens": (9, 17), "head_dim": 32, "v_head_dim": 32, "probe": "code"}
    return extend_case(**(shapes | changes))


def check(path: Path, name: str, *more: str) -> int:
    return main(["check", str(path), "--target", name, *OPTIONS, *more])


def test_a_fault_is_found_in_the_record_and_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = capture(tmp_path / "a", KEY, extend())
    assert check(path, KEY, "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["recorded"]["verdict"], data["here"]["verdict"]) == ("fail", "fail")
    assert data["case"]["context_lens"] == [9, 17]
    (values,) = [c for c in data["recorded"]["checks"] if c["check"] == "values"]
    assert values["evidence"]["diagnosis"]["kind"]
    assert values["evidence"]["keys"]


def test_a_right_call_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = capture(tmp_path / "a", "planted.extend.clean", extend())
    assert check(path, "planted.extend.clean") == 0
    assert "what was recorded: pass" in capsys.readouterr().out


@pytest.mark.slow
def test_what_fails_there_alone_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = returned(target("planted.extend.clean"), extend()).outputs["out"].clone()
    out[3, 1] += 1
    path = capture(tmp_path / "a", "planted.extend.clean", extend(), out=out)
    assert check(path, "planted.extend.clean") == 1
    said = capsys.readouterr().out
    assert "what was recorded: fail" in said
    assert "the same arguments give a right result here" in said


def nan_in(rows: slice) -> torch.Tensor:
    q = given(target("planted.extend.clean"), extend())["q"].clone()
    q[rows] = torch.nan
    return q


def test_what_nan_reaches_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rest is: with a wrong row beside it the record fails, with that row alone."""
    name = "planted.extend.clean"
    out = returned(target(name), extend()).outputs["out"].clone()
    out[3] = 0.93
    path = capture(tmp_path / "a", name, extend(), q=nan_in(slice(3, 4)), out=out)
    assert check(path, name) == 0
    said = capsys.readouterr().out
    assert "q is NaN in row 3: no number is right in 4 of 104 rows" in said
    assert "what was recorded: pass" in said
    out[20] += 1
    path = capture(tmp_path / "a", name, extend(), q=nan_in(slice(3, 4)), out=out)
    assert check(path, name, "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["unjudged"].startswith("q is NaN in row 3")
    (values,) = [c for c in data["recorded"]["checks"] if c["check"] == "values"]
    assert "in 4 rows beyond" in values["message"]


def test_where_nothing_can_be_judged_is_125_and_no_result_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "planted.extend.clean"
    path = capture(tmp_path / "a", name, extend(), q=nan_in(slice(None)), out=torch.full((26, 4, 32), 0.93))
    assert check(path, name) == 125
    captured = capsys.readouterr()
    assert "right result" not in captured.out
    assert "nothing was judged: q is NaN in rows 0, 1, 2, 3, ...: no number is right in 104 of 104" in captured.err


def test_a_record_without_a_query_is_125(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, none = "planted.extend.clean", torch.zeros(1, dtype=torch.int32)
    rows = {n: torch.zeros(0, h, 32) for n, h in (("q", 4), ("k", 2), ("v", 2), ("out", 4))}
    more = {"q_indptr": none, "kv_indptr": none, "lse": torch.zeros(0, 4)}
    assert check(capture(tmp_path / "a", name, extend(), **rows, **more), name) == 125
    captured = capsys.readouterr()
    assert "what was recorded: unsupported: it has no query, and nothing to judge" in captured.out
    assert "nothing was judged: it has no query" in captured.err


@pytest.mark.slow
def test_a_target_that_cannot_run_here_is_judged_by_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = capture(tmp_path / "a", KEY, extend())
    monkeypatch.setattr("fuzz.registry.why_not", lambda declaration, engine: "it needs a GPU")
    assert check(path, KEY, "--json", "--shrink", str(tmp_path / "b")) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["here"], data["not_here"], data["recorded"]["verdict"]) == (None, "it needs a GPU", "fail")
    assert len(data["shrunk"]["case"]["context_lens"]) == 1


def test_a_target_that_dies_is_a_crash_and_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The worker that calls it goes down alone; what was recorded is judged all the same."""
    path = capture(tmp_path / "a", "planted.extend.clean", extend())
    module = tmp_path / "dies.py"
    module.write_text(
        "import os, signal\n"
        "from dataclasses import replace\n"
        "from oracle import declare\n"
        "from suites.fuzz.planted import ATTENTION, EXTENDS, FLOAT64\n"
        "@declare.varlen_extend(name='dies', convention=ATTENTION, precision=FLOAT64, supports=EXTENDS)\n"
        "def dies(q, k, v, q_indptr, kv_indptr, **_):\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    assert (
        main(["check", str(path), "--target", "dies", "--targets", str(module), "--engine", "emulator", "--json"]) == 1
    )
    data = json.loads(capsys.readouterr().out)
    assert (data["recorded"]["verdict"], data["here"]["verdict"]) == ("pass", "crash")


# -------------------------------------------------------------------- shrink


@pytest.mark.slow
def test_the_smallest_part_that_fails_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One request; of it, the first two queries: the planted target drops a key where there are two."""
    path = capture(tmp_path / "a", KEY, extend(context_lens=(30, 9, 17), query_lens=(30, 9, 17)))
    assert check(path, KEY, "--shrink", str(tmp_path / "b"), "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["shrunk"]["case"]["context_lens"], data["shrunk"]["case"]["query_lens"]) == ([2], [2])
    assert load(tmp_path / "b").arguments["q"].shape[0] == 2
    assert check(tmp_path / "b", KEY) == 1


@pytest.mark.slow
def test_a_decode_that_fails_here_is_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded window is one too many for the kernel: any context with one key beyond the window shows it."""
    module = tmp_path / "wide.py"
    module.write_text(
        "from dataclasses import replace\n"
        "from oracle import declare\n"
        "from oracle.declare import declaration_of\n"
        "from suites.targets.portable import targets\n"
        f"own = next(d for d in map(declaration_of, vars(targets).values()) if d and d.name == {PORTABLE!r})\n"
        "claims = {n: getattr(own, n) for n in ('convention', 'precision', 'supports')}\n"
        "@declare.paged_decode(name='wide', **claims)\n"
        "def wide(q, k_cache, v_cache, page_table, lengths, *, window, **more):\n"
        "    return own.function(q, k_cache, v_cache, page_table, lengths, window=window + 1, **more)\n"
    )
    case = decode(context_lens=(150, 70), query_lens=(1, 1), window=9, pool="spare", probe="normal")
    path = capture(tmp_path / "a", "wide", case, modules=[str(module)])
    more = ["--targets", str(module), "--engine", "emulator"]
    assert main(["check", str(path), "--target", "wide", "--shrink", str(tmp_path / "b"), "--json", *more]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["shrunk"]["case"]["context_lens"] == [10]
    small = load(tmp_path / "b")
    assert small.arguments["k_cache"].shape[0] == 1
    assert (tmp_path / "b").stat().st_size < path.stat().st_size / 4


@pytest.mark.slow
def test_a_right_record_is_not_shrunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = capture(tmp_path / "a", "planted.extend.clean", extend())
    assert check(path, "planted.extend.clean", "--shrink", str(tmp_path / "b")) == 0
    assert not (tmp_path / "b").exists()


# ----------------------------------------------------------------- bad files


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.startswith("attn-oracle: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def _with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    header, data = _header(path)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _with_own(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    def inner(header: dict[str, Any]) -> None:
        own = json.loads(header["__metadata__"]["attn_oracle"])
        change(own)
        header["__metadata__"]["attn_oracle"] = json.dumps(own)

    _with_header(path, inner)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "0 bytes; allowed: a safetensors file"),
    "cut off": (lambda p: p.write_bytes(p.read_bytes()[:200]), "it is cut off, or no safetensors file"),
    "a tail is missing": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "not a safetensors file"),
    "a huge header": (lambda p: p.write_bytes(struct.pack("<Q", 1 << 60) + b"x" * 99), "allowed: at most 1048576"),
    "no safetensors": (lambda p: p.write_bytes(b"\x80\x04K\x01." * 50), "header: "),
    "not ours": (lambda p: _with_header(p, lambda h: h.pop("__metadata__")), "metadata: no attn_oracle"),
    "not JSON": (
        lambda p: _with_header(p, lambda h: h["__metadata__"].update(attn_oracle="{")),
        "metadata.attn_oracle: not JSON",
    ),
    "another schema": (lambda p: _with_own(p, lambda o: o.update(schema=9)), "attn_oracle.schema: 9; allowed: 1"),
    "an unknown dtype": (
        lambda p: _with_own(p, lambda o: o["dtypes"].update({"in.q": "fp64"})),
        'dtypes.in.q: "fp64"; allowed: fp32',
    ),
    "another dtype": (
        lambda p: _with_own(p, lambda o: o["dtypes"].update({"in.q": "bf16"})),
        "in.q: stored as torch.float32; allowed: torch.bfloat16 for bf16",
    ),
    "an unknown key": (
        lambda p: _with_own(p, lambda o: o["dtypes"].update({"in.more": "fp32"})),
        'dtypes."in.more": names differ from those of the tensors',
    ),
    "an unknown output": (
        lambda p: p.write_bytes(p.read_bytes().replace(b"out.lse", b"out.xyz")),
        '"out.xyz": unknown; allowed: in.PARAMETER once, out.out, out.lse',
    ),
    "a wrong shape": (
        lambda p: _with_header(p, lambda h: h["in.q"].update(shape=[26, 32, 4])),
        "k: allowed is q's dimension 4",
    ),
    "an odd argument": (
        lambda p: _with_own(p, lambda o: o["arguments"].update(scale={"a": 1})),
        'arguments."scale": {"a": 1}; allowed: a finite number',
    ),
    "a NaN": (lambda p: _with_own(p, lambda o: o["arguments"].update(scale=float("nan"))), "allowed: a finite number"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = capture(tmp_path / "a", "planted.extend.clean", extend())
    change, said = BAD[name]
    change(path)
    assert check(path, "planted.extend.clean") == 2
    line = one_line(capsys)
    assert str(path) in line
    assert said in line


def test_an_unknown_target_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = capture(tmp_path / "a", "planted.extend.clean", extend())
    assert check(path, "no.such") == 2
    assert "--target: 'no.such' is unknown" in one_line(capsys)


@pytest.mark.parametrize("place", ["missing", "."])
def test_what_is_no_file_is_named(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / place, "planted.extend.clean") == 2
    assert str(tmp_path) in one_line(capsys)


def test_a_place_that_takes_no_file_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = capture(tmp_path / "a", "planted.extend.clean", extend(), out=torch.zeros(26, 4, 32))
    assert check(path, "planted.extend.clean", "--shrink", str(tmp_path / "no" / "b")) == 2
    assert "no such folder" in one_line(capsys)
