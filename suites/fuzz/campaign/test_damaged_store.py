"""Stores whose rows hold nonsense: each command refuses them in one line that names the file, and changes nothing."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fuzz.campaign import rounds
from fuzz.campaign.store import FILE
from fuzz.cli import main
from suites.fuzz.campaign import stand_in
from suites.fuzz.campaign.stores import COMPARED

MODULE = ["--targets", "suites.fuzz.planted"]
FUZZ = [
    "fuzz",
    "planted.gather.clean",
    "planted.write.clean",
    *MODULE,
    "--engine",
    "emulator",
    "--cases",
    "6",
    "--minimise-time",
    "0s",
]

# What is done, and which of resume, report and merge read it.
DAMAGE = {
    "UPDATE nights SET report = '{'": "resume report merge",
    "UPDATE nights SET report = '{}'": "resume report merge",
    "UPDATE nights SET report = '[1]'": "resume report merge",
    "UPDATE nights SET report = x'ff00'": "resume report merge",
    "UPDATE campaigns SET settings = '{}'": "resume merge",
    "UPDATE campaigns SET settings = 'nope'": "resume report merge",
    "UPDATE campaigns SET settings = '[]'": "resume report merge",
    "UPDATE results SET result = '{}'": "resume merge",
    "UPDATE results SET result = json_set(result, '$.elements', 'x')": "resume merge",
    "UPDATE results SET result = json_set(result, '$.checks', json('[3]'))": "resume merge",
    "UPDATE results SET result = json_set(result, '$.checks', json('[{}]'))": "resume merge",
    "UPDATE results SET result = x'ff00'": "resume merge",
    "UPDATE results SET \"case\" = '{}'": "resume merge",
    "UPDATE results SET seconds = '[]'": "resume merge",
    "UPDATE results SET seconds = '{\"kernel\": []}'": "resume merge",
    "UPDATE results SET harness = '{}'": "resume merge",
    "UPDATE results SET idx = idx + 100": "resume",
    "UPDATE findings SET data = '{}'": "resume report merge",
    "UPDATE findings SET data = '['": "resume report merge",
    "UPDATE findings SET minimised = '{}'": "resume report merge",
    "UPDATE findings SET minimised = '['": "resume report merge",
    "DROP TABLE results": "resume report merge",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        number = stand_in.number
        patch.setattr(rounds, "ROUND", 4)
        patch.setattr(stand_in, "number", lambda request, what: number(request, what) | 1)
        patch.setattr("fuzz.commands.open_pool", lambda settings: stand_in.StandIn())
        assert main([*FUZZ, "--out", str(folder)]) == 1
    return folder


def kept(folder: Path) -> list[str]:
    """All that is in a store but its nights: a run that is refused may have begun one."""
    with closing(sqlite3.connect(folder / FILE)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        there = sorted({*tables} & {*COMPARED} - {"campaigns"})
        return [str(row) for table in there for row in connection.execute(f"SELECT * FROM {table}")]


@pytest.mark.parametrize("sql", DAMAGE)
def test_nonsense_in_a_store_is_one_line(
    sql: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rounds, "ROUND", 4)
    monkeypatch.setattr("fuzz.commands.open_pool", lambda settings: stand_in.StandIn())
    folder = shutil.copytree(whole, tmp_path / "out")
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        connection.execute(sql)
    before = kept(folder)
    commands = {
        "resume": [*FUZZ, "--out", str(folder), "--resume"],
        "report": ["report", str(folder)],
        "merge": ["store", "merge", str(folder), "--out", str(tmp_path / "merged"), *MODULE],
    }
    capsys.readouterr()
    for name in DAMAGE[sql].split():
        assert main(commands[name]) in (2, 3), name
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("attn-oracle: ")]
        assert len(said) == 1, (name, said)
        assert str(tmp_path) in said[0] or "--resume: " in said[0], (name, said)
        assert kept(folder) == before, name
