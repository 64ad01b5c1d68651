"""Where a package is missing that attn-oracle needs: what still works, and one line for what does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from oracle.dependencies import NEEDED, missing, said_of
from suites.fuzz.plugin.repository import ROOT, Repository, kernel

HIDER = """
import importlib.util, sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""
HIDING = (
    HIDER
    + """
import attn_oracle_cli
sys.argv[1:] = {arguments!r}
sys.exit(attn_oracle_cli.main())
"""
)


def start(hidden: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = HIDING.format(hidden=hidden, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_they_are_those_that_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(NEEDED) == sorted(Requirement(text).name for text in project["dependencies"])
    assert missing() == []
    assert missing(["no_such_package"]) == ["no_such_package"]
    assert said_of(ModuleNotFoundError(name="torch")) is None


@pytest.mark.parametrize(
    "arguments", [["targets"], ["fuzz", "--cases", "1"], ["report", "."], ["certify"], ["bench"], ["compile"]]
)
def test_a_command_says_what_it_needs(arguments: list[str]) -> None:
    done = start(["torch", "scipy"], *arguments)
    assert done.returncode == 125
    assert done.stderr.startswith("attn-oracle: needs torch, scipy, not installed here: pip install torch scipy")
    assert (done.stderr.count("\n"), done.stdout) == (1, "")


@pytest.mark.parametrize("hidden", ["typer", "rich"])
def test_the_command_line_itself_says_what_it_needs(hidden: str) -> None:
    done = start([hidden], "--version")
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr == f"attn-oracle: needs {hidden}, not installed here: pip install {hidden}\n"


def test_what_needs_none_of_them_works() -> None:
    done = start(["torch", "numpy"], "--version")
    assert (done.returncode, done.stdout[:14]) == (0, "attn-oracle 0.")
    done = start(["torch", "jinja2"], "doctor")
    assert (done.returncode, done.stderr) == (125, "")
    assert done.stdout.splitlines()[-2:] == [
        "torch: attn-oracle needs it: pip install torch, or its build for your GPU",
        "jinja2: attn-oracle needs it: pip install jinja2",
    ]


def test_the_doctor_sees_what_is_missing_where_torch_is_there() -> None:
    done = start(["scipy"], "doctor")
    assert (done.returncode, done.stderr) == (125, "")
    assert "scipy: attn-oracle needs it: pip install scipy" in done.stdout.splitlines()
    report = json.loads(start(["jinja2"], "doctor", "--json").stdout)
    assert (report["packages"]["jinja2"], report["versions"]["torch"] is None) == (None, False)


def test_the_doctor_is_content_where_all_is_there() -> None:
    assert start([], "doctor").returncode == 0


IN_TESTS = """
import attn_oracle
from mine import attention

def test_one():
    attn_oracle.check(attention, cases=1)

def test_two(attn_oracle):
    attn_oracle.check(attention, cases=1)
"""


@pytest.mark.parametrize(
    ("hidden", "error"),
    [("hypothesis", "ModuleNotFoundError"), ("rich", "attn_oracle.process.UsageError")],
    ids=["in the session", "in the process that judges"],
)
def test_a_test_that_searches_says_what_it_needs(tmp_path: Path, hidden: str, error: str) -> None:
    repository = Repository(tmp_path)
    # Python imports sitecustomize by itself, in the session and in the process that it starts.
    repository.write(mine=kernel(), test_mine=IN_TESTS, sitecustomize=HIDER.format(hidden=[hidden]))
    done = repository.pytest(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1, done.stdout + done.stderr
    said = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E  ")]
    assert said == [f"{error}: attn-oracle needs {hidden}, not installed here: pip install {hidden}"] * 2
    assert not re.search(r"attn_oracle/\w+\.py:\d", done.stdout)


def test_a_named_engine_says_what_it_needs(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.write(sitecustomize=HIDER.format(hidden=["torch"]))
    done = repository.pytest("--attn-engine=cuda", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith(
        "ERROR: --attn-engine: 'cuda' cannot run here: attn-oracle needs torch, not installed here: pip install torch "
    )
