"""Real campaigns, their drivers, servers and workers killed at random: resumed, it is as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from fuzz.campaign.store import FILE
from fuzz.cli import main
from suites.fuzz.campaign.forked import ended, forked
from suites.fuzz.campaign.stores import rows

TARGETS = ["planted.gather.clean", "planted.gather.nan"]
OPTIONS = ["--targets", "suites.fuzz.planted", "--engine", "emulator", "--json", "--minimise-time", "0s"]
CASES = 60
JOBS = 2
KILLS = {"driver": 14, "worker": 31, "server": 5}
"""Workers and a server are replaced within a run; every driver takes a new one, and seconds to start."""

IN_FLIGHT = 2 * JOBS
"""Cases that are taken and not yet recorded. One whose worker is killed runs again by itself, and is recorded after no
more than so many: killed once more, it would be taken for one that ends its own process."""


def begun(out: Path) -> int:
    """The pid of a process that searches, or goes on with it."""
    command = ["fuzz", *TARGETS, *OPTIONS, "--jobs", str(JOBS), "--cases", str(CASES), "--out", str(out), "--resume"]
    return forked(lambda: main(command))


def lives(pid: int) -> bool:
    """Whether our child has not ended; it can still be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def children(pid: int) -> list[int]:
    """The children that any of a process's threads has started."""
    found: list[int] = []
    with suppress(OSError):  # it ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def workers(driver: int) -> set[int]:
    return {worker for server in children(driver) for worker in children(server)}


def asked(out: Path, sql: str) -> list[tuple[Any, ...]]:
    """What a store says now; nothing before it has its tables."""
    if not (out / FILE).exists():
        return []
    with closing(sqlite3.connect(out / FILE)) as connection:
        try:
            return connection.execute(sql).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error) or "locked" in str(error):
                return []
            raise


def progress(out: Path) -> tuple[int, int]:
    """How many results and nights there are."""
    found = asked(out, "SELECT (SELECT count(*) FROM results), (SELECT count(*) FROM nights)")
    return found[0] if found else (0, 0)


def recorded(out: Path) -> set[tuple[Any, ...]]:
    """Every result with its times: one that was lost and run again would have others."""
    return set(asked(out, 'SELECT target, round, idx, "case", result, seconds FROM results'))


def wait_until(happened: Callable[[], bool], driver: int) -> bool:
    """Whether something happened before the driver ended."""
    while lives(driver):
        if happened():
            return True
        time.sleep(0.02)
    return False


def killed_driver(driver: int, out: Path) -> tuple[int, bool]:
    """Its exit code, and whether it was killed before it had noted the night's end."""
    os.kill(driver, signal.SIGKILL)
    code = ended(driver)
    return code, asked(out, "SELECT ended FROM nights ORDER BY rowid DESC LIMIT 1") == [(None,)]


def killed_child(kind: str, driver: int) -> bool:
    """Kill a worker or the server of workers; returns whether another took its place."""
    before = workers(driver)
    victims = children(driver) if kind == "server" else sorted(before)
    if not victims:
        return False
    os.kill(victims[0], signal.SIGKILL)
    return wait_until(lambda: bool(workers(driver) - before), driver)


def run_and_kill(out: Path, kinds: Iterator[str], random_: random.Random, counts: Counter[str]) -> int | None:
    """One run of a driver, struck until it is killed or at its end; its exit code, None if it was killed."""
    results, nights = progress(out)
    at = results + random_.randint(1, 12)
    driver = begun(out)

    def is_there() -> bool:
        now = progress(out)
        return now[0] >= at and now[1] > nights

    while wait_until(is_there, driver):
        kind = next((kind for kind in kinds), None)
        if kind is None:
            break
        time.sleep(random_.uniform(0, 0.03))
        if kind == "driver":
            code, disturbed = killed_driver(driver, out)
            counts[kind] += disturbed
            return None if code == -signal.SIGKILL else code
        if lives(driver):
            counts[kind] += killed_child(kind, driver)
        at = progress(out)[0] + random_.randint(IN_FLIGHT, 12)
    return ended(driver)


@pytest.mark.slow
def test_kills_at_random_leave_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_, counts = random.Random(7), Counter[str]()

    def kinds() -> Iterator[str]:
        while left := [kind for kind, wanted in KILLS.items() for _ in range(wanted - counts[kind])]:
            yield random_.choice(left)

    assert ended(begun(tmp_path / "whole")) == 1
    whole = rows(tmp_path / "whole")
    assert len(whole["results"]) == CASES * len(TARGETS)
    campaigns = runs = 0
    while counts != KILLS:
        campaigns += 1
        out, kept = tmp_path / str(campaigns), set[tuple[Any, ...]]()
        code = None
        while code is None:
            code = run_and_kill(out, kinds(), random_, counts)
            runs += 1
            assert kept <= recorded(out)
            kept = recorded(out)
            with capsys.disabled():
                print(f"run {runs}, campaign {campaigns}: {len(kept)} results, killed {dict(counts)}", flush=True)
        assert code == 1
        assert rows(out) == whole
        files = ({path.name for path in folder.glob("finding-*")} for folder in (out, tmp_path / "whole"))
        assert len({frozenset(names) for names in files}) == 1
    with capsys.disabled():
        print(f"{counts.total()} kills {dict(counts)} in {runs} runs of {campaigns} campaigns")
