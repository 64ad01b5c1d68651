"""A report of a run: everything is in it, everything that comes from findings is inert, every form is well formed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cli import main
from fuzz.plain import PlainError
from fuzz.report import digest, html, junit, plots
from fuzz.report.model import Report
from fuzz.report.svg import element, ticks
from suites.fuzz.report.samples import SCRIPT, finding_objects, keep, run_object


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, and its text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def sample(**changes: Any) -> Report:
    night = run_object() | {"ended": "2026-11-30"}
    return Report.of(run_object(), finding_objects(), [night, night], **changes)


def hostile() -> Report:
    """A report whose every text is a script."""

    def struck(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {
                (SCRIPT if name in ("targets", "skipped", "versions", "evidence") else key): struck(one, key)
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [struck(one, name) for one in value]
        kept = ("check", "verdict", "by_head", "by_dim")
        return SCRIPT if isinstance(value, str) and name not in kept else value

    findings = []
    for data in finding_objects():
        changed = {name: value if name == "case" else struck(value, name) for name, value in data.items()}
        map_ = data["evidence"].get("map")
        if map_:
            changed["evidence"]["map"] = map_
            changed["evidence"]["diagnosis"] = {"kind": SCRIPT, "detail": SCRIPT}
        findings.append(changed | {"id": SCRIPT + str(len(findings))})
    run = struck(run_object())
    return Report.of(run | {"ended": SCRIPT}, findings, [run], paths={findings[0]["id"]: SCRIPT}, bad=[SCRIPT])


def test_the_page_shows_the_run_and_every_finding() -> None:
    report = sample(paths={finding_objects()[0]["id"]: "kept/finding.json"})
    page = Page(html.render(report))
    assert page.open == []
    articles = [a for a in page.named("article") if a["class"] == "finding"]
    assert [a["data-target"] for a in articles] == [f.target for f in report.findings]
    assert {a["data-state"] for a in articles} == {"new"}
    assert "attn-oracle replay kept/finding.json --engine emulator" in page.text
    for finding in report.findings:
        assert finding.message in page.text
        assert finding.detail is None or finding.detail in page.text
    assert "absent.target" in page.text
    assert "no GPU here" in page.text
    for section in ("findings", "targets", "margins", "coverage", "throughput", "trend", "absent"):
        assert [s for s in page.named("section") if s.get("id") == section], section
        assert [a for a in page.named("a") if a["href"] == f"#{section}"], section


def test_pictures_say_what_they_show() -> None:
    page = Page(html.render(sample()))
    titles = [svg["aria-label"] or "" for svg in page.named("svg")]
    assert all(svg["role"] == "img" for svg in page.named("svg"))
    wanted = ("Error over budget", "Decoded keys", "Worst error", "Pairs of features", "Seconds", "nights", "Cases by")
    for start in wanted:
        assert any(start in title for title in titles), start


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = html.render(sample())
    page = Page(text)
    assert all((link["href"] or "").startswith("#") for link in page.named("a"))
    assert not [tag for tag, attributes in page.tags if "src" in attributes or tag == "link"]
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp", text)


@pytest.mark.parametrize("tag", ["script", "img", "style"])
def test_what_findings_say_is_inert_in_the_page(tag: str) -> None:
    counts = [len(Page(html.render(report)).named(tag)) for report in (hostile(), sample())]
    assert counts[0] == counts[1] == (0 if tag == "img" else 1)


def test_the_hostile_report_is_really_hostile() -> None:
    """Unescaped, its tags are found by what the test above looks with."""
    text = html.render(hostile())
    assert text.count("&lt;script&gt;") > 20
    assert "img" in Page("<p>" + SCRIPT).open


def test_no_attribute_of_the_page_runs_anything() -> None:
    for _, attributes in Page(html.render(hostile())).tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert "style" not in attributes


def test_the_policy_allows_our_script_alone() -> None:
    page = Page(html.render(sample()))
    policy = next(m["content"] for m in page.named("meta") if m.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


@given(st.text())
def test_any_text_is_escaped_in_drawings(text: str) -> None:
    drawn = element("text", text, title=text).text
    assert drawn.count("<") == 2 - (text == "")
    assert drawn.count('"') == 2


@given(st.floats(1e-6, 1e9), st.integers(2, 6))
def test_axes_reach_their_end_in_round_steps(high: float, wanted: int) -> None:
    found = ticks(high, wanted)
    assert found[-1] >= high * (1 - 1e-6)
    assert len(found) <= wanted + 2
    assert all(a < b for a, b in pairwise(found))


# ------------------------------------------------------------- other forms


def test_junit_counts_what_it_holds() -> None:
    data = finding_objects()
    data[0]["known"] = "a-known-defect"
    root = ET.fromstring(junit.render(Report.of(run_object(), data)))
    tests = list(root.iter("testcase"))
    assert int(root.get("tests", "")) == len(tests)
    assert int(root.get("failures", "")) == len(list(root.iter("failure"))) == len(data) - 1
    assert int(root.get("skipped", "")) == len(list(root.iter("skipped"))) == 2
    assert sum(int(suite.get("tests", "")) for suite in root) == len(tests)


def test_a_failure_of_the_harness_is_an_error_in_junit() -> None:
    broken = run_object() | {"harness_errors": [{"message": "it broke"}]}
    root = ET.fromstring(junit.render(Report.of(broken)))
    assert root.get("errors") == "1"
    assert [error.get("message") for error in root.iter("error")] == ["it broke"]


@given(st.text(st.characters(), max_size=40))
def test_any_text_makes_well_formed_xml(text: str) -> None:
    data = finding_objects()[-1] | {"message": text, "target": text, "known": None}
    root = ET.fromstring(junit.render(Report.of(None, [data])).encode("utf-8", "replace"))
    assert root.get("failures") == "1"


def test_markdown_has_findings_and_targets() -> None:
    text = digest.render(sample())
    assert text.startswith("# attn-oracle: ")
    for heading in ("## New findings", "## Targets", "## Not run", "## Past nights"):
        assert heading in text
    assert "diagnosis: " in text


def test_one_is_not_said_as_several() -> None:
    one, run = finding_objects()[0], run_object()
    run["targets"] = {name: target for name, target in run["targets"].items() if name == one["target"]}
    assert "1 case on 1 target, " in digest.render(Report.of(run, [one]))
    assert ">1 finding</p>" in html.render(Report.of(None, [one]))
    assert ">2 findings</p>" in html.render(Report.of(None, finding_objects()[:2]))


def test_every_form_says_what_explains_a_finding_as_well() -> None:
    others = [{"kind": "window", "detail": f"window: {name}"} for name in "bcde"]
    diagnosis = {"kind": "window", "detail": "window: a", "runners_up": others}
    data = finding_objects()[0] | {"evidence": {"diagnosis": diagnosis}, "diagnosis": "window"}
    alone = finding_objects()[0] | {"evidence": {"diagnosis": diagnosis | {"runners_up": []}}}
    for render in (digest.render, html.render, junit.render):
        assert "or: window: b; window: c; window: d" in render(Report.of(None, [data]))
        assert "window: e" not in render(Report.of(None, [data]))
        assert "or: window" not in render(Report.of(None, [alone]))


def test_what_findings_say_is_inert_in_markdown() -> None:
    data = finding_objects()[0] | {"message": "<img> @someone #12 [x](y) `code` a|b\n# heading", "target": "a_b*c"}
    text = digest.render(Report.of(None, [data]))
    assert "<img>" not in text
    assert "@someone" not in text
    assert "[x](" not in text
    assert "\n# heading" not in text
    assert re.search(r"a\\\|b", text)


@given(st.text(min_size=1))
def test_code_stays_one_piece_of_code(text: str) -> None:
    made = digest.code(text)
    fence = re.match("`+", made)
    assert fence is not None
    inner = made[fence.end() : -fence.end()]
    assert "\n" not in made
    assert fence[0] not in re.findall("`+", inner)


# -------------------------------------------------------------------- model


def test_findings_that_only_the_run_tells_of_are_shown() -> None:
    report = Report.of(run_object(), [])
    assert len(report.findings) == len(finding_objects())
    assert {f.case for f in report.findings} == {""}
    assert {f.verdict for f in report.findings} == {"fail", "crash"}


def test_new_findings_come_first() -> None:
    data = finding_objects()
    data[0]["known"] = "a-known-defect"
    report = Report.of(None, data)
    assert [f.state for f in report.findings] == ["new"] * (len(data) - 1) + ["known"]
    assert report.title == f"{len(data) - 1} new findings, 1 known"


def _wrong() -> Iterator[tuple[str, Any, str]]:
    yield "schema", 2, "finding.schema: 2; allowed: 1"
    yield "message", None, "finding.message: null"
    yield "check", "guess", 'finding.check: "guess"; allowed: result, values'
    yield "verdict", [], "finding.verdict: []; allowed: pass"
    yield "worst_ratio", "high", 'finding.worst_ratio: "high"; allowed: a number'
    yield "versions", {"torch": 3}, "finding.versions.torch: 3; allowed: text"
    yield "evidence", {"map": {"shape": [2]}}, "finding.evidence.map.shape: [2]; allowed: 2 or 3 integers"
    yield (
        "evidence",
        {"map": {"shape": [2, 2], "by_head": ["1 x"]}},
        "finding.evidence.map.by_head: level 'x'; allowed:",
    )
    yield "evidence", {"map": {"shape": [2, 2], "by_head": ["1", "1 2"]}}, "rows of different lengths"
    yield (
        "evidence",
        {"keys": [{"keys": 4, "visible": [0, 5]}]},
        "finding.evidence.keys[0]: allowed: 0 <= visible <= keys",
    )
    yield "case", {"schema": 1}, "case.operation: missing"


@pytest.mark.parametrize(("name", "value", "said"), list(_wrong()))
def test_a_wrong_field_is_named(name: str, value: Any, said: str) -> None:
    data = finding_objects()[0]
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        Report.of(None, [data | {name: value}])
    assert "\n" not in str(error.value)


def test_a_run_without_targets_is_no_run() -> None:
    with pytest.raises(PlainError, match=re.escape("run.targets: missing")):
        Report.of({"schema": 1, "engine": "emulator"})


def test_no_night_but_this_one_is_no_trend() -> None:
    run = Report.of(run_object()).run
    assert run is not None
    assert plots.trend([run]) is None
    assert plots.trend([run, run]) is not None


# ------------------------------------------------------------- command line


def test_the_command_writes_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(run_object()))
    forms = {"--html": "a.html", "--markdown": "a.md", "--junit": "a.xml"}
    named = [word for option, name in forms.items() for word in (option, str(tmp_path / name))]
    assert main(["report", str(tmp_path), "--run", str(tmp_path / "run.json"), "--json", *named]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["run"] == run_object()
    assert sorted(f["id"] for f in data["findings"]) == sorted(f["id"] for f in finding_objects())
    assert all((tmp_path / name).stat().st_size > 500 for name in forms.values())


def test_without_a_form_the_page_lies_beside_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("report.html: 3 new findings\n")
    assert "<article" in (tmp_path / "report.html").read_text()


def test_a_page_shows_a_finding_again_with_the_users_own_targets(tmp_path: Path) -> None:
    data = finding_objects()[0] | {"modules": ["my kernel.py", "other"]}
    path = tmp_path / f"finding-{data['id']}.json"
    path.write_text(json.dumps(data))
    assert main(["report", str(tmp_path)]) == 0
    shown = unescape((tmp_path / "report.html").read_text())
    assert f"<code>attn-oracle replay {path} --targets 'my kernel.py' --targets other --engine emulator</code>" in shown


@pytest.mark.parametrize(("option", "start"), [("--html", "<!"), ("--markdown", "#"), ("--junit", "<?xml")])
def test_one_form_goes_to_standard_output(
    option: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["report", ".", option, "-"]) == 0
    assert capsys.readouterr().out.startswith(start)
    assert sorted(tmp_path.iterdir()) == before
    assert main(["report", ".", option, "-", "--json"]) == 2
    assert f"{option}, --json: allowed: one form" in capsys.readouterr().err


def test_an_empty_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "nothing to report" in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_bad_file_is_told_and_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path)
    (tmp_path / "finding-bad.json").write_text('{"schema": 1}')
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "finding-bad.json: finding.id: missing" in said[0]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<article") == 3
    assert "finding-bad.json: finding.id: missing" in page


@pytest.mark.parametrize("arguments", [["no-such-folder"], [".", "--run", "no-such-file.json"]])
def test_what_is_not_there_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 2
    assert "no-such-f" in capsys.readouterr().err


@pytest.mark.slow
def test_a_store_brings_the_run_and_the_nights_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two nights in one store, one in another: all are in the trend, and the findings are those of the first."""
    search = ["fuzz", "planted.extend.lse", "--targets", "suites.fuzz.planted", "--engine", "emulator", "--jobs", "1"]
    search += ["--minimise-time", "0s"]
    for seed, place in enumerate(("old", "new", "new")):
        assert main([*search, "--cases", "3", "--seed", str(seed), "--out", str(tmp_path / place)]) in (0, 1)
    capsys.readouterr()
    assert main(["report", str(tmp_path / "new"), "--history", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["run"]["seed"] == 2
    assert [night["seed"] for night in data["history"]] == [0, 1]
    assert all(night["ended"] for night in data["history"])
    assert data["findings"]
    assert all(finding["cases"] >= 1 for finding in data["findings"])


def test_a_damaged_store_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path)
    (tmp_path / "store.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 500)
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "elsewhere").mkdir()
    assert main(["report", str(tmp_path / "elsewhere"), "--history", str(tmp_path)]) == 2
    assert "store.sqlite" in (tmp_path / "elsewhere" / "report.html").read_text()
