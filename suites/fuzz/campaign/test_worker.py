"""Every fault that a job can have, as a real process: what the driver sees; and the next request runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzz.campaign import worker as worker_module
from fuzz.campaign.child import Child
from fuzz.campaign.reply import Reply, Status, signal_name
from fuzz.campaign.server import Server
from fuzz.campaign.worker import Job, Limits, Worker, fair_memory_bytes

JOB = Job("suites.fuzz.campaign.faults:misbehave", "suites.fuzz.campaign.faults:set_up", {"engine": "none"})
LONG = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(preload=["suites.fuzz.campaign.faults"]) as server:
        yield server


@pytest.fixture
def worker(server: Server) -> Iterator[Worker]:
    with Worker(JOB, server) as worker:
        yield worker


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    # It may end between the two looks.
    except (ProcessLookupError, FileNotFoundError):
        return True
    return stat.rpartition(b")")[2].split()[0] == b"Z"


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def still_serves(worker: Worker) -> bool:
    return worker.run({"do": "nothing", "echo": "again"}, LONG).ok


def crash_of(worker: Worker, request: dict[str, Any]) -> Reply:
    reply = worker.run(request, LONG)
    assert reply.status is Status.CRASH
    assert not reply.harness
    assert still_serves(worker)
    return reply


def exception_of(worker: Worker, request: dict[str, Any]) -> Reply:
    pid = worker.run({"do": "nothing"}, LONG).value
    reply = worker.run(request, LONG)
    assert reply.status is Status.EXCEPTION
    assert reply.raised is not None
    assert worker.run({"do": "nothing"}, LONG).value == pid  # the process lives on
    return reply


def test_a_good_request(worker: Worker) -> None:
    reply = worker.run({"do": "nothing", "echo": [1, "ü", None]}, LONG)
    assert reply.ok
    assert reply.value is not None
    assert reply.value["echo"] == [1, "ü", None]
    assert reply.value["setup"] == {"engine": "none"}
    assert reply.phase == "checks"
    assert list(reply.seconds) == ["boot", "start", "generate", "kernel", "oracle", "checks"]
    assert reply.output == ""
    assert reply.fresh
    assert not reply.harness


def test_the_process_serves_many_requests(worker: Worker) -> None:
    first, second = (worker.run({"do": "nothing"}, LONG) for _ in range(2))
    assert first.value == second.value
    assert (first.fresh, second.fresh) == (True, False)
    assert "boot" not in second.seconds


def test_seconds_go_to_the_phase_that_spent_them(worker: Worker) -> None:
    reply = worker.run({"do": "sleep", "seconds": 0.2, "at": "oracle"}, LONG)
    assert reply.seconds["oracle"] >= 0.2


def test_segfault(worker: Worker) -> None:
    reply = crash_of(worker, {"do": "segfault"})
    assert reply.exit_code == -signal.SIGSEGV
    assert reply.signal_name == "SIGSEGV"
    assert reply.detail == "killed by SIGSEGV"
    assert reply.phase == "kernel"
    assert "in segfault" in reply.output  # faulthandler's Python stack
    assert "Extension modules" not in reply.output


def test_segfault_after_the_kernel_is_not_the_harness(worker: Worker) -> None:
    reply = crash_of(worker, {"do": "segfault", "at": "checks"})
    assert reply.phase == "checks"


def test_stack_overflow_in_c(worker: Worker) -> None:
    assert crash_of(worker, {"do": "stack_overflow_in_c"}).signal_name == "SIGSEGV"


def test_abort_keeps_what_was_printed(worker: Worker) -> None:
    reply = crash_of(worker, {"do": "abort"})
    assert reply.signal_name == "SIGABRT"
    assert "about to abort" in reply.output


@pytest.mark.parametrize("code", [0, 5])
def test_exit_without_a_reply(worker: Worker, code: int) -> None:
    reply = crash_of(worker, {"do": "exit_quietly", "code": code})
    assert reply.exit_code == code
    assert reply.signal_name is None


def test_killed_from_outside(worker: Worker) -> None:
    reply = crash_of(worker, {"do": "kill_self"})
    assert reply.detail == "killed by SIGKILL"


def test_system_exit_is_an_exception(worker: Worker) -> None:
    reply = exception_of(worker, {"do": "system_exit"})
    assert reply.raised is not None
    assert reply.raised.type == "SystemExit"


def test_exception_is_described(worker: Worker) -> None:
    reply = exception_of(worker, {"do": "raise_lines"})
    assert reply.raised is not None
    assert reply.raised.type == "ValueError"
    assert reply.raised.message == r"first line second \udcff line"
    assert "in raise_lines" in reply.raised.traceback
    assert reply.detail == r"ValueError: first line second \udcff line"
    assert "printed before it raised" in reply.output
    assert reply.phase == "kernel"
    assert not reply.harness


def test_exception_that_cannot_say_what_it_is(worker: Worker) -> None:
    reply = exception_of(worker, {"do": "raise_in_str"})
    assert reply.detail == "Nasty: (its __str__ raised)"


def test_endless_recursion(worker: Worker) -> None:
    reply = exception_of(worker, {"do": "recurse"})
    assert reply.raised is not None
    assert reply.raised.type == "RecursionError"


@pytest.mark.parametrize("do", ["reply_nothing", "reply_no_json"])
def test_reply_that_is_no_json_object(worker: Worker, do: str) -> None:
    reply = exception_of(worker, {"do": do})
    assert reply.raised is not None
    assert reply.raised.type == "TypeError"


def test_large_reply(server: Server) -> None:
    with Worker(JOB, server, Limits(reply_bytes=8 << 20)) as worker:
        reply = worker.run({"do": "reply_large", "bytes": 7 << 20}, LONG)
        assert reply.value == {"text": "x" * (7 << 20)}
        too_large = exception_of(worker, {"do": "reply_large", "bytes": 9 << 20})
        assert "more than the limit of 8388608" in too_large.detail


def test_request_that_is_no_json(worker: Worker) -> None:
    with pytest.raises(TypeError):
        worker.run({"do": {1}}, LONG)
    assert still_serves(worker)


def test_large_request(worker: Worker) -> None:
    text = "y" * (3 << 20)
    reply = worker.run({"do": "nothing", "echo": text}, LONG)
    assert reply.value is not None
    assert reply.value["echo"] == text


@pytest.mark.parametrize("do", ["hang_deaf", "hang_in_c"])
def test_hang(worker: Worker, do: str) -> None:
    reply = worker.run({"do": do}, 0.2)
    assert reply.status is Status.HANG
    assert reply.phase == "kernel"
    assert sum(reply.seconds[phase] for phase in ("start", "generate", "kernel")) >= 0.2
    assert f"in {do}" in reply.output  # where it hung
    assert still_serves(worker)


def test_hang_in_the_kernel_phase_only(server: Server) -> None:
    with Worker(JOB, server, Limits(kernel_s=0.5)) as worker:
        assert worker.run({"do": "sleep", "seconds": 0.7, "at": "oracle"}, LONG).ok
        assert worker.run({"do": "sleep", "seconds": 5.0}, LONG).status is Status.HANG


def test_hang_takes_the_descendants_along(worker: Worker, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    reply = worker.run({"do": "hang_with_descendants", "pids": str(pids)}, 1.0)
    assert reply.status is Status.HANG
    children = [int(line) for line in pids.read_text().split()]
    assert len(children) == 2
    assert wait_until(lambda: all(map(gone, children)))


@pytest.mark.parametrize("then", ["segfault", "exit_quietly"])
def test_crash_takes_daemons_along(worker: Worker, tmp_path: Path, then: str) -> None:
    pids = tmp_path / "pids"
    # The daemon holds the worker's end of the channel open; the death is seen all the same.
    crash_of(worker, {"do": "leave_daemon", "pids": str(pids), "then": then, "code": 0})
    assert wait_until(lambda: gone(int(pids.read_text())))


def test_daemon_of_a_live_worker_is_let_be(worker: Worker, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert worker.run({"do": "leave_daemon", "pids": str(pids), "then": "nothing"}, LONG).ok
    assert still_serves(worker)
    worker.discard()
    assert wait_until(lambda: gone(int(pids.read_text())))


def test_a_forked_child_has_no_say(worker: Worker) -> None:
    reply = worker.run({"do": "fork_and_return_twice"}, LONG)
    assert reply.value is not None
    assert reply.value["pid"] == worker.pid
    assert reply.value["forked"] != 0
    for echo in range(20):  # the child must not take a request
        answer = worker.run({"do": "nothing", "echo": echo}, LONG)
        assert answer.value is not None
        assert answer.value["echo"] == echo
        assert answer.value["pid"] == reply.value["pid"]


def test_threads_left_running(worker: Worker) -> None:
    pid = worker.run({"do": "leave_threads"}, LONG).value
    assert worker.run({"do": "nothing"}, LONG).value == pid


def test_progress_of_an_earlier_request_does_not_count(worker: Worker) -> None:
    assert worker.run({"do": "report_for_ever"}, LONG).ok
    reply = worker.run({"do": "sleep", "seconds": 0.1}, LONG)
    assert reply.ok
    assert not reply.fresh
    assert list(reply.seconds) == ["start", "generate", "kernel", "oracle", "checks"]


def test_death_between_requests_is_nobodys(worker: Worker) -> None:
    assert worker.run({"do": "crash_later"}, LONG).ok
    pid = worker.pid
    assert pid is not None
    assert wait_until(lambda: gone(pid))
    reply = worker.run({"do": "nothing"}, LONG)
    assert reply.ok
    assert not reply.retried


def test_closed_low_descriptors_do_not_matter(worker: Worker) -> None:
    assert worker.run({"do": "close_low_descriptors"}, LONG).ok
    assert "in segfault" in worker.run({"do": "segfault"}, LONG).output  # and the output is captured again


@pytest.mark.parametrize("do", ["close_all_descriptors", "replace_descriptors"])
def test_lost_channel(worker: Worker, do: str) -> None:
    assert "channel was closed or replaced" in crash_of(worker, {"do": do}).detail


def test_lost_channel_of_a_worker_that_goes_on(worker: Worker) -> None:
    assert "closed its channel" in crash_of(worker, {"do": "close_all_and_hang"}).detail


def test_garbage_in_the_channel(worker: Worker) -> None:
    assert "something else" in crash_of(worker, {"do": "write_into_sockets"}).detail


def test_garbage_in_the_output(worker: Worker) -> None:
    assert worker.run({"do": "print_garbage", "then": "nothing"}, LONG).output == ""
    reply = crash_of(worker, {"do": "print_garbage", "then": "segfault"})
    assert "last words in C" in reply.output
    assert "last words in Python" in reply.output
    assert len(reply.output.encode("utf-8", "replace")) <= 3 * 4096


def test_memory_limit(server: Server) -> None:
    with Worker(JOB, server, Limits(memory_bytes=150 << 20)) as worker:
        reply = worker.run({"do": "eat_memory"}, LONG)
        assert reply.status is Status.OUT_OF_MEMORY
        assert reply.phase == "kernel"
        assert still_serves(worker)


def test_killed_by_the_kernel_for_memory(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's count of such kills is made up; that the reply follows it is real."""
    assert still_serves(worker)
    monkeypatch.setattr(worker_module, "_kernel_oom_kills", lambda: worker._oom_kills + 1)
    assert worker.run({"do": "kill_self"}, LONG).status is Status.OUT_OF_MEMORY
    assert worker.run({"do": "segfault"}, LONG).status is Status.CRASH


def test_share_of_the_memory() -> None:
    assert 0 < fair_memory_bytes(8) <= fair_memory_bytes(1) // 8


def test_process_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_UNKILLABLE_S", 0.1)
    with Server(preload=()) as server, Worker(JOB, server) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(Child, "kill", lambda self: None)
            reply = worker.run({"do": "hang_deaf"}, 0.1)
        assert reply.status is Status.HANG
        assert "can't be killed" in reply.detail
        assert still_serves(worker)


def test_retire(worker: Worker) -> None:
    reply = worker.run({"do": "retire"}, LONG)
    assert reply.ok
    next_reply = worker.run({"do": "nothing"}, LONG)
    assert reply.value is not None
    assert next_reply.value is not None
    assert next_reply.value["pid"] != reply.value["pid"]
    assert next_reply.fresh


@pytest.mark.parametrize(
    ("do", "timeout_s", "status"),
    [
        ("segfault", LONG, Status.CRASH),
        ("hang_deaf", 0.3, Status.HANG),
        ("raise_lines", LONG, Status.EXCEPTION),
    ],
)
def test_failure_before_any_kernel_is_the_harness(worker: Worker, do: str, timeout_s: float, status: Status) -> None:
    reply = worker.run({"do": do, "at": "generate"}, timeout_s)
    assert reply.status is status
    assert reply.phase == "generate"
    assert reply.harness
    assert not reply.retried


@pytest.mark.parametrize("then", ["segfault", "raise_lines"])
def test_failure_that_an_earlier_kernel_caused_is_retried(worker: Worker, then: str) -> None:
    assert worker.run({"do": "corrupt"}, LONG).ok
    reply = worker.run({"do": "mark_then_fail_when_used", "then": then, "at": "generate"}, LONG)
    assert reply.ok
    assert reply.retried
    assert reply.fresh


def test_failure_before_the_kernel_again_in_a_fresh_worker(worker: Worker) -> None:
    assert worker.run({"do": "nothing"}, LONG).ok
    reply = worker.run({"do": "segfault", "at": "generate"}, LONG)
    assert reply.status is Status.CRASH
    assert reply.harness
    assert reply.retried


def test_failure_in_the_kernel_of_a_used_worker_is_not_retried(worker: Worker) -> None:
    assert worker.run({"do": "corrupt"}, LONG).ok
    reply = worker.run({"do": "mark_then_fail_when_used", "then": "segfault"}, LONG)
    assert reply.status is Status.CRASH
    assert not reply.fresh
    assert not reply.retried


@pytest.mark.parametrize(
    ("job", "detail"),
    [
        (Job("no_such_module_here:run"), "ModuleNotFoundError: No module named 'no_such_module_here'"),
        (Job("os:no_such_function"), "AttributeError: module 'os' has no attribute 'no_such_function'"),
        (Job(JOB.function, JOB.setup_function, {"raise": True}), "ValueError: this set-up fails"),
    ],
)
def test_worker_that_cannot_start(server: Server, job: Job, detail: str) -> None:
    with Worker(job, server) as worker:
        for _ in range(2):
            reply = worker.run({}, LONG)
            assert reply.status is Status.EXCEPTION
            assert reply.phase == "boot"
            assert reply.detail == detail
            assert reply.harness


def test_preload_that_fails() -> None:
    with Server(preload=["no_such_module_here"]) as server, Worker(JOB, server) as worker:
        reply = worker.run({"do": "nothing"}, LONG)
        assert reply.status is Status.CRASH
        assert reply.detail.startswith("cannot preload no_such_module_here: ModuleNotFoundError")
        assert reply.harness


def test_server_killed_by_a_job(tmp_path: Path) -> None:
    with Server(preload=()) as server, Worker(JOB, server) as worker:
        reply = worker.run({"do": "kill_server", "once": str(tmp_path / "once")}, LONG)
        assert reply.ok
        assert reply.retried
        assert still_serves(worker)


def test_ctrl_c_does_not_reach_workers(worker: Worker) -> None:
    assert worker.run({"do": "nothing"}, LONG).ok
    pid = worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert worker.run({"do": "nothing"}, LONG).ok
    assert worker.pid == pid


def test_200_restarts_leak_nothing(server: Server) -> None:
    with Worker(JOB, server) as worker:
        assert still_serves(worker)
        assert server.pid is not None
        before = _descriptors(os.getpid()), _descriptors(server.pid)
        start = time.perf_counter()
        for round_ in range(200):
            do = ("kill_self", "exit_quietly", "retire", "close_all_descriptors")[round_ % 4]
            worker.run({"do": do, "code": 0}, LONG)
        print(f"{(time.perf_counter() - start) * 1000 / 200:.1f} ms per request and restart")
        assert still_serves(worker)
        assert (_descriptors(os.getpid()), _descriptors(server.pid)) == before
        assert wait_until(lambda: _children(server.pid) == [worker.pid])  # no zombie either


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _children(parent: int | None) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{entry}/stat").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(b")")[2].split()[1]) == parent:
            found.append(int(entry))
    return found


def test_restart_cost_with_torch() -> None:
    """The figures are printed (`pytest -rP`), not judged."""
    with Server() as server, Worker(JOB, server) as worker:
        start = time.perf_counter()
        assert still_serves(worker)
        print(f"first request: {time.perf_counter() - start:.2f} s")
        product = worker.run({"do": "multiply", "device": "cpu"}, LONG)  # threads work in a forked process
        assert product.value is not None
        assert product.value["sum"] == 256.0**3
        costs = []
        for _ in range(5):
            start = time.perf_counter()
            assert worker.run({"do": "segfault"}, LONG).status is Status.CRASH
            assert still_serves(worker)
            costs.append(time.perf_counter() - start)
        print(f"crash and restart: {sorted(costs)[len(costs) // 2] * 1000:.0f} ms")


def test_job_must_be_named_fully() -> None:
    with pytest.raises(ValueError, match="module:function"):
        Job("os.path.join")
    with pytest.raises(ValueError, match="setup_function"):
        Job("os:getpid", setup={"a": 1})


def test_signal_names() -> None:
    assert signal_name(11) == "SIGSEGV"
    assert signal_name(40) == "signal 40"
