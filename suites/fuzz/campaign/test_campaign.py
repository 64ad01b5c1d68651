"""Campaigns on a pool without processes: rounds, resumption, shards, and a kill at every step of driver and store."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fuzz.campaign import rounds, run, store
from fuzz.campaign.finding import Finding, saved_finding
from fuzz.campaign.run import Campaign
from fuzz.campaign.store import Store, reader, writer
from fuzz.cli import main
from fuzz.report.keep import Keeper
from suites.fuzz.campaign.forked import ended, forked
from suites.fuzz.campaign.stand_in import StandIn
from suites.fuzz.campaign.stores import rows

TARGETS = ["planted.gather.clean", "planted.write.clean", "--targets", "suites.fuzz.planted", "--engine", "emulator"]


@pytest.fixture(autouse=True)
def _small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ROUND", 8)
    monkeypatch.setattr(run, "MOST_HARNESS_ERRORS", 1000)
    use(monkeypatch, 1)


def use(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    monkeypatch.setattr("fuzz.commands.open_pool", lambda settings: StandIn(jobs))


def fuzz(out: Path, *arguments: str) -> int:
    return main(["fuzz", *TARGETS, "--out", str(out), "--json", "--minimise-time", "0s", *arguments])


def without_times(capsys: pytest.CaptureFixture[str]) -> Any:
    data = json.loads(capsys.readouterr().out)
    for target in data["targets"].values():
        del target["time"]
        for finding in target["findings"]:
            finding["case"] = Path(finding["case"]).name
    return data


def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz(tmp_path / "one", "--cases", "150") == 3
    one = without_times(capsys)
    for jobs in (2, 7):
        use(monkeypatch, jobs)
        assert fuzz(tmp_path / str(jobs), "--cases", "150") == 3
        assert without_times(capsys) == one
        assert rows(tmp_path / str(jobs)) == rows(tmp_path / "one")
    origins = {row[4] for row in rows(tmp_path / "one")["results"]}
    assert origins == {"plan", "fresh", "mutation"}
    assert {row[4] for row in rows(tmp_path / "one")["corpus"]} == {"pair", "kernel", "margin"}


def test_results_change_what_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter-example: feedback that is ignored would pass the test of determinism."""
    fuzz(tmp_path / "a", "--cases", "150")
    monkeypatch.setattr("suites.fuzz.campaign.stand_in.number", lambda request, what: 7)
    fuzz(tmp_path / "b", "--cases", "150")
    a, b = (
        {row[1:4]: row[5] for row in rows(tmp_path / name)["results"] if row[4] == origin}
        for name, origin in (("a", "mutation"), ("b", "mutation"))
    )
    assert a.keys() & b.keys()
    assert a != b


def test_a_search_goes_on_where_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(tmp_path / "whole", "--cases", "100")
    whole = without_times(capsys)
    for cases in ("3", "37", "64", "100"):
        fuzz(tmp_path / "parts", "--cases", cases, "--resume")
        last = without_times(capsys)
    assert last == whole
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert {p.name for p in (tmp_path / "parts").glob("finding-*")} == {
        p.name for p in (tmp_path / "whole").glob("finding-*")
    }


def test_a_search_that_ended_is_repeated_without_resume(tmp_path: Path) -> None:
    fuzz(tmp_path, "--cases", "4")
    fuzz(tmp_path, "--cases", "4")
    found = rows(tmp_path)
    assert [(row[0], row[2]) for row in found["campaigns"]] == [(1, 1), (2, 2)]
    first, second = ([row[1:] for row in found["results"] if row[0] == campaign] for campaign in (1, 2))
    assert first == second
    assert len(first) == 8


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def interrupt_at(monkeypatch: pytest.MonkeyPatch, cases: int) -> None:
    """Ctrl-C while a case is recorded."""
    seen = count(1)
    add = Store.add

    def interrupted(self: Store, *arguments: Any) -> None:
        add(self, *arguments)
        if next(seen) == cases:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "add", interrupted)


def test_ctrl_c_keeps_everything_and_a_run_that_did_not_end_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 21)
        fuzz(tmp_path / "a", "--cases", "30")
    assert sum(target["cases"] for target in json.loads(capsys.readouterr().out)["targets"].values()) >= 18
    assert len(rows(tmp_path / "a")["results"]) == 21
    assert fuzz(tmp_path / "a", "--cases", "30") == 2
    assert "holds an unfinished run (seed 0, 21 cases): --resume goes on with it" in one_line(capsys)
    assert fuzz(tmp_path / "a", "--cases", "30", "--resume", "--seed", "1") == 2
    assert "--resume: seed was 0 and is 1" in one_line(capsys)
    fuzz(tmp_path / "a", "--cases", "30", "--resume")
    fuzz(tmp_path / "b", "--cases", "30")
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_resume_names_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fuzz(tmp_path, "--cases", "4")
    capsys.readouterr()
    for arguments, words in (
        (["--timeout", "7"], "timeout_s was 120.0 and is 7.0"),
        (["--shard", "1/2"], "shards was 1 and is 2"),
        (["planted.gather.nan"], "other targets than before with planted.gather.nan"),
        (["--no-ledger"], "another ledger of known defects than before"),
    ):
        assert fuzz(tmp_path, "--cases", "4", "--resume", *arguments) == 2
        assert words in one_line(capsys)
    monkeypatch.setattr("fuzz.commands.versions", lambda: {"torch": "0.1"})
    fuzz(tmp_path, "--cases", "4", "--resume")
    assert "and is None: a new run begins" in capsys.readouterr().err
    assert len(rows(tmp_path)["campaigns"]) == 2


def test_other_cases_than_those_in_the_store_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fuzz(tmp_path, "--cases", "4")
    capsys.readouterr()
    monkeypatch.setattr("fuzz.plan.CANDIDATES", 2)
    assert fuzz(tmp_path, "--cases", "5", "--resume") == 2
    assert "this release draws another case there" in one_line(capsys)


def test_a_store_that_takes_no_more_ends_the_search_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, add = count(1), Store.add

    def full(self: Store, *arguments: Any) -> None:
        if next(seen) == 20:
            (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
            self.connection.execute(f"PRAGMA max_page_count = {pages}")
        add(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", full)
        assert fuzz(tmp_path / "a", "--cases", "60") == 3
    captured = capsys.readouterr()
    assert "the disk is full; what was recorded is kept, and --resume goes on" in captured.err.splitlines()[-1]
    told, kept = json.loads(captured.out), len(rows(tmp_path / "a")["results"])
    assert sum(target["cases"] for target in told["targets"].values()) + len(told["harness_errors"]) == kept
    assert 19 <= kept < 120
    fuzz(tmp_path / "a", "--cases", "60", "--resume")
    fuzz(tmp_path / "b", "--cases", "60")
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


# -------------------------------------------------------------------- shards


def test_shards_are_disjoint_and_join_to_whole_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3):
        fuzz(tmp_path / str(number), "--cases", "60", "--shard", f"{number}/3")
    capsys.readouterr()
    folders = [str(tmp_path / name) for name in "123"]
    places = [{row[1:4] for row in rows(Path(folder))["results"]} for folder in folders]
    assert not places[0] & places[1]
    assert not places[1] & places[2]
    assert main(["store", "merge", *folders, "--out", str(tmp_path / "all"), "--json", *TARGETS[2:4]]) == 3
    joined = json.loads(capsys.readouterr().out)
    assert all(target["cases"] + len(joined["harness_errors"]) >= 60 for target in joined["targets"].values())
    together = rows(tmp_path / "all")
    assert {row[1:4] for row in together["results"]} == places[0] | places[1] | places[2]
    assert len(together["results"]) == 120
    assert len(together["failures"]) == sum(len(rows(Path(folder))["failures"]) for folder in folders)
    # Again, and with a part that it holds: nothing doubles.
    main(["store", "merge", str(tmp_path / "all"), folders[1], "--out", str(tmp_path / "all"), *TARGETS[2:4]])
    assert rows(tmp_path / "all") == together
    # A shard goes on in the joined store as it does in its own.
    fuzz(tmp_path / "all", "--cases", "90", "--shard", "2/3", "--resume")
    fuzz(tmp_path / "2", "--cases", "90", "--shard", "2/3", "--resume")
    own = rows(tmp_path / "2")["results"]
    assert [row for row in rows(tmp_path / "all")["results"] if row[3] % 3 == 1] == own


def made_smaller(folder: Path, tokens: int) -> dict[str, Finding]:
    """Note that each finding of a store was minimised to one request of so many tokens; returns them by fault."""
    made = {}
    with writer(folder) as opened:
        for row in opened.findings(1):
            before = saved_finding(row.data)
            after = replace(before, case=replace(before.case, context_lens=(tokens,)), made_from=row.id)
            opened.set_minimised(row.id, after.to_dict())
            made[json.dumps(row.fault)] = after
    return made


def smallest(folders: list[Path]) -> dict[Any, tuple[int, ...]]:
    """The size of the smallest case of each fault, found or minimised, that the stores know."""
    sizes: dict[Any, tuple[int, ...]] = {}
    for folder in folders:
        with reader(folder) as opened:
            for row in opened.findings(1):
                for data in filter(None, (row.data, row.minimised)):
                    size = saved_finding(data).size
                    sizes[row.fault] = min(size, sizes.get(row.fault, size))
    return sizes


def shown_after_a_merge(folders: list[Path], out: Path, capsys: pytest.CaptureFixture[str]) -> dict[Any, Finding]:
    """The findings that the joined run tells of, by fault, read from their files."""
    main(["store", "merge", *map(str, folders), "--out", str(out), "--json", *TARGETS[2:4]])
    told = json.loads(capsys.readouterr().out)["targets"].values()
    shown = {finding["id"]: Path(finding["case"]) for target in told for finding in target["findings"]}
    assert {path.name for path in out.glob("finding-*")} == {path.name for path in shown.values()}
    found = [saved_finding(json.loads(path.read_text())) for path in shown.values()]
    assert {finding.id for finding in found} == set(shown)
    assert len({finding.fault for finding in found}) == len(found)
    return {finding.fault: finding for finding in found}


def test_of_two_minimised_findings_of_one_fault_the_smaller_is_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, third = parts = [tmp_path / name for name in "123"]
    for number, folder in enumerate(parts, 1):
        fuzz(folder, "--cases", "90", "--shard", f"{number}/3")
    capsys.readouterr()
    assert made_smaller(one, 2).keys() & made_smaller(other, 1).keys()
    joined = shown_after_a_merge([one, other], tmp_path / "a", capsys)
    assert {fault: finding.size for fault, finding in joined.items()} == smallest([one, other])
    assert sum(finding.case.context_lens == (1,) for finding in joined.values()) > 1
    assert shown_after_a_merge([other, one], tmp_path / "b", capsys) == joined
    # Again, with a part that it holds and one that was not minimised.
    again = shown_after_a_merge([tmp_path / "a", one, third], tmp_path / "c", capsys)
    assert {fault: finding.size for fault, finding in again.items()} == smallest(parts)
    # What a fault was made into gives way to a case of it that was found since and is smaller.
    made_smaller(third, 9_999)
    found = shown_after_a_merge([third], tmp_path / "d", capsys)
    assert {fault: finding.size for fault, finding in found.items()} == smallest([third])


def test_stores_that_do_not_belong_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, arguments in (("a", ["--shard", "1/2"]), ("b", ["--shard", "2/2", "--seed", "1"]), ("c", [])):
        fuzz(tmp_path / name, "--cases", "4", *arguments)
    capsys.readouterr()
    for name, words in (("b", "seed was 0 and is 1"), ("c", "shards was 2 and is 1"), ("d", "there is no store")):
        command = ["store", "merge", str(tmp_path / "a"), str(tmp_path / name), "--out", str(tmp_path / "out")]
        assert main(command) == 2
        assert words in one_line(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "1/33", "a/b", "1/2/3", "-1/2", "1/"])
def test_bad_shards_are_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz(tmp_path, "--cases", "1", "--shard", text) == 2
    assert "--shard: " in one_line(capsys)


# --------------------------------------------------------------------- kills


class Steps:
    """Counts the steps of a run: each statement of the store, and both ends of each step of the driver.

    At step ``kill_at`` the process kills itself, as nobody can prevent.
    """

    def __init__(self, kill_at: int | None) -> None:
        self.taken = 0
        self.kill_at = kill_at

    def step(self, *_: object) -> None:
        self.taken += 1
        if self.taken == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.step()
            result = function(*arguments, **named)
            self.step()
            return result

        return wrapped

    def install(self) -> None:
        connect = sqlite3.connect

        def traced(*arguments: Any, **named: Any) -> sqlite3.Connection:
            connection = connect(*arguments, **named)
            connection.set_trace_callback(self.step)
            return connection

        store.sqlite3.connect = traced  # type: ignore[assignment]
        for owner, name in ((Campaign, "take"), (Campaign, "_count"), (Keeper, "keep"), (Keeper, "_write")):
            setattr(owner, name, self.around(getattr(owner, name)))


def in_a_child(kill_at: int | None, out: Path, *arguments: str) -> tuple[int, int]:
    """Exit code and steps of a run in a forked process; the code is negative for a signal."""
    reading, writing = os.pipe()

    def run() -> int:
        steps = Steps(kill_at)
        steps.install()
        code = fuzz(out, *arguments)
        os.write(writing, str(steps.taken).encode())
        return code

    pid = forked(run)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    return ended(pid), int(told or 0)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 23])
def test_a_kill_at_any_step_loses_nothing_and_doubles_nothing(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ROUND", 2)
    arguments = ("--cases", "3")
    code, steps = in_a_child(None, tmp_path / "whole", *arguments)
    whole = rows(tmp_path / "whole")
    assert len(whole["results"]) == 6
    assert whole["findings"]
    assert steps > 60
    for kill_at in range(1, steps + 1, every):
        out = tmp_path / str(kill_at)
        assert in_a_child(kill_at, out, *arguments)[0] == -signal.SIGKILL
        before = stored(out)
        assert in_a_child(None, out, *arguments, "--resume")[0] == code
        after = rows(out)
        assert before <= set(after["results"]), kill_at
        assert after == whole, kill_at
        assert {p.name for p in out.glob("finding-*")} == {p.name for p in (tmp_path / "whole").glob("finding-*")}


def stored(folder: Path) -> set[tuple[Any, ...]]:
    """The results that a killed run left, if it came so far as to make the tables."""
    connection = sqlite3.connect(folder / "store.sqlite")
    made = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    connection.close()
    return set(rows(folder)["results"]) if made else set()
