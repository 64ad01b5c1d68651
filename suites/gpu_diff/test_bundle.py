"""The result bundle: what it holds, what it leaves out, and where it may be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.case import load_case
from fuzz.cli import guarded
from fuzz.errors import Exit, Stop
from oracle.kinds import Engine
from suites.gpu_diff import bundle
from suites.gpu_diff.__main__ import app

WRONG = ("planted.extend.window", "planted.gather.crash", "planted.extend.clean")


def run(out: Path, *options: str) -> int:
    fixed = ("--targets", "suites.fuzz.planted", "--engine", "emulator", "--cases", "3", "--jobs", "1", "--time", "1h")
    return guarded(app, [*WRONG, *fixed, "--out", str(out), *options])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    assert run(folder, "--bundle", str(folder / "back.json")) == Exit.FINDINGS
    return folder / "back.json"


def test_a_bundle_holds_versions_cases_verdicts_and_findings(written: Path) -> None:
    data = bundle.read(written)
    assert data["versions"]["torch"]
    assert data["engine"] == "emulator"
    tried = {name: bundle.cases(written, data, name) for name in WRONG}
    assert [len(rows) for rows in tried.values()] == [3, 3, 3]
    assert {verdict for verdict, _ in tried["planted.extend.clean"]} <= {"pass", "vacuous"}
    assert {verdict for verdict, _ in tried["planted.gather.crash"]} == {"crash"}
    for name, summary in data["targets"].items():
        assert summary["cases"] == len(tried.get(name, []))
        assert sum(summary["verdicts"].values()) == summary["cases"]
    assert {finding["target"] for finding in data["findings"]} == {"planted.extend.window", "planted.gather.crash"}
    values = next(finding for finding in data["findings"] if finding["check"] == "values")
    assert values["evidence"]["failures"] > 0
    assert values["case"] in [case.to_dict() for _, case in tried["planted.extend.window"]]


def test_a_bundle_holds_no_text_of_a_source_and_no_path(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert "raise ValueError" not in text
    assert "Traceback" not in text
    assert str(Path(__file__).parents[2]) not in text
    assert str(written.parent.parent) not in text
    output = [f["evidence"].get("output") for f in json.loads(text)["findings"]]
    assert output == [None] * len(output)


def test_it_is_shown_and_its_cases_are_written(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle.show(written, tmp_path / "cases")
    shown = capsys.readouterr().out
    assert "planted.gather.crash: 3 crash" in shown
    files = sorted((tmp_path / "cases").iterdir())
    assert {json.dumps(f["case"]) for f in bundle.read(written)["findings"]} == {
        json.dumps(load_case(file).to_dict()) for file in files
    }


def test_it_is_written_unasked_on_hip_alone(tmp_path: Path) -> None:
    assert bundle.destination(None, Engine.HIP, tmp_path) == tmp_path / "bundle.json"
    assert bundle.destination(None, Engine.CUDA, tmp_path) is None
    assert bundle.destination(tmp_path / "x.json", Engine.EMULATOR, tmp_path) == tmp_path / "x.json"


@pytest.mark.parametrize(
    ("name", "told"), [(".", "is a folder; allowed: a file's name"), ("none/x.json", "there is no folder")]
)
def test_a_bad_place_is_one_line_before_anything_runs(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--bundle", str(tmp_path / name)) == Exit.USAGE
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1


def test_a_sweep_has_no_single_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--bundle", str(tmp_path / "x.json"), "--sglang", "0.5.15") == Exit.USAGE
    assert "--bundle: one version a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ('{"kind": "x"}', "kind"),
        (json.dumps({"kind": bundle.KIND, "schema": 99}), "schema: 99; allowed: 1"),
        (json.dumps({"kind": bundle.KIND, "schema": 1, "versions": {}}), "targets: missing"),
    ],
)
def test_a_file_that_is_no_bundle_is_one_line(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(Stop, match=told):
        bundle.read(file)
    with pytest.raises(Stop, match="cannot be read"):
        bundle.read(tmp_path / "missing.json")


def test_a_result_that_is_no_case_is_one_line(written: Path) -> None:
    data = bundle.read(written)
    broken: dict[str, Any] = data | {"targets": {"a": {"results": [["pass", 0.5, [1, 2]]]}}}
    with pytest.raises(Stop, match=r"targets\.a\.results"):
        bundle.cases(written, broken, "a")


@given(
    st.text(st.characters(codec="utf-8"), max_size=50),
    st.sampled_from(["/home/me/work", "/opt/a b/c".replace(" ", ""), "~/x/y"]),
)
def test_a_long_path_loses_all_but_its_folder(rest: str, root: str) -> None:
    found = bundle.scrubbed(f"{root}/kernels/mine.py: {rest}")
    assert found.startswith("kernels/mine.py: ")
    assert len(bundle.scrubbed(rest * 100)) <= bundle.LONGEST
    assert "\n" not in bundle.scrubbed(rest)
