"""Campaigns on a real file system that is full at any moment: told in one line, nothing lost, and resumed with room."""

from __future__ import annotations

import errno
import io
import os
import sqlite3
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz.campaign import rounds
from fuzz.cli import main
from fuzz.whole import write_whole
from oracle import record
from suites.fuzz.campaign import small_disk, stand_in
from suites.fuzz.campaign.forked import ended, forked
from suites.fuzz.campaign.stores import rows
from suites.oracle.test_capture import call

FUZZ = ["fuzz", "planted.gather.clean", "planted.write.clean", "--targets", "suites.fuzz.planted"]
OPTIONS = ["--engine", "emulator", "--minimise-time", "0s", "--cases", "6"]
ROOM_KIB = 4096
NOT_ALLOWED = 77


def in_a_child(run: Callable[[], int], path: Path) -> None:
    """Run on mounts of its own; what it raises fails the test, and is left in the file ``path``."""

    def told() -> int:
        try:
            small_disk.enter()
        except OSError:
            return NOT_ALLOWED
        try:
            return run()
        except BaseException as error:
            path.write_text(f"{type(error).__name__}: {error}"[:2000])
            raise

    code = ended(forked(told))
    if code == NOT_ALLOWED:
        pytest.skip("this system allows no mounts of one's own")
    assert code == 0, path.read_text()


def said(arguments: list[str]) -> tuple[int, str, list[str]]:
    """Exit code, standard output, and the lines on standard error."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    return code, out.getvalue(), err.getvalue().splitlines()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("store.")}


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a small disk will be; a pool without processes, whose targets have faults, while our own code has none."""
    number = stand_in.number
    monkeypatch.setattr(rounds, "ROUND", 4)
    monkeypatch.setattr(stand_in, "number", lambda request, what: number(request, what) | 1)
    monkeypatch.setattr("fuzz.commands.open_pool", lambda settings: stand_in.StandIn())
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.mark.parametrize("step_kib", [pytest.param(4, marks=pytest.mark.slow), 52])
def test_a_disk_that_is_full_at_any_moment(step_kib: int, mounted: Path, tmp_path: Path) -> None:
    arguments = [*FUZZ, *OPTIONS, "--out", str(mounted / "out")]

    def run() -> int:
        whole: dict[str, Any] = {}
        full = 0
        for kib in (ROOM_KIB, *range(4, 400, step_kib)):
            small_disk.mount(mounted, kib)
            code, out, err = said(arguments)
            if not whole:
                assert code == 1, (code, err)
                whole, files = rows(mounted / "out"), names(mounted / "out")
            elif code != 1:
                full += 1
                _is_told(code, out, err, kib)
                small_disk.resize(mounted, ROOM_KIB)
                before = _stored(mounted / "out")
                code, out, err = said([*arguments, "--resume"])
                assert code == 1, (kib, code, err)
                assert before <= set(rows(mounted / "out")["results"]), kib
            assert rows(mounted / "out") == whole, kib
            assert names(mounted / "out") == files, kib
            assert (mounted / "out" / "report.html").read_text().endswith("</html>\n"), kib
            small_disk.unmount(mounted)
        assert full > 4
        return 0

    in_a_child(run, tmp_path / "raised")


def _is_told(code: int, out: str, err: list[str], kib: int) -> None:
    assert code == 3, (kib, code, err)
    ours = [line for line in err if line.startswith("attn-oracle: ")]
    assert len(ours) == 1, (kib, err)
    assert err[-1] == ours[0], (kib, err)
    assert "full" in ours[0] or os.strerror(errno.ENOSPC) in ours[0], (kib, err)
    assert not any(line.startswith("Traceback") for line in err), (kib, err)


def _stored(folder: Path) -> set[Any]:
    """The results, read once there is room; none where there was not even room for their table."""
    try:
        return set(rows(folder)["results"])
    except sqlite3.OperationalError as error:
        if str(error).startswith(("no such table", "unable to open")):
            return set()
        raise


# ------------------------------------------------------------- single files


def filled(folder: Path) -> Path:
    """A file that takes all the room there is."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return ballast


def on_a_full_disk(monkeypatch: pytest.MonkeyPatch, module: str, disk: Path, matches: str) -> None:
    """Whenever a module writes a file whose name matches, the disk is full meanwhile."""

    def write(path: Path, content: str | bytes) -> None:
        if not path.match(matches):
            return write_whole(path, content)
        ballast = filled(disk)
        try:
            return write_whole(path, content)
        finally:
            ballast.unlink()

    monkeypatch.setattr(f"{module}.write_whole", write)


@pytest.mark.parametrize(
    ("module", "matches"), [("fuzz.report.keep", "finding-*.json"), ("fuzz.report_command", "report.*")]
)
def test_a_file_of_a_campaign_that_finds_no_room(
    module: str, matches: str, mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*FUZZ, *OPTIONS, "--out", str(mounted / "out")]

    def run() -> int:
        small_disk.mount(mounted, ROOM_KIB)
        assert said([*FUZZ, *OPTIONS, "--out", str(mounted / "whole")])[0] == 1
        with monkeypatch.context() as patch:
            on_a_full_disk(patch, module, mounted, matches)
            code, out, err = said(arguments)
        _is_told(code, out, err, 0)
        assert not names(mounted / "out") & {path.name for path in (mounted / "out").glob(matches)}
        assert "NEW" in out
        assert rows(mounted / "out") == rows(mounted / "whole")
        assert said([*arguments, "--resume"])[0] == 1
        assert names(mounted / "out") == names(mounted / "whole")
        return 0

    in_a_child(run, tmp_path / "raised")


def test_what_the_report_is_asked_for_finds_no_room(mounted: Path, tmp_path: Path) -> None:
    def run() -> int:
        small_disk.mount(mounted, ROOM_KIB)
        out = mounted / "out"
        assert said([*FUZZ, *OPTIONS, "--out", str(out)])[0] == 1
        before = (out / "report.html").read_bytes()
        filled(mounted)
        for form, name in (("--html", "new.html"), ("--markdown", "new.md"), ("--junit", "new.xml")):
            code, _, err = said(["report", str(out), form, str(out / name)])
            assert (code, err) == (3, [f"attn-oracle: {out / name}: cannot be written: No space left on device"])
        with open(mounted / "new.json", "w") as full, redirect_stdout(full), redirect_stderr(io.StringIO()) as told:
            code = main(["report", str(out), "--json"])
        assert (code, told.getvalue()) == (3, "attn-oracle: standard output: No space left on device\n")
        assert (out / "report.html").read_bytes() == before
        return 0

    in_a_child(run, tmp_path / "raised")


def test_a_captured_call_that_finds_no_room(mounted: Path, tmp_path: Path) -> None:
    pages = torch.arange(512, dtype=torch.int32).view(2, 256)

    def run() -> int:
        small_disk.mount(mounted, 64)
        path = mounted / "call.safetensors"
        large = call(k_cache=torch.zeros(512, 16, 2, 8), v_cache=torch.zeros(512, 16, 2, 8), page_table=pages)
        assert not record(path, **large)
        with pytest.raises(OSError, match="No space left") as raised:
            record(path, **large, strict=True)
        assert raised.value.errno == errno.ENOSPC
        assert list(mounted.iterdir()) == []
        small_disk.resize(mounted, ROOM_KIB)
        assert record(path, **large, strict=True)
        return 0

    in_a_child(run, tmp_path / "raised")


def test_a_file_is_written_whole_or_not_at_all(mounted: Path, tmp_path: Path) -> None:
    def run() -> int:
        small_disk.mount(mounted, 64)
        path = mounted / "a.json"
        write_whole(path, "before")
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, bytes(1 << 17))
        assert [(one.name, one.read_text()) for one in mounted.iterdir()] == [("a.json", "before")]
        write_whole(path, "after é")
        assert path.read_text(encoding="utf-8") == "after é"
        return 0

    in_a_child(run, tmp_path / "raised")
