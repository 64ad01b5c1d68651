"""Ends of the driver: killed, interrupted, started in each way that Python programs are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from suites.fuzz.campaign.test_worker import gone, wait_until

DRIVER = textwrap.dedent(
    """
    import sys
    from fuzz.campaign.pool import Pool
    from fuzz.campaign.server import Server
    from fuzz.campaign.worker import Job

    print("started", flush=True)  # twice, if anything imported this file again
    do, pids = sys.argv[1:]
    job = Job("suites.fuzz.campaign.faults:misbehave")
    requests = [{"do": "nothing"}, {"do": "nothing"}, *[{"do": do, "pids": pids}] * 2]
    with Pool(job, 2, Server(preload=())) as pool:
        for index, reply in pool.map(requests, 60.0):
            print(index, reply.status.value, reply.value and reply.value["pid"], pool._server.pid, flush=True)
    pool._server.close()
    """
)


def start(tmp_path: Path, do: str) -> subprocess.Popen[str]:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    return subprocess.Popen(
        [sys.executable, str(script), do, str(tmp_path / "pids")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


def running_pids(driver: subprocess.Popen[str]) -> list[int]:
    """Of the server and the workers, once two requests were served and two hang."""
    assert driver.stdout is not None
    assert driver.stdout.readline() == "started\n"
    found = set()
    for _ in range(2):
        _, status, worker, server = driver.stdout.readline().split()
        assert status == "ok"
        found |= {int(worker), int(server)}
    assert not any(map(gone, found))
    return sorted(found)


@pytest.mark.parametrize("do", ["hang_deaf", "hang_in_c", "hang_with_descendants"])
def test_killed_driver_leaves_nothing(tmp_path: Path, do: str) -> None:
    driver = start(tmp_path, do)
    pids = running_pids(driver)
    noted = tmp_path / "pids"
    if do == "hang_with_descendants":
        assert wait_until(lambda: noted.exists() and len(noted.read_text().split()) == 4)
        pids += [int(line) for line in noted.read_text().split()]
    driver.kill()
    driver.wait()
    assert wait_until(lambda: all(map(gone, pids)), 2.0)
    driver.communicate()


def test_driver_killed_while_modules_are_preloaded(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pids')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    code = (
        "from fuzz.campaign.server import Server\n"
        "from fuzz.campaign.worker import Job, Worker\n"
        "Worker(Job('os:getpid'), Server(preload=['slow_import'])).run({}, 1.0)\n"
    )
    paths = environment()
    paths["PYTHONPATH"] = os.pathsep.join([str(tmp_path), paths["PYTHONPATH"]])
    driver = subprocess.Popen([sys.executable, "-c", code], env=paths)
    noted = tmp_path / "pids"
    assert wait_until(lambda: noted.exists() and noted.read_text() != "")
    driver.kill()
    driver.wait()
    assert wait_until(lambda: gone(int(noted.read_text())), 2.0)


def test_killed_server_takes_the_workers_along(tmp_path: Path) -> None:
    driver = start(tmp_path, "hang_in_c")
    pids = running_pids(driver)
    driver.send_signal(signal.SIGSTOP)  # it can do nothing about it
    for pid in pids:
        if _parent(pid) == driver.pid:
            os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: all(map(gone, pids)), 2.0)
    driver.kill()
    driver.communicate()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def test_interrupted_driver_cleans_up(tmp_path: Path) -> None:
    driver = start(tmp_path, "hang_deaf")
    pids = running_pids(driver)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors
    assert driver.returncode == -signal.SIGINT
    assert wait_until(lambda: all(map(gone, pids)), 2.0)


@pytest.mark.parametrize("way", ["file", "module", "stdin", "command"])
def test_main_is_not_imported_again(tmp_path: Path, way: str) -> None:
    (tmp_path / "a_driver.py").write_text(DRIVER)
    arguments = {
        "file": [str(tmp_path / "a_driver.py")],
        "module": ["-m", "a_driver"],
        "stdin": ["-"],
        "command": ["-c", DRIVER],
    }[way]
    done = subprocess.run(
        [sys.executable, *arguments, "nothing", "-"],
        input=DRIVER if way == "stdin" else "",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=30,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "started"
    assert [line.split()[:2] for line in lines[1:]] == [[str(index), "ok"] for index in range(4)]
    assert done.stderr == ""


def test_foreign_modules_of_our_names(tmp_path: Path) -> None:
    """Run where `fuzz/` is someone else's and `json.py` shadows the library: the right ones are used."""
    (tmp_path / "fuzz").mkdir()
    (tmp_path / "fuzz" / "__init__.py").write_text("raise RuntimeError('the wrong fuzz')\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')\n")
    root = str(Path(__file__).parents[3])
    code = (
        f"import sys, json; sys.path.insert(0, {root!r})\n"
        f"import fuzz; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from fuzz.campaign.server import Server\n"
        "from fuzz.campaign.worker import Job, Worker\n"
        "server = Server(preload=())\n"
        "with server, Worker(Job('suites.fuzz.campaign.faults:misbehave'), server) as worker:\n"
        "    print(worker.run({'do': 'nothing'}, 10.0).status.value)\n"
    )
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, env=plain)
    assert done.stdout == "ok\n", done.stderr
