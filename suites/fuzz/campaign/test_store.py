"""The store: what is kept, what comes back, and one line for whatever is wrong with the file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzz.campaign import store as module
from fuzz.campaign.store import APPLICATION, FILE, SCHEMA, Found, Key, Result, Round, Store, StoreError, reader, writer
from fuzz.errors import Exit

SETTINGS = {"seed": 3, "shards": 2}
OLD = Path(__file__).with_name("store_schema_1.sql")


def result(index: int, **changes: Any) -> Result:
    plain: dict[str, Any] = {
        "origin": "plan",
        "case": {"seed": index},
        "verdict": "pass",
        "worst_ratio": 0.25,
        "result": {"checks": []},
        "seconds": {"kernel": 0.5},
        "harness": None,
    }
    return Result(key=Key("t", 0, index), **{**plain, **changes})


def found(id_: str, size: int, fault: str = "values") -> Found:
    return Found(["t", fault, None], [1, size], {"id": id_, "signature": {"check": fault}, "known": None})


@pytest.fixture
def made(tmp_path: Path) -> Store:
    """A store with one campaign, number 1."""
    store = writer(tmp_path)
    assert store.begin(SETTINGS) == 1
    return store


def test_what_is_put_in_comes_out(made: Store) -> None:
    harness = {"message": "m", "traceback": "t"}
    kept = [result(0), result(2, verdict=None, worst_ratio=None, harness=harness, reached=frozenset({"a", "b"}))]
    closed = Round("t", 0, 1, 2, {0: ["pair", "kernel"]})
    made.add(1, kept[0], [])
    made.add(1, kept[1], [], closed)
    assert list(made.results(1)) == list(made.results(1, "t")) == kept
    assert list(made.results(1, "other")) == []
    (row,) = made.rounds(1)
    assert (row.target, row.round, row.shard, row.cases) == ("t", 0, 1, 2)
    assert {index: sorted(reasons) for index, reasons in row.corpus.items()} == {0: ["kernel", "pair"]}


def test_a_result_is_there_once(made: Store) -> None:
    made.add(1, result(0), [found("a", 5)])
    with pytest.raises(StoreError, match="UNIQUE"):
        made.add(1, result(0), [found("b", 1)])
    assert len(list(made.results(1))) == 1
    assert [row.id for row in made.findings(1)] == ["a"]


def test_a_fault_is_shown_once_on_its_smallest_case(made: Store) -> None:
    for index, (id_, size) in enumerate([("a", 5), ("b", 3), ("c", 4), ("d", 3)]):
        made.add(1, result(index), [found(id_, size), found(f"{id_}2", 1, "nan")])
    nan, values = sorted(made.findings(1), key=lambda row: row.fault[1] or "")
    assert (values.id, values.key.index, values.cases) == ("b", 1, 4)
    assert (nan.id, nan.key.index, nan.cases) == ("a2", 0, 4)


def test_what_a_person_said_of_a_fault_stays(made: Store) -> None:
    made.add(1, result(0), [found("a", 5)])
    made.fill("a", severity="high")
    made.fill("a", reachability="default settings")
    made.set_minimised("a", {"id": "small"})
    made.add(1, result(1), [found("b", 4)])
    (row,) = made.findings(1)
    assert (row.id, row.severity, row.reachability, row.minimised) == ("b", "high", "default settings", {"id": "small"})
    again = made.begin(SETTINGS)
    made.add(again, result(0), [found("a", 5)])
    (row,) = made.findings(again)
    assert (row.severity, row.reachability, row.minimised) == ("high", "default settings", None)
    with pytest.raises(StoreError, match="no finding 'zzz'"):
        made.fill("zzz", severity="low")


def test_nights_keep_their_reports(made: Store) -> None:
    first = made.begin_night(1)
    made.end_night(first, {"schema": 1, "n": 1}, interrupted=True)
    assert not made.campaigns()[0].finished
    second = made.begin_night(1)
    made.end_night(second, {"schema": 1, "n": 2}, interrupted=False)
    assert made.campaigns()[0].finished
    made.begin_night(1)
    assert not made.campaigns()[0].finished
    assert [(night.report, night.interrupted) for night in made.nights()] == [
        ({"schema": 1, "n": 1}, True),
        ({"schema": 1, "n": 2}, False),
        (None, True),
    ]


def test_a_jump_of_the_clock_changes_nothing(made: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made.end_night(made.begin_night(1), {"n": 1}, interrupted=False)
    monkeypatch.setattr(module, "_now", lambda: "1999-01-01T00:00:00+00:00")
    made.end_night(made.begin_night(1), {"n": 2}, interrupted=False)
    assert [night.report for night in made.nights()] == [{"n": 1}, {"n": 2}]


def test_others_read_while_it_is_written(made: Store, tmp_path: Path) -> None:
    with reader(tmp_path) as other:
        assert list(other.results(1)) == []
        made.add(1, result(0), [])
        assert len(list(other.results(1))) == 1
        made.connection.execute("BEGIN IMMEDIATE")
        assert len(list(other.results(1))) == 1
        made.connection.execute("ROLLBACK")
        with pytest.raises(StoreError, match="cannot be written"):
            other.begin(SETTINGS)


def test_a_folder_that_nobody_may_write_can_be_read(
    made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.add(1, result(0), [])
    made.close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with reader(tmp_path) as other:
        assert len(list(other.results(1))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store.lock", FILE]


# -------------------------------------------------------------------- schema


def test_a_store_of_schema_1_is_brought_to_the_newest(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / FILE)
    old.executescript(OLD.read_text())
    old.execute(f"PRAGMA application_id = {APPLICATION}")
    old.execute("PRAGMA user_version = 1")
    old.close()
    with pytest.raises(StoreError, match=f"schema 1; this release reads {SCHEMA}"):
        reader(tmp_path)
    with writer(tmp_path) as store:
        assert store.connection.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
        assert store.connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert [row.results for row in store.campaigns()] == [3]
        assert [row.key.index for row in store.results(1)] == [0, 1, 2]
        (row,) = store.findings(1)
        assert (row.id, row.cases, row.severity) == ("02", 3, "high")
        store.add(1, result(5, reached=frozenset({"a"})), [found("x", 1)], Round("t", 0, 1, 1, {5: ["pair"]}))
        assert len(store.rounds(1)) == 1
        migrated = schema(store.connection)
    with writer(tmp_path / "new") as store:
        assert schema(store.connection) == migrated


def schema(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()


def test_a_migration_that_fails_leaves_the_old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE corpus")
        raise sqlite3.OperationalError("planted")

    with writer(tmp_path) as store:
        before = schema(store.connection)
    with monkeypatch.context() as patch:
        patch.setattr(module, "MIGRATIONS", (*module.MIGRATIONS, broken))
        patch.setattr(module, "SCHEMA", SCHEMA + 1)
        with pytest.raises(StoreError, match="planted"):
            writer(tmp_path)
    with writer(tmp_path) as store:
        assert schema(store.connection) == before


# -------------------------------------------------------------------- errors


def refused(folder: Path, words: str, code: Exit = Exit.USAGE, open_: Callable[[Path], Store] = writer) -> None:
    with pytest.raises(StoreError, match=words) as raised:
        open_(folder)
    assert raised.value.code is code
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("open_", [writer, reader])
def test_files_that_are_no_stores(open_: Callable[[Path], Store], tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("nonsense " * 1000)
    refused(tmp_path, "not a store of attn-oracle", open_=open_)
    (tmp_path / FILE).unlink()
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("CREATE TABLE t (a)")
    other.close()
    refused(tmp_path, "an SQLite file, but not a store of attn-oracle", open_=open_)
    (tmp_path / FILE).unlink()
    with writer(tmp_path) as store:
        store.connection.execute(f"PRAGMA user_version = {SCHEMA + 5}")
    refused(tmp_path, f"schema {SCHEMA + 5}; this release reads up to {SCHEMA}: use a newer one", open_=open_)


def test_there_is_none(tmp_path: Path) -> None:
    refused(tmp_path, "there is no store", open_=reader)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    """Such a file is left by a process that was killed while it made the store."""
    (tmp_path / FILE).touch()
    with writer(tmp_path) as store:
        assert store.campaigns() == []


def test_a_damaged_store_is_one_line(made: Store, tmp_path: Path) -> None:
    for index in range(200):
        made.add(1, result(index, result={"filler": "x" * 500}), [])
    made.close()
    size = (tmp_path / FILE).stat().st_size
    with open(tmp_path / FILE, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 8192))
    with pytest.raises(StoreError) as raised, writer(tmp_path) as store:
        list(store.results(1))
    assert "\n" not in str(raised.value)


def test_two_runs_do_not_write_one_store(made: Store, tmp_path: Path) -> None:
    refused(tmp_path, "another run writes it")
    made.close()
    writer(tmp_path).close()


def test_a_store_that_stays_locked_is_one_line(made: Store, tmp_path: Path) -> None:
    made.close()
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    refused_soon: Callable[[Path], Store] = lambda folder: writer(folder, busy_s=0.05)  # noqa: E731
    refused(tmp_path, "another process holds it locked", Exit.HARNESS, refused_soon)
    other.close()
    writer(tmp_path).close()


def test_a_transaction_that_was_left_open_is_rolled_back(made: Store) -> None:
    """A second Ctrl-C keeps the first from rolling it back."""
    made.connection.execute("BEGIN IMMEDIATE")
    made.connection.execute("DELETE FROM campaigns")
    made.add(1, result(0), [])
    assert [row.results for row in made.campaigns()] == [1]


def test_a_full_disk_keeps_what_was_recorded(made: Store) -> None:
    (pages,) = made.connection.execute("PRAGMA page_count").fetchone()
    made.connection.execute(f"PRAGMA max_page_count = {pages + 4}")
    recorded: list[int] = []

    def fill() -> None:
        while True:
            index = len(recorded)
            made.add(1, result(index, result={"filler": "x" * 500}), [found(str(index), index)])
            recorded.append(index)

    with pytest.raises(StoreError, match="the disk is full") as raised:
        fill()
    assert raised.value.code is Exit.HARNESS
    assert [row.key.index for row in made.results(1)] == recorded != []
    made.connection.execute("PRAGMA max_page_count = 100000")
    made.add(1, result(len(recorded)), [])


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "deep", "--out .*: cannot be written: Not a directory")


def test_it_is_durable(made: Store) -> None:
    assert made.connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert made.connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert made.connection.execute("PRAGMA foreign_keys").fetchone() == (1,)
