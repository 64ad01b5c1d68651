"""The shelf is as wide as it says, every mutant fits its file and runs, and the ordinary campaign kills it."""

from __future__ import annotations

import json
import runpy
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz import registry
from fuzz.campaign import run as search
from fuzz.campaign.rounds import Ask, Origin
from fuzz.cli import guarded
from fuzz.commands import built_in_ledger
from fuzz.errors import Exit, Stop
from oracle.kinds import Engine
from suites.museum import campaign, overlay, report
from suites.museum.__main__ import app
from suites.museum.apply import MutationError, apply
from suites.museum.campaign import Campaign
from suites.museum.entries import ENTRIES, chosen
from suites.museum.entry import BugClass, Entry, Room
from suites.museum.mutation import Fragment
from suites.museum.ours import ATTEND
from suites.museum.worker import lines_of
from suites.targets import sglang_wheel

FEW = ("B084", "B117", "B210", "B215", "B152", "B240")
"""Of decode, its launcher, the writer, the gather and an index list."""


def fits(entry: Entry) -> bool:
    """Whether the file that the entry mutates is there, in its version."""
    file = entry.mutation.place.file
    if file.startswith("sglang") and sglang_wheel.root() is None:
        return False
    try:
        apply(entry.mutation, overlay.original(file).read_text(encoding="utf-8"))
    except MutationError as error:
        if error.code is Exit.NOTHING:
            return False
        raise
    return True


def tried(entries: Sequence[Entry], cases: int) -> Campaign:
    return campaign.run([e for e in entries if fits(e)], cases, 0, 1, built_in_ledger())


def test_the_shelf_is_wide_and_each_entry_is_a_bug_of_its_own() -> None:
    assert len(ENTRIES) >= 40
    assert len({entry.id for entry in ENTRIES}) == len({entry.reference for entry in ENTRIES}) == len(ENTRIES)
    assert {entry.kind for entry in ENTRIES} == set(BugClass)
    assert {entry.room for entry in ENTRIES} == set(Room)


def test_every_mutation_fits_its_file() -> None:
    for entry in ENTRIES:
        ours = entry.mutation.place.file.startswith("suites/")
        assert fits(entry) or not ours
        assert ours == isinstance(entry.mutation, Fragment)
        assert ours == (entry.mutation.place.sha256 is None)


def test_mutants_are_killed_and_their_twins_pass() -> None:
    found = tried(chosen(FEW), 16)
    assert found.complete
    assert not list(report.complaints(found))
    by = {trial.entry.id: report.killers(trial.kill) for trial in found.trials if trial.kill is not None}
    assert by["B084"] == ["nan"]
    assert by["B210"] == ["pages"]
    assert by["B117"] == ["bounds"]
    assert "race" in by["B215"]
    assert all(trial.kill is not None and trial.kill.alone for trial in found.trials)
    assert [len(twin.false_alarms) for twin in found.twins.values()] == [0] * len(found.twins)


def test_the_cases_are_those_of_a_campaign() -> None:
    entry = chosen(["B020"])[0]
    (twin,) = tried([entry], 6).twins.values()
    ordinary = search.Campaign([registry.load()[entry.target]], search.Settings(engine=Engine.EMULATOR), 6, None)
    asks: deque[Ask] = deque()
    assert len(list(ordinary._requests(asks))) == 6
    assert twin.cases == tuple(ask.case for ask in asks)
    assert {ask.origin for ask in asks} == {Origin.PLAN, Origin.FRESH}


def test_what_lives_and_what_never_runs_is_said() -> None:
    entry = chosen(["B117"])[0]
    same = Fragment(ATTEND, "offset = key % PAGE", "offset = key - key // PAGE * PAGE")
    unused = Fragment(ATTEND, "page, offset = slot // PAGE, slot % PAGE", "page, offset = slot, slot")
    found = tried([replace(entry, id="same", mutation=same), replace(entry, id="unused", mutation=unused)], 3)
    assert not found.complete
    assert [(t.executed, t.kill, t.tried) for t in found.trials] == [(True, None, 3), (False, None, 3)]
    assert list(report.complaints(found)) == [
        "same: survived 3 cases of portable.shuffle_5d.decode",
        "unused: the mutated lines never ran in 3 cases of portable.shuffle_5d.decode",
    ]
    assert "**survived**" in report.page(found)


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_lines_that_ran_are_seen_whichever_thread_ran_them(tmp_path: Path, *, in_thread: bool) -> None:
    file, reached = tmp_path / "code.py", set[int]()
    file.write_text("def work():\n    x = 1\n    if not x:\n        x = 2\n")
    work = runpy.run_path(str(file))["work"]
    with lines_of(str(file), reached):
        if in_thread:
            rank = threading.Thread(target=work)
            rank.start()
            rank.join()
        else:
            work()
    assert reached == {2, 3}
    work()
    after = threading.Thread(target=work)
    reached.clear()
    after.start()
    after.join()
    assert not reached


def test_the_command_prints_one_object_and_writes_no_page_for_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["museum", "--entry", "B020", "--cases", "2", "--json"])
    assert guarded(app) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["complete"] is True
    assert data["entries"][0]["id"] == "B020"
    assert data["entries"][0]["killed"]["said"].startswith("causal: aligned to the top left")
    assert not list(tmp_path.iterdir())


def test_an_unknown_entry_is_refused() -> None:
    with pytest.raises(Stop, match="--entry B999: unknown; known: B001") as stopped:
        chosen(["B999"])
    assert stopped.value.code is Exit.USAGE


@pytest.mark.slow
def test_the_whole_shelf_is_killed() -> None:
    found = tried(ENTRIES, 100)
    assert found.complete, list(report.complaints(found))
