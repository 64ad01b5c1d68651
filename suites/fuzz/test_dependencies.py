"""Where a package is missing that attn-oracle needs: what still works, and one line for what does not."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fuzz.dependencies import NEEDED, missing, said_of

ROOT = Path(__file__).parents[2]

HIDING = """
import importlib.util, sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
import attn_oracle_cli
sys.argv[1:] = {arguments!r}
sys.exit(attn_oracle_cli.main())
"""


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
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] == [
        "torch: attn-oracle needs it: pip install torch, or its build for your GPU",
        "jinja2: attn-oracle needs it: pip install jinja2",
    ]
