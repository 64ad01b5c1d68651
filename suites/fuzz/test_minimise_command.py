"""minimize and reproducer as commands: what they write, what they print, and what they say of bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.campaign.finding import Finding, saved_finding
from fuzz.case import Case, CaseError
from fuzz.check.result import Check
from fuzz.cli import main
from fuzz.plain import PlainError
from fuzz.report.issue import issue
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz.cases import extend_case, gather_case

OPTIONS = ["--engine", "emulator", "--targets", "suites.fuzz.planted", "--jobs", "1"]


def finding(**changes: Any) -> Finding:
    case: Case = gather_case(context_lens=[17, 3], probe="bytes", strided=False)
    given: dict[str, Any] = {
        "target": "planted.gather.values",
        "check": Check.VALUES,
        "verdict": Verdict.FAIL,
        "message": "key: wrong | with `markup`\nand *lines*",
        "evidence": {"output": "key", "count": 1, "diagnosis": {"kind": "window", "detail": "w", "runners_up": []}},
        "diagnosis": None,
        "worst_ratio": None,
        "engine": Engine.EMULATOR,
        "versions": {"torch": "2.9", "gpu": None},
        "known": None,
        "case": case,
        "modules": ("suites.fuzz.planted",),
    }
    return Finding(**(given | changes))


def saved(folder: Path, one: Finding) -> str:
    path = folder / f"finding-{one.id}.json"
    path.write_text(json.dumps(one.to_dict()), encoding="utf-8")
    return str(path)


def test_a_finding_is_made_smaller_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, finding())
    assert main(["minimize", path, *OPTIONS, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["complete"]
    removed = {one["field"]: (one["before"], one["after"]) for one in told["removed"]}
    assert removed["context_lens"] == ("[17, 3]", "[1]")
    assert removed["pool"] == ("spare", "tight")
    smaller = saved_finding(json.loads(Path(told["case"]).read_text()))
    assert (smaller.check, smaller.case.context_lens) == (Check.VALUES, (1,))
    assert Path(told["case"]).parent == tmp_path
    assert (smaller.smallest, smaller.made_from) == (True, finding().id)
    assert main(["report", str(tmp_path)]) == 0
    assert "1 new finding" in capsys.readouterr().out


@pytest.mark.slow
def test_what_does_not_fail_here_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, finding(check=Check.WRITTEN))
    assert main(["minimize", path, *OPTIONS, "--time", "5s"]) == 0
    assert "written does not fail here; what fails: values" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


def test_what_fails_no_more_gets_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, finding(target="planted.gather.clean"))
    assert main(["reproducer", path, *OPTIONS, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == "planted.gather.clean: nothing fails here: no folder is written\n"
    assert main(["minimize", path, *OPTIONS, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == "attn-oracle: planted.gather.clean: nothing fails here\n"
    assert not (tmp_path / "out").exists()


def test_a_target_that_is_not_loaded_is_named_with_what_loads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for one, said in (
        (finding(), "'planted.gather.values' is unknown; give --targets suites.fuzz.planted"),
        (finding(modules=(), target="torch.spda"), "'torch.spda' is unknown; nearest: torch.sdpa"),
    ):
        for command in ("replay", "minimize"):
            assert main([command, saved(tmp_path, one), "--engine", "emulator"]) == 2
            told = capsys.readouterr().err
            assert said in told
            assert told.count("\n") == 1


def test_replay_refuses_a_check_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "finding-x.json"
    path.write_text(json.dumps(finding().to_dict() | {"check": "zzz"}))
    assert main(["replay", str(path), *OPTIONS[:4]]) == 2
    told = capsys.readouterr().err
    assert 'finding.check: "zzz"; allowed: ' in told
    assert told.count("\n") == 1


def test_a_folder_for_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, finding())
    assert main(["reproducer", path, *OPTIONS, "--out", str(tmp_path / "out"), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["reproducers"]
    written = sorted(p.name for p in Path(one["folder"]).iterdir())
    assert written == ["ISSUE.md", "case.json", "finding.json", "reproduce.py"]
    text = (Path(one["folder"]) / "ISSUE.md").read_text()
    assert "`python3 reproduce.py`" in text
    assert saved_finding(json.loads((Path(one["folder"]) / "finding.json").read_text())) == finding()


@pytest.mark.slow
def test_a_script_that_cannot_be_made_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, finding(target="planted.gather.segfault", check=Check.CRASH))
    assert main(["reproducer", path, *OPTIONS, "--out", str(tmp_path / "out")]) == 0
    assert "no script: the call could not be traced: " in capsys.readouterr().out
    (folder,) = (tmp_path / "out").iterdir()
    assert "There is no script without attn-oracle: the call could not be traced" in (folder / "ISSUE.md").read_text()


@pytest.mark.parametrize("command", ["minimize", "reproducer"])
def test_bad_input_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = finding().to_dict()
    for broken, said in (
        (data | {"check": "colour"}, 'finding.check: "colour"; allowed: '),
        (data | {"versions": {"torch": 3}}, "finding.versions.torch: 3; allowed: text"),
        (data | {"evidence": []}, "finding.evidence: []; allowed: a JSON object"),
        (data | {"target": "nobody"}, "finding.target: 'nobody' is unknown"),
        ({k: v for k, v in data.items() if k != "message"}, "finding.message: missing"),
    ):
        path = tmp_path / "finding-x.json"
        path.write_text(json.dumps(broken))
        assert main([command, str(path), *OPTIONS]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert len(told.strip().splitlines()) == 1
    assert main([command, str(tmp_path / "nothing.json"), *OPTIONS]) == 2


def test_a_finding_survives_its_file() -> None:
    assert saved_finding(json.loads(json.dumps(finding().to_dict()))) == finding()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from(sorted(finding().to_dict())), value=JSON)
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_a_corrupted_field_is_one_line_or_harmless(name: str, value: object) -> None:
    said = ""
    try:
        saved_finding(finding().to_dict() | {name: value})
    except (PlainError, CaseError) as error:
        said = str(error)
    assert len(said.splitlines()) <= 1


def test_text_from_elsewhere_is_no_markup() -> None:
    text = issue(finding(case=extend_case(window=4)), None, "no [link](x)")
    assert "key: wrong \\| with \\`markup\\` and \\*lines\\*" in text
    assert "no \\[link\\](x)" in text
    assert "| window | 4 |" in text


def test_an_issue_loads_the_users_own_targets_and_claims_no_more_than_was_done() -> None:
    one = finding(modules=("my kernel.py",))
    assert "`attn-oracle replay finding.json --targets 'my kernel.py'`" in issue(one, None, "x")
    assert "## Input" in issue(one, None, "x")
    assert "## Smallest input" in issue(replace(one, smallest=True), None, "x")
