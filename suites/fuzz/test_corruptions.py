"""Damaged files: read, or refused with one clear line and the right exit code; never a traceback, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fuzz.cli import main
from fuzz.errors import Exit, Stop
from suites.fuzz.corruptions import SHARES, Kind, Unclear, attempt, damaged, kinds, refused
from suites.fuzz.report.samples import keep


def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """A small part of what ``python -m suites.fuzz.corruptions`` tries."""
    counts: Counter[tuple[str, bool]] = Counter()
    attempt(tmp_path, 600, 1, lambda kind, line: counts.update([(kind, line is None)]))
    for name in SHARES:
        assert counts[name, False] > 0, name
        assert sum(counts[name, read] for read in (True, False)) == round(600 * SHARES[name])
    assert sum(count for (_, read), count in counts.items() if read) > 0


def _named(folder: Path, name: str) -> Kind:
    return next(kind for kind in kinds(folder) if kind.name == name)


def test_the_same_number_makes_the_same_damage(tmp_path: Path) -> None:
    kind = _named(tmp_path, "case")
    assert [damaged(kind, 3, i) for i in range(20)] == [damaged(kind, 3, i) for i in range(20)]
    assert len({damaged(kind, 3, i) for i in range(20)}) > 15


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("x"), "KeyError"),
        (RecursionError("deep"), "RecursionError"),
        (Stop(Exit.USAGE, "two\nlines"), "no clear line"),
        (Stop(Exit.USAGE, " "), "no clear line"),
        (Stop(Exit.HARNESS, "ours"), "exit code 3"),
    ],
)
def test_what_is_no_clear_line_is_noticed(error: Exception, said: str, tmp_path: Path) -> None:
    def read(path: Path) -> None:
        raise error

    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(Unclear, match=said):
        refused(Kind("any", "a", (b"x",), lambda rng, data: data, read), tmp_path / "a")


def test_a_reader_that_changes_the_file_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(Unclear, match="reading changed the file"):
        refused(Kind("any", "a", (b"x",), lambda rng, data: data, lambda p: p.write_bytes(b"y")), tmp_path / "a")


ENGINE = ["--engine", "emulator", "--targets", "suites.fuzz.planted"]
COMMANDS = {
    "case": lambda path: ["run", path, *ENGINE],
    "finding": lambda path: ["replay", path, *ENGINE],
    "report": lambda path: ["report", str(Path(path).parent)],
    "record": lambda path: ["check", path, "--target", "planted.extend.key", *ENGINE],
}

COUNTS = {"case": 20, "finding": 20, "report": 4, "record": 8}


def refused_files(folder: Path, name: str, count: int) -> list[Path]:
    """Damaged files that their reader refuses: what a command has to say in a line."""
    kind, found, index = _named(folder, name), [], 0
    while len(found) < count:
        path = folder / "many" / str(len(found)) / Path(kind.file).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(damaged(kind, 2, index))
        index += 1
        if refused(kind, path) is not None:
            found.append(path)
    return found


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_refuses_each_in_one_line(
    name: str, times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in refused_files(tmp_path, name, times * COUNTS[name]):
        assert main(COMMANDS[name](str(path))) == Exit.USAGE
        said = capsys.readouterr().err
        lines = said.splitlines()
        # A report names the file, then says how many there were.
        assert len(lines) == (2 if name == "report" else 1), said
        assert all(line.startswith("attn-oracle: ") for line in lines)
        assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    for path in refused_files(tmp_path, name, 2):
        done = subprocess.run(
            [sys.executable, "-m", "fuzz.cli", *COMMANDS[name](str(path))],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )
        assert done.returncode == Exit.USAGE
        assert done.stderr.count("\n") == (2 if name == "report" else 1)
        assert "Traceback" not in done.stderr + done.stdout


def test_a_folder_with_damaged_files_loses_none_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = refused_files(tmp_path / "made", "report", 12) if (tmp_path / "made").mkdir() is None else []
    folder = tmp_path / "kept"
    folder.mkdir()
    whole = keep(folder)
    before = {path: path.read_bytes() for path in whole}
    for index, path in enumerate(bad):
        path.rename(folder / f"finding-damaged-{index}.json")
    assert main(["report", str(folder)]) == Exit.USAGE
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == len(bad) + 1
    assert (folder / "report.html").read_text().count("<article") == len(whole)
    assert {path: path.read_bytes() for path in whole} == before
