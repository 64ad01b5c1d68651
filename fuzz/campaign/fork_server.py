"""The server process: imports what workers need once, then forks a worker for each order of its driver.

It has one thread, runs no target code, and is where all workers' processes can be accounted for: it is their
parent, and (as a child subreaper) becomes the parent of whatever they leave behind. Orders come as datagrams
on one socket, which also is its life line: when the driver ends, however it ends, the server kills all
workers with everything that they started, and exits. If the server itself is killed, the kernel kills the
workers (PR_SET_PDEATHSIG). The server has no such signal, which would come when the *thread* that started it
ends.

Standard library only: the driver starts it by `python -c`, with the driver's own sys.path.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

from fuzz.campaign import job_loop

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FAREWELL_S = 2.0
_PARENT_CHECK_MS = 300

_libc = ctypes.CDLL(None, use_errno=True)


def main(control: int, driver: int, preload: list[str]) -> None:
    """Serves until the socket with descriptor `control` is closed by the process `driver`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    link = socket.socket(fileno=control)
    # Python 3.12 warns of a fork in a process with threads; those here are idle ones of BLAS libraries,
    # which are built to be forked.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    failure = _preload_watched(link, driver, preload)
    gc.collect()
    gc.freeze()  # keeps the collector of each worker from touching, and so copying, shared pages
    _Server(link, driver, failure).serve()


def _preload_watched(link: socket.socket, driver: int, modules: list[str]) -> str | None:
    """Imports `modules`; exits at once if the driver goes meanwhile. Returns why it failed, or None."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.2):
            if _hung_up(link) or os.getppid() != driver:
                os._exit(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return _preload(modules)
    finally:
        finished.set()
        watcher.join()  # no thread of ours may be alive when a worker is forked


def _preload(modules: list[str]) -> str | None:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - an import may raise anything; the driver reports it
            return f"cannot preload {name}: {type(error).__name__}: {error}"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"preloading {', '.join(modules)} initialised CUDA, which a forked process can't use"
    return None


def _hung_up(link: socket.socket) -> bool:
    poller = select.poll()
    poller.register(link, 0)
    return bool(poller.poll(0))


@dataclass(frozen=True)
class _Forked:
    number: int  # the driver's name for the worker: a pid may be reused
    pid: int
    end: int  # where its pid and its exit code are reported


class _Server:
    def __init__(self, link: socket.socket, driver: int, failure: str | None) -> None:
        self._link = link
        self._driver = driver
        self._failure = failure
        self._workers: dict[int, _Forked] = {}  # by pid
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while os.getppid() == self._driver:
            ready = {descriptor for descriptor, _ in poller.poll(_PARENT_CHECK_MS)}
            if self._wake_read in ready:
                os.read(self._wake_read, 1 << 16)
                self._reap()
            if self._link.fileno() in ready and not self._obey():
                break
        self._farewell()

    def _obey(self) -> bool:
        """Takes one order; False when the driver has closed the link."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._link, 1 << 16, 3, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return False
        if not data:
            return False
        order = json.loads(data)
        if order["order"] == "spawn":
            self._spawn(order["worker"], *descriptors)
        else:
            self._signal(order["worker"], order["signal"])
        return True

    def _spawn(self, number: int, data: int, output: int, end: int) -> None:
        try:
            if self._failure is not None:
                _report(end, {"error": self._failure})
                os.close(end)
                return
            server = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                _report(end, {"error": f"cannot fork a worker: {error}"})
                os.close(end)
                return
            if pid == 0:
                self._become_worker(server, data, output, end)
            self._workers[pid] = _Forked(number, pid, end)
            _report(end, {"pid": pid})
        finally:
            os.close(data)
            os.close(output)

    def _become_worker(self, server: int, data: int, output: int, end: int) -> NoReturn:
        try:
            os.setsid()  # one kill reaches the worker and its children; no terminal's Ctrl-C does
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._link.close()
            for descriptor in (self._wake_read, self._wake_write, end):
                os.close(descriptor)
            for other in self._workers.values():
                os.close(other.end)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _volunteer_for_oom_kill()
            job_loop.run_jobs(data, output)
        finally:
            os._exit(70)  # whatever happened, a worker never goes on as a second server

    def _signal(self, number: int, signum: int) -> None:
        for worker in self._workers.values():
            if worker.number == number:
                if signum == signal.SIGKILL:
                    _kill_group(worker.pid)
                else:
                    os.kill(worker.pid, signum)

    def _reap(self) -> bool:
        """Buries every dead child, then kills what dead workers have left; False when no child is left."""
        buried = False
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if dead is None:
                break
            worker = self._workers.pop(dead.si_pid, None)
            if worker is not None:
                _kill_group(worker.pid)  # before it is waited for: until then no other can get its number
            _, status = os.waitpid(dead.si_pid, 0)
            if worker is not None:
                _report(worker.end, {"exit": os.waitstatus_to_exitcode(status)})
                os.close(worker.end)
            buried = True
        if buried:
            self._kill_strays()
        return True

    def _kill_strays(self) -> None:
        """Kills children that are no workers and in no live worker's session: dead workers left them.

        Their own children become the server's when they die, and are found the next time round. A daemon
        that a live worker has started in a session of its own is taken for a stray, too.
        """
        for pid, session in _children(os.getpid()):
            if pid not in self._workers and session not in self._workers:
                with contextlib.suppress(PermissionError):  # a program that runs as another user
                    os.kill(pid, signal.SIGKILL)

    def _farewell(self) -> None:
        for worker in self._workers.values():
            _kill_group(worker.pid)
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        end = time.monotonic() + _FAREWELL_S
        while self._reap() and time.monotonic() < end:
            poller.poll(20)


def _children(parent: int) -> list[tuple[int, int]]:
    """(pid, session) of each living child of `parent`."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The name in parentheses may hold anything; after it: state, ppid, pgrp, session.
                state, ppid, _, session = file.read().rpartition(b")")[2].split()[:4]
        except OSError:  # it ended meanwhile
            continue
        if int(ppid) == parent and state not in (b"Z", b"X"):
            found.append((int(entry), int(session)))
    return found


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # forked so recently that it has no group of its own yet
        os.kill(pid, signal.SIGKILL)


def _report(end: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the driver has lost interest in this worker
        os.write(end, job_loop.encode(message))


def _volunteer_for_oom_kill() -> None:
    # A /proc that does not allow it: then the kernel chooses by size.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
