"""What stands for the version of a user's own targets: it changes with their source, and with nothing else."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from fuzz.cli import main
from fuzz.target_sources import digest
from suites.fuzz.plugin.repository import kernel

FUZZ = ["fuzz", "mine.*", "--engine", "emulator", "--cases", "2", "--jobs", "1", "--minimise-time", "0s", "--resume"]


def written(folder: Path) -> Path:
    (folder / "beside" / "deep").mkdir(parents=True)
    (folder / "mine.py").write_text("import torch\nfrom beside import deep\ndef late():\n    import helper\n")
    (folder / "helper.py").write_text("A = 1\n")
    (folder / "other.py").write_text("A = 1\n")
    (folder / "beside" / "__init__.py").write_text("from .near import A\n")
    (folder / "beside" / "near.py").write_text("A = 1\n")
    (folder / "beside" / "deep" / "__init__.py").write_text("from ..near import A\nfrom . import leaf\n")
    (folder / "beside" / "deep" / "leaf.py").write_text("def broken(:\n")
    return folder / "mine.py"


@pytest.mark.parametrize(
    "name", ["mine.py", "helper.py", "beside/__init__.py", "beside/near.py", "beside/deep/leaf.py"]
)
def test_a_digest_changes_with_what_the_module_imports(name: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    before = digest(str(path))
    with (tmp_path / name).open("a") as file:
        file.write("# changed\n")
    assert before is not None
    assert digest(str(path)) != before


def test_a_digest_changes_with_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path / "one")
    before = digest(str(path))
    (tmp_path / "one" / "other.py").write_text("B = 2\n")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert digest(str(path)) == before == digest(str(tmp_path / "two" / "mine.py"))


def test_a_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    before = digest("beside.near")
    assert before == digest("beside.near") != digest("other")
    (tmp_path / "beside" / "near.py").write_text("A = 2\n")
    assert before != digest("beside.near")
    assert digest("no.such.module") is None


def test_a_changed_target_is_searched_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    told = []
    for wrong in (False, False, True):
        path.write_text(kernel() + ("\n# mended\n" if wrong else ""))
        assert main([*FUZZ, "--targets", str(path), "--out", str(tmp_path / "out"), "--json"]) in (0, 1)
        captured = capsys.readouterr()
        assert json.loads(captured.out)["targets"]
        told.append(captured.err.splitlines()[0])
    assert "goes on after 2 cases" in told[1]
    assert told[2].endswith(f"--targets {path}: its source is not what it was: a new run begins")
