"""The nightly workflows, and the issues that they open: what would be done, and what is done by a stand-in for gh."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from suites.fuzz.report.samples import SCRIPT, finding_objects, keep, run_object

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("nightly*.yml"))


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("file_issues", ROOT / ".github" / "file_issues.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["file_issues"] = module
    spec.loader.exec_module(module)
    return module


issues = _module()

GH = """#!{python}
import json, sys
from pathlib import Path
place = Path({place!r})
asked = sys.argv[1:]
calls = json.loads((place / "calls.json").read_text())
(place / "calls.json").write_text(json.dumps([*calls, asked]))
kept = json.loads((place / "issues.json").read_text())
value = lambda name: asked[asked.index(name) + 1]
match asked[:2]:
    case ["issue", "list"]:
        print(json.dumps(kept))
    case ["issue", "create"]:
        kept.append({{"number": len(kept) + 1, "title": value("--title"), "body": value("--body"), "state": "OPEN"}})
    case ["issue", "edit"]:
        kept[int(asked[2]) - 1]["body"] = value("--body")
    case ["issue", "reopen"]:
        kept[int(asked[2]) - 1]["state"] = "OPEN"
    case ["label", "create"]:
        pass
    case _:
        sys.exit("unknown: " + " ".join(asked[:2]))
(place / "issues.json").write_text(json.dumps(kept))
"""


class Tracker:
    """A stand-in for gh on the path, with its issues in a file."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        (place / "issues.json").write_text("[]")
        (place / "calls.json").write_text("[]")
        program = place / "gh"
        program.write_text(GH.format(python=sys.executable, place=str(place)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")

    @property
    def issues(self) -> Any:
        return json.loads((self.place / "issues.json").read_text())

    @issues.setter
    def issues(self, kept: Any) -> None:
        (self.place / "issues.json").write_text(json.dumps(kept))

    @property
    def calls(self) -> Any:
        return json.loads((self.place / "calls.json").read_text())


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    place = tmp_path / "gh-stand-in"
    place.mkdir()
    return Tracker(place, monkeypatch)


@pytest.fixture
def night(tmp_path: Path) -> Path:
    folder = tmp_path / "night"
    folder.mkdir()
    keep(folder)
    report = folder / f"reproducer-{finding_objects()[0]['id']}" / "ISSUE.md"
    report.parent.mkdir()
    report.write_text(
        "# planted: wrong\n\n## What\n\nit loses a key, @somebody\n\n## For a person to fill in\n\n- severity:\n"
    )
    return folder


def file(night: Path, *more: str) -> int:
    return issues.main([str(night), "--repo", "owner/name", *more])  # type: ignore[no-any-return]


def test_each_fault_is_one_issue(night: Path, tracker: Tracker, capsys: pytest.CaptureFixture[str]) -> None:
    assert file(night) == 0
    kept = tracker.issues
    kinds = {(f["target"], f["check"], f["diagnosis"]) for f in finding_objects()}
    assert len(kept) == len(kinds)
    assert len({issue["title"] for issue in kept}) == len(kinds)
    told = next(issue for issue in kept if "it loses a key" in issue["body"])
    assert "@somebody" not in told["body"]
    assert told["body"].rstrip().endswith("- severity:")
    assert capsys.readouterr().out.count("opened: ") == len(kinds)


def test_another_night_with_the_same_faults_changes_nothing(night: Path, tracker: Tracker) -> None:
    assert file(night) == 0
    before, calls = tracker.issues, len(tracker.calls)
    assert file(night) == 0
    assert tracker.issues == before
    assert len(tracker.calls) == calls + 1  # the question which there are


def test_a_smaller_case_goes_in_and_what_a_person_wrote_stays(night: Path, tracker: Tracker) -> None:
    assert file(night) == 0
    kept = tracker.issues
    for issue in kept:
        issue["body"] = issue["body"].replace("- severity:", "- severity: wrong answers") + "\nSeen in production.\n"
    tracker.issues = kept
    data = finding_objects()[0]
    data["case"]["context_lens"] = [2]
    (night / "finding-0a0a0a0a0a.json").write_text(json.dumps(data | {"id": "0a0a0a0a0a", "message": "smaller"}))
    assert file(night) == 0
    assert len(tracker.issues) == len(kept)
    (changed,) = [issue for issue in tracker.issues if "smaller" in issue["body"]]
    assert "Seen in production." in changed["body"]
    assert "- severity: wrong answers" in changed["body"]


def test_a_closed_issue_is_opened_again(night: Path, tracker: Tracker) -> None:
    assert file(night) == 0
    tracker.issues = [issue | {"state": "CLOSED"} for issue in tracker.issues]
    assert file(night) == 0
    assert {issue["state"] for issue in tracker.issues} == {"OPEN"}


def test_known_defects_are_left_alone(night: Path, tracker: Tracker) -> None:
    for path in night.glob("finding-*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"known": "a-known-defect"}))
    assert file(night) == 0
    assert tracker.issues == []


def test_a_flood_is_held_back(night: Path, tracker: Tracker, capsys: pytest.CaptureFixture[str]) -> None:
    assert file(night, "--most", "1") == 0
    assert len(tracker.issues) == 1
    assert "left for another night" in capsys.readouterr().out


def test_a_dry_run_says_what_it_would_do_and_does_nothing(
    night: Path, tracker: Tracker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert file(night, "--dry-run") == 0
    assert tracker.calls == []
    said = capsys.readouterr().out
    assert "would run: gh issue list --repo owner/name" in said
    assert said.count("would run: gh issue create") == len({f["check"] for f in finding_objects()})


def test_what_findings_say_stays_an_argument(night: Path, tracker: Tracker) -> None:
    """Neither a shell nor our own marks are reached."""
    hostile = finding_objects()[0] | {
        "id": "0b0b0b0b0b",
        "target": "$(touch struck); `x` -->" + SCRIPT,
        "message": SCRIPT,
    }
    (night / "finding-0b0b0b0b0b.json").write_text(json.dumps(hostile))
    assert file(night) == 0
    (made,) = [issue for issue in tracker.issues if "touch struck" in issue["title"]]
    assert made["body"].count("<!-- attn-oracle") == 3
    assert "<script>" not in made["body"]
    assert not Path("struck").exists()


def test_a_bad_file_is_told_and_hides_no_other(
    night: Path, tracker: Tracker, capsys: pytest.CaptureFixture[str]
) -> None:
    (night / "finding-bad.json").write_text('{"id": 3}')
    assert file(night) == 0
    assert "finding-bad.json: no finding" in capsys.readouterr().err
    assert tracker.issues


def test_what_gh_refuses_is_one_line(night: Path, tracker: Tracker, capsys: pytest.CaptureFixture[str]) -> None:
    (tracker.place / "gh").write_text("#!/bin/sh\necho no rights >&2\nexit 4\n")
    assert file(night) == 3
    assert capsys.readouterr().err == "Bad: gh issue list: no rights\n"


def test_no_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert file(tmp_path / "no") == 2
    assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------ workflows


def test_actions_are_pinned_to_a_commit() -> None:
    used = [use for path in WORKFLOWS for use in re.findall(r"uses: (\S+.*)", path.read_text())]
    assert len(used) >= 8
    for use in used:
        assert re.fullmatch(
            r"actions/[a-z-]+(?:/[a-z]+)?@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/workflows/nightly\.yml", use
        )


def test_what_comes_from_outside_reaches_no_shell_line() -> None:
    """Expressions stand in ``env`` and ``with``, where their value is data, and not in scripts."""
    for path in WORKFLOWS:
        for script in re.findall(r"^ +run: (?:\|\n((?: {10}.*\n|\n)+)|(.*))", path.read_text(), re.MULTILINE):
            assert "${{" not in "".join(script)


def test_a_night_keeps_its_store_report_and_issues_whatever_the_search_did() -> None:
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    steps = text.split("      - ")[1:]
    after = steps[next(i for i, step in enumerate(steps) if step.startswith("name: Search")) + 1 :]
    assert len(after) >= 6
    assert all("if: always()" in step for step in after)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"harness_errors": [{"message": "it broke"}]}, "the harness failed: it broke"),
        ({"targets": {}}, "nothing ran"),
        (None, "came to no result"),
    ],
)
def test_the_last_step_tells_findings_from_a_search_that_failed(
    change: dict[str, Any] | None, said: str | None, tmp_path: Path
) -> None:
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    script = text.split("<<'PYTHON'\n")[1].split("          PYTHON")[0]
    code = "\n".join(line[10:] for line in script.splitlines())
    path = tmp_path / "run.json"
    path.write_text("" if change is None else json.dumps(run_object() | change))
    done = subprocess.run([sys.executable, "-", str(path)], input=code, capture_output=True, text=True, check=False)
    assert done.returncode == (said is not None)
    assert said is None or said in done.stderr
