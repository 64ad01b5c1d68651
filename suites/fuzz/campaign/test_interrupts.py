"""Ctrl-C and SIGTERM at any moment, once and twice: what was recorded is kept, and the search goes on from there."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from fuzz.campaign import rounds, store
from fuzz.campaign.run import Campaign
from fuzz.cli import INTERRUPTED, main
from fuzz.report.keep import Keeper
from suites.fuzz.campaign import stand_in
from suites.fuzz.campaign.forked import ended, forked
from suites.fuzz.campaign.stores import rows

FUZZ = ["fuzz", "planted.gather.clean", "planted.write.clean", "--targets", "suites.fuzz.planted", "--json"]
OPTIONS = ["--engine", "emulator", "--minimise-time", "0s", "--cases", "4"]


class Signals:
    """Counts the steps of a run, both ends of each statement of the store and of each step of the driver.

    At each step in ``at`` the process gets the signal, as from a terminal.
    """

    def __init__(self, number: int, at: set[int]) -> None:
        self.taken = 0
        self._number, self._at = number, at

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self._step()
            result = function(*arguments, **named)
            self._step()
            return result

        return wrapped

    def _step(self) -> None:
        self.taken += 1
        if self.taken in self._at:
            os.kill(os.getpid(), self._number)

    def install(self) -> None:
        class Connection(sqlite3.Connection):
            execute = self.around(sqlite3.Connection.execute)
            executemany = self.around(sqlite3.Connection.executemany)

        connect = sqlite3.connect
        store.sqlite3.connect = lambda *a, **named: connect(*a, factory=Connection, **named)  # type: ignore[assignment]
        for owner, name in ((Campaign, "take"), (Campaign, "_count"), (Keeper, "keep"), (Keeper, "_write")):
            setattr(owner, name, self.around(getattr(owner, name)))


def signalled(told: Path, arguments: list[str], number: int = signal.SIGINT, at: set[int] | None = None) -> Any:
    """Run in a forked process; its exit code (negative for a signal), and what it left in ``told``, if it did."""

    def run() -> int:
        signals = Signals(number, at or set())
        signals.install()
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = main(arguments)
        told.write_text(json.dumps({"out": out.getvalue(), "err": err.getvalue(), "steps": signals.taken}))
        return code

    told.unlink(missing_ok=True)
    code = ended(forked(run))
    return code, json.loads(told.read_text()) if told.exists() else None


@pytest.fixture(autouse=True)
def _without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    number = stand_in.number
    monkeypatch.setattr(rounds, "ROUND", 2)
    monkeypatch.setattr(stand_in, "number", lambda request, what: number(request, what) | 1)
    monkeypatch.setattr("fuzz.commands.open_pool", lambda settings: stand_in.StandIn())


@pytest.mark.parametrize(
    ("number", "again", "every"),
    [
        (signal.SIGINT, 0, 61),
        pytest.param(signal.SIGINT, 0, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 0, 3, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, 3, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 5, 3, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 5, 7, marks=pytest.mark.slow),
    ],
)
def test_a_signal_at_any_step_loses_nothing(number: int, again: int, every: int, tmp_path: Path) -> None:
    """``again``: so many steps later it comes once more."""
    told = tmp_path / "told"
    code, whole = signalled(told, [*FUZZ, *OPTIONS, "--out", str(tmp_path / "whole")])
    assert code == 1
    summaries = 0
    for at in range(1, whole["steps"] + 1, every):
        arguments = [*FUZZ, *OPTIONS, "--out", str(tmp_path / f"{at}")]
        code, said = signalled(told, arguments, number, {at, at + again})
        # 0 where nothing was found before; ended at once, by whichever way the signal ends a process, outside a search.
        assert code in (0, 1, INTERRUPTED, -signal.SIGTERM), at
        assert said is None or "Traceback" not in said["err"], (at, said["err"])
        if code in (0, 1):
            summaries += 1
            cases = sum(target["cases"] for target in json.loads(said["out"])["targets"].values())
            # One that was recorded and not yet counted is in the store alone.
            assert cases <= len(rows(tmp_path / f"{at}")["results"]) <= cases + 1, at
        code, _ = signalled(told, [*arguments, "--resume"])
        assert code == 1, at
        assert rows(tmp_path / f"{at}") == rows(tmp_path / "whole"), at
    assert summaries > 0 or again
