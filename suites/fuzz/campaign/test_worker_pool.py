"""The pool: order, bound, faults in the middle, early ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fuzz.campaign.pool import Pool
from fuzz.campaign.reply import Status
from fuzz.campaign.server import Server
from fuzz.campaign.worker import Job
from suites.fuzz.campaign.test_worker import gone, wait_until

JOB = Job("suites.fuzz.campaign.faults:misbehave")
LONG = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(preload=["suites.fuzz.campaign.faults"]) as server:
        yield server


def echoes(count: int) -> Iterator[dict[str, Any]]:
    return ({"do": "nothing", "echo": index} for index in range(count))


def mixed() -> list[dict[str, Any]]:
    faults: dict[int, dict[str, Any]] = {
        3: {"do": "segfault"},
        4: {"do": "raise_lines"},
        7: {"do": "hang_deaf"},
        8: {"do": "sleep", "seconds": 0.1, "echo": 8},
        11: {"do": "exit_quietly", "code": 0},
    }
    return [faults.get(index, {"do": "nothing", "echo": index}) for index in range(16)]


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_replies_are_the_same_for_any_number_of_workers(server: Server, jobs: int) -> None:
    with Pool(JOB, jobs, server) as pool:
        replies = list(pool.map(mixed(), 1.0))
    assert [index for index, _ in replies] == list(range(16))
    bad = {index: reply.status for index, reply in replies if not reply.ok}
    assert bad == {3: Status.CRASH, 4: Status.EXCEPTION, 7: Status.HANG, 11: Status.CRASH}
    assert all(reply.value["echo"] == index for index, reply in replies if reply.value is not None)
    assert not any(reply.harness for _, reply in replies)


def test_nothing_to_do(server: Server) -> None:
    with Pool(JOB, 2, server) as pool:
        assert list(pool.map([], LONG)) == []


def test_requests_are_taken_as_needed(server: Server) -> None:
    taken = 0

    def requests() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for request in echoes(20):
            taken += 1
            yield request

    with Pool(JOB, 2, server) as pool:
        for index, _ in pool.map(requests(), LONG):
            assert index < taken <= index + 4
    assert taken == 20


def test_a_request_may_wait_for_replies(server: Server) -> None:
    replies: list[int] = []

    def requests() -> Iterator[dict[str, Any] | None]:
        for index, request in enumerate(echoes(9)):
            # Each third one is known when all before it are answered.
            while index % 3 == 0 and len(replies) < index:
                yield None
            yield request

    with Pool(JOB, 2, server) as pool:
        for index, reply in pool.map(requests(), LONG):
            assert reply.value is not None
            replies.append(reply.value["echo"])
            assert replies[-1] == index
        assert replies == list(range(9))
        with pytest.raises(RuntimeError, match="waits for a reply, and none is to come"):
            list(pool.map([None], LONG))


def test_requests_are_iterated_in_the_callers_thread(server: Server) -> None:
    threads = set()

    def requests() -> Iterator[dict[str, Any]]:
        for request in echoes(5):
            threads.add(threading.get_ident())
            yield request

    with Pool(JOB, 2, server) as pool:
        assert len(list(pool.map(requests(), LONG))) == 5
    assert threads == {threading.get_ident()}


def test_workers_run_while_the_caller_is_busy(server: Server) -> None:
    with Pool(JOB, 1, server) as pool:
        replies = pool.map([{"do": "nothing"}, {"do": "hang_deaf"}, {"do": "nothing"}], 0.5)
        value = next(replies)[1].value
        assert value is not None
        assert wait_until(lambda: gone(value["pid"]))  # killed in time, before its reply is asked for
        assert next(replies)[1].status is Status.HANG
        assert next(replies)[1].ok


def test_workers_stay_warm_between_maps(server: Server) -> None:
    with Pool(JOB, 2, server) as pool:
        first = {reply.value["pid"] for _, reply in pool.map(echoes(6), LONG) if reply.value}
        second = {reply.value["pid"] for _, reply in pool.map(echoes(6), LONG, jobs=1) if reply.value}
    assert len(second) == 1
    assert second <= first


def pids(server: Server) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        if parent == server.pid:
            found.append(int(entry))
    return found


def test_closing_the_iterator_kills_what_runs(server: Server) -> None:
    threads = threading.active_count()
    pool = Pool(JOB, 2, server)
    requests: list[dict[str, Any]] = [{"do": "nothing"}, *[{"do": "hang_deaf"}] * 5]
    replies = pool.map(requests, LONG)
    next(replies)
    assert wait_until(lambda: len(pids(server)) == 2)
    replies.close()  # type: ignore[attr-defined]
    assert wait_until(lambda: pids(server) == [])
    assert threading.active_count() == threads
    assert len(list(pool.map(echoes(3), LONG))) == 3  # and it serves again
    pool.close()
    assert wait_until(lambda: pids(server) == [])


def test_an_exception_of_the_requests_passes_through(server: Server) -> None:
    def requests() -> Iterator[dict[str, Any]]:
        yield from echoes(3)
        raise LookupError("no more cases")

    with Pool(JOB, 1, server) as pool:
        replies = pool.map(requests(), LONG)
        assert next(replies)[0] == 0
        with pytest.raises(LookupError, match="no more cases"):
            list(replies)
        assert wait_until(lambda: pids(server) == [])


def test_a_request_that_is_no_json_raises(server: Server) -> None:
    with Pool(JOB, 2, server) as pool, pytest.raises(TypeError):
        list(pool.map([{"do": "nothing"}, {"do": {1}}, {"do": "nothing"}], LONG))


def test_keyboard_interrupt_shuts_everything_down() -> None:
    with Pool(JOB, 2, Server(preload=())) as pool:
        server = pool._server
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            list(pool.map([{"do": "hang_deaf"}] * 8, LONG))
        assert wait_until(lambda: pids(server) == [])
        server.close()


def test_one_map_at_a_time(server: Server) -> None:
    with Pool(JOB, 1, server) as pool:
        first = pool.map(echoes(3), LONG)
        next(first)
        with pytest.raises(RuntimeError, match="under way"):
            next(pool.map(echoes(3), LONG))
        assert len(list(first)) == 2
        with pytest.raises(ValueError, match="at least 1"):
            pool.map(echoes(3), LONG, jobs=0)


def test_a_request_by_itself_has_a_new_process_of_the_same_server(server: Server) -> None:
    with Pool(JOB, 1, server) as pool:
        replies = pool.map(echoes(3), LONG)
        next(replies)
        warm = pids(server)
        by_itself = pool.alone({"do": "nothing", "echo": 9}, LONG)
        assert (by_itself.value or {})["echo"] == 9
        assert by_itself.fresh
        assert pool.alone({"do": "segfault"}, LONG).status is Status.CRASH
        assert wait_until(lambda: pids(server) == warm)
        assert [index for index, _ in replies] == [1, 2]


def test_a_pool_closes_the_server_that_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.campaign.pool.Server", lambda: Server(preload=()))
    with Pool(JOB) as pool:
        list(pool.map(echoes(1), LONG))
        pid = pool._server.pid
        assert pid is not None
    assert gone(pid)
