"""The sweep over versions: what it asks pip for is not tested here, what it makes of the reports is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuzz import cli, sweep
from fuzz.errors import Exit, Stop
from fuzz.sweep import Run, parse_versions, rows, without_sweep, worst
from suites.gpu_diff import __main__ as gpu_diff


def report(cases: int, *findings: tuple[str, str | None]) -> dict[str, Any]:
    listed = [{"check": check, "known": known} for check, known in findings]
    return {"targets": {"a.b": {"cases": cases, "findings": listed}}}


def test_a_finding_that_ends_was_fixed_in_the_next_version_that_ran() -> None:
    runs = [
        Run("0.5.15", 1, report(3, ("values", "x"), ("crash", None))),
        Run("0.5.17", 125, report(0)),
        Run("0.5.23", 1, report(3, ("crash", None))),
    ]
    crash, values = rows(runs)
    assert values["seen"] == {"0.5.15": True, "0.5.17": None, "0.5.23": False}
    assert (values["known"], values["first_seen"], values["fixed_in"]) == ("x", "0.5.15", "0.5.23")
    assert (crash["known"], crash["first_seen"], crash["fixed_in"]) == (None, "0.5.15", None)


def test_the_checks_of_a_known_defect_are_one_finding_and_new_ones_are_each_one() -> None:
    both = report(3, ("values", "x"), ("nan", "x"), ("crash", None), ("hang", None))
    table = rows([Run("0.5.15", 1, both), Run("0.5.23", 1, report(3, ("nan", "x"), ("hang", None)))])
    assert [(row["known"], row["checks"], row["fixed_in"]) for row in table] == [
        (None, ["crash"], "0.5.23"),
        (None, ["hang"], None),
        ("x", ["nan", "values"], None),
    ]
    head, rule, *body = sweep.markdown(table, ["0.5.15", "0.5.23"]).splitlines()
    assert head == "| target | entry | checks | 0.5.15 | 0.5.23 | first seen | fixed in |"
    assert rule == "|" + " --- |" * 7
    assert body[0] == "| a.b | new | crash | seen | - | 0.5.15 | 0.5.23 |"
    assert body[2] == "| a.b | x | nan, values | seen | seen | 0.5.15 |  |"


def test_a_finding_that_begins_later_is_not_fixed_by_the_versions_before() -> None:
    (row,) = rows([Run("0.5.15", 0, report(3)), Run("0.5.23", 1, report(3, ("values", "x")))])
    assert (row["first_seen"], row["fixed_in"]) == ("0.5.23", None)


def test_versions_are_in_order_and_bad_ones_one_line() -> None:
    assert parse_versions("0.5.23, 0.5.9,0.5.23") == ["0.5.9", "0.5.23"]
    with pytest.raises(Stop, match=r"--sglang: .*allowed: versions"):
        parse_versions("new")


def test_the_inner_command_gets_the_other_arguments() -> None:
    arguments = ["sglang.*", "--sglang", "1,2", "--out=x", "--cases", "3", "--json", "--out", "y"]
    assert without_sweep(arguments) == ["sglang.*", "--cases", "3"]
    assert without_sweep(["--sglang=1"]) == []


def test_exit_codes_take_precedence_as_documented() -> None:
    assert worst([0, 1, 125]) == Exit.FINDINGS
    assert worst([0, 125]) == Exit.NOTHING
    assert worst([1, 2]) == Exit.USAGE
    assert worst([0, -9]) == Exit.HARNESS


COMMANDS = {
    "fuzz": (cli.app, ["fuzz", "a.b"], ("-m", "attn_oracle_cli")),
    "gpu_diff": (gpu_diff.app, ["a.b"], ("-m", "suites.gpu_diff")),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_itself_over_each_version(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, tuple[str, ...], list[str]]] = []

    def note(version: str, folder: Path, command: tuple[str, ...], arguments: list[str], out: Path) -> Run:
        asked.append((version, command, arguments))
        return Run(version, 0, report(1))

    monkeypatch.setattr(sweep, "unpacked", lambda version, cache: cache / version)
    monkeypatch.setattr(sweep, "run", note)
    app, own, command = COMMANDS[name]
    options = ["--cases", "3", "--out", str(tmp_path), "--json", "--sglang", "0.5.17,0.5.15"]
    assert cli.guarded(app, [*own, *options]) == Exit.CLEAN
    inner = [*own, "--cases", "3"]
    assert asked == [("0.5.15", command, inner), ("0.5.17", command, inner)]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Stop, match=r"--out .*file: cannot be written: Not a directory") as stopped:
        sweep.sweep("0.5.15", ("-m", "x"), [], tmp_path / "file", True)
    assert stopped.value.code is Exit.USAGE


def test_what_pip_says_after_its_error_is_not_the_reason() -> None:
    assert (
        sweep._why("ERROR: No matching distribution\n[notice] A new release of pip")
        == "ERROR: No matching distribution"
    )
    assert sweep._why("No module named pip\n") == "No module named pip"
    assert sweep._why("") == "pip gave no wheel"


@pytest.mark.parametrize(
    ("code", "ends_with", "told"),
    [(2, Exit.USAGE, ""), (125, Exit.NOTHING, ""), (3, Exit.HARNESS, "the run ended with 3 and no report")],
)
def test_a_run_without_a_report_ends_the_sweep_with_its_own_code(
    code: int, ends_with: Exit, told: str, tmp_path: Path
) -> None:
    with pytest.raises(Stop, match=f"{told}$") as stopped:
        sweep.run("1", tmp_path, ("-c", f"raise SystemExit({code})"), [], tmp_path)
    assert stopped.value.code is ends_with


def test_a_sweep_that_is_ended_ends_its_run(tmp_path: Path) -> None:
    """It says when it is there; the sweep is told to end, and the run's own last words are there."""
    child = (
        "import os, pathlib, signal, sys, time; "
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('ended').touch(), os._exit(0))); "
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    )
    parent = f"from fuzz import sweep; import sys; print(sweep._output([sys.executable, '-c', {child!r}], {{}}))"
    done = subprocess.run(
        [sys.executable, "-c", parent],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(sweep.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.stdout == "(0, b'')\n", done.stderr
    assert (tmp_path / "ended").exists()


def test_a_bad_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fuzz", "--cases", "1", "--sglang", "new"]) == Exit.USAGE
    assert "--sglang: " in capsys.readouterr().err
