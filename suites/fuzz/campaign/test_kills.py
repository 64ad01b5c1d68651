"""A real campaign, its driver, server and workers killed at random moments: resumed, it is as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fuzz.cli import main
from suites.fuzz.campaign.forked import ended, forked
from suites.fuzz.campaign.stores import rows

TARGETS = ["planted.gather.clean", "planted.gather.nan"]
OPTIONS = ["--targets", "suites.fuzz.planted", "--engine", "emulator", "--jobs", "2", "--json", "--minimise-time", "0s"]
KILLS = 50
CASES_A_RUN = 3


def begun(out: Path, cases: int) -> int:
    """The pid of a process that searches."""
    return forked(lambda: main(["fuzz", *TARGETS, *OPTIONS, "--out", str(out), "--resume", "--cases", str(cases)]))


def lives(pid: int) -> bool:
    """Whether our child has not ended; it can still be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def victim(driver: int, kind: str) -> int | None:
    """The driver itself, its server, or a worker of it; None where there is none now."""
    servers = children(driver)
    workers = [worker for server in servers for worker in children(server)]
    return next(iter({"driver": [driver], "server": servers, "worker": workers}[kind]), None)


@pytest.mark.slow
def test_kills_at_random_leave_no_trace(tmp_path: Path) -> None:
    random_, killed = random.Random(7), {"driver": 0, "server": 0, "worker": 0}
    kept: set[object] = set()
    cases = 0
    while sum(killed.values()) < KILLS:
        cases += CASES_A_RUN
        driver = begun(tmp_path / "killed", cases)
        # One of the others first: a case whose worker is killed twice is taken for one that kills itself.
        for kind in random_.choice([("driver",), ("server", "driver"), ("worker", "driver"), ("server",), ("worker",)]):
            # Some at once, some while the server starts, most while cases run: a busy machine takes long to start one.
            while kind != "driver" and lives(driver) and victim(driver, kind) is None:
                time.sleep(0.01)
            time.sleep(random_.uniform(0, 1.5))
            pid = victim(driver, kind) if lives(driver) else None
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed[kind] += 1
        code = ended(driver)
        assert code in (1, -signal.SIGKILL)
        if (tmp_path / "killed" / "store.sqlite").exists() and code == 1:
            now = set(rows(tmp_path / "killed")["results"])
            assert kept <= now
            kept = now
    assert min(killed.values()) > 5
    assert ended(begun(tmp_path / "killed", cases)) == 1
    assert ended(begun(tmp_path / "whole", cases)) == 1
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert len(rows(tmp_path / "whole")["results"]) == cases * len(TARGETS)
