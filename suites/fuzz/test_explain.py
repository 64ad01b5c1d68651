"""A search ends with what explains its findings: smaller cases, reproducers, a report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fuzz import explain
from fuzz.campaign import store
from fuzz.campaign.finding import saved_finding
from fuzz.cli import guarded, main
from suites.gpu_diff import __main__ as gpu_diff

LINK = re.compile(r'<a href="([^"]*reproducer-[^"]*)"')
SEARCH = ["planted.gather.nan", "--targets", "suites.fuzz.planted", "--engine", "emulator", "--jobs", "1"]


def search(out: Path, *options: str) -> int:
    return main(["fuzz", *SEARCH, "--cases", "6", "--out", str(out), "--json", *options])


def findings(out: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("finding-*.json"))]


def test_a_search_leaves_small_cases_reproducers_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tmp_path / "plain", "--minimise-time", "0s") == 1
    assert not list((tmp_path / "plain").glob("reproducer-*"))
    assert (tmp_path / "plain" / "report.html").is_file()
    capsys.readouterr()
    out = tmp_path / "whole"
    assert search(out) == 1
    told = capsys.readouterr()
    before, after = findings(tmp_path / "plain"), findings(out)
    assert max(saved_finding(one).size for one in after) < max(saved_finding(one).size for one in before)
    assert {(one["check"], one["diagnosis"]) for one in after} == {(one["check"], one["diagnosis"]) for one in before}
    ids = {one["id"] for one in after}
    listed = json.loads(told.out)["targets"]["planted.gather.nan"]["findings"]
    assert sorted((one["id"], one["case"]) for one in listed) == [
        (i, str(out / f"finding-{i}.json")) for i in sorted(ids)
    ]
    assert f"{len(before)} made smaller" in told.err
    folders = {out / f"reproducer-{one}" for one in ids}
    assert set(out.glob("reproducer-*")) == folders
    for folder in folders:
        assert {"case.json", "finding.json", "ISSUE.md", "reproduce.py"} <= {path.name for path in folder.iterdir()}
    assert {out / link for link in LINK.findall((out / "report.html").read_text())} == folders
    assert f"replay {out}" in (out / "report.md").read_text()
    with store.reader(out) as opened:
        rows = opened.findings(opened.campaigns()[-1].id)
    assert {row.id for row in rows} == {one["id"] for one in before}
    assert {row.minimised["id"] for row in rows if row.minimised is not None} == ids
    # A report by the command has the same finding, once, and the link from where its page is.
    assert main(["report", str(out), "--html", str(tmp_path / "elsewhere.html")]) == 0
    page = (tmp_path / "elsewhere.html").read_text()
    assert {tmp_path / link for link in LINK.findall(page)} == folders
    assert len(LINK.findall(page)) == len(folders)
    # Going on does not begin again.
    capsys.readouterr()
    assert search(out, "--resume") == 1
    assert "smaller" not in capsys.readouterr().err
    assert findings(out) == after


def test_an_interrupt_keeps_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "_reproduce", interrupted)
    assert search(tmp_path) == 1
    told = capsys.readouterr()
    assert "interrupted: what was explained so far is kept" in told.err
    kept = findings(tmp_path)
    assert all(len(saved_finding(one).case.context_lens) <= 1 for one in kept)
    listed = json.loads(told.out)["targets"]["planted.gather.nan"]["findings"]
    assert {one["id"] for one in listed} == {one["id"] for one in kept}
    assert (tmp_path / "report.html").is_file()


def test_gpu_diff_ends_so_too(tmp_path: Path) -> None:
    assert guarded(gpu_diff.app, [*SEARCH, "--cases", "6", "--time", "60s", "--out", str(tmp_path)]) == 1
    kept = {f"reproducer-{one['id']}" for one in findings(tmp_path)}
    assert kept
    assert all((tmp_path / folder / "ISSUE.md").is_file() for folder in kept)
    assert set(LINK.findall((tmp_path / "report.html").read_text())) == {f"{folder}/" for folder in kept}
