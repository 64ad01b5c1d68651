"""Runs a job in a process of its own, with a watchdog: whatever the job does, the driver gets a `Reply`."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from fuzz.campaign.child import Child
from fuzz.campaign.job_loop import LOST_CHANNEL, encode
from fuzz.campaign.reply import Raised, Reply, Status, signal_name
from fuzz.campaign.server import Server

KERNEL = "kernel"
"""The phase in which a job runs the target. Failures before it are not the target's."""

_TICK_S = 0.05
_MEMORY_TICK_S = 0.01
_DUMP_S = 0.2  # what a hung worker gets to print its stacks
_CLOSED_CHANNEL_S = 1.0  # between the end of the channel and the end of the process
_UNKILLABLE_S = 10.0


@dataclass(frozen=True)
class Job:
    """What a worker runs: `function` is `module:name` of a `job_loop.JobFunction`, imported in the worker.

    `setup_function` (`module:name`), if given, is called once in each worker with `setup`, which is JSON.
    The job calls `progress(phase)` when it enters a phase; `kernel` is the one that runs the target, and has
    to be left with all asynchronous work done. It returns a JSON dict; a true value of the key `retire` asks
    for a new process for the next request (after an error that sticks to the process).
    """

    function: str
    setup_function: str | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in (self.function, self.setup_function or self.function):
            module, colon, name = path.partition(":")
            if not (module and colon and name):
                raise ValueError(f"a job is named module:function, not {path!r}")
        if self.setup and self.setup_function is None:
            raise ValueError("setup is given, but no setup_function to take it")


@dataclass(frozen=True)
class Limits:
    """What one worker may use, besides the request's timeout.

    `memory_bytes`: resident memory of the process (not of its children); `kernel_s`: seconds in the phase
    `kernel`; `boot_s`: seconds until it is ready, with the server's start; `reply_bytes`: size of a reply.
    """

    memory_bytes: int | None = None
    kernel_s: float | None = None
    boot_s: float = 120.0
    reply_bytes: int = 64 << 20


@dataclass(frozen=True)
class _Doom:
    """A sentence of the watchdog, and when it is carried out."""

    status: Status
    detail: str
    kill_at: float


class _Attempt:
    """One try of a request: where it is and how long it has been there."""

    def __init__(self, line: bytes, timeout_s: float, retried: bool) -> None:
        self.line = line
        self.timeout_s = timeout_s
        self.retried = retried
        self.fresh = True
        self.phase = "boot"
        self.reached_kernel = False
        self.seconds: dict[str, float] = {}
        self.deadline = float("inf")
        self.kernel_deadline = float("inf")
        self.doom: _Doom | None = None
        self.killed = False
        self._since = time.monotonic()

    def enter(self, phase: str, at: float) -> None:
        self.leave(at)
        self.phase = phase
        self.kernel_deadline = float("inf")
        self.reached_kernel |= phase == KERNEL

    def leave(self, at: float) -> None:
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + max(0.0, at - self._since)
        self._since = at


class Worker:
    """One worker process, replaced when it dies. Not for use by several threads at the same time.

    A request that fails before the phase `kernel`, in a process that has run kernels for earlier requests,
    is tried once more in a fresh process: an earlier kernel may have corrupted the memory of the first. So
    is one whose worker was lost together with the server. The second attempt's reply stands, with `retried`
    set. Otherwise failures in the phase `kernel` or later are never retried.
    """

    def __init__(self, job: Job, server: Server | None = None, limits: Limits | None = None) -> None:
        """Without a `server`, the worker makes one of its own, and closes it in `close`."""
        self._job = job
        self._limits = limits or Limits()
        self._server = server or Server()
        self._owns_server = server is None
        self._child: Child | None = None
        self._attempt: _Attempt | None = None
        self._request_id = 0
        self._ran_kernel = False  # the present process, for an earlier request
        self._channel_closed_at = float("inf")
        self._oom_kills = 0

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process, or it is not known yet."""
        return None if self._child is None else self._child.pid

    def run(self, request: dict[str, Any], timeout_s: float) -> Reply:
        """Runs one request. The timeout counts from when a worker that is ready gets it.

        Raises TypeError, ValueError or RecursionError for a request that is no JSON.
        """
        self.submit(request, timeout_s)
        try:
            while True:
                wait_for([self])
                reply = self.step()
                if reply is not None:
                    return reply
        except BaseException:
            self.discard()
            raise

    def submit(self, request: dict[str, Any], timeout_s: float) -> None:
        """Starts a request without waiting; call `step` until it returns the reply."""
        if self._attempt is not None:
            raise RuntimeError("the worker is busy")
        self._request_id += 1
        line = encode({"id": self._request_id, "request": request})
        if self._child is not None:
            self._child.exchange()
            if self._child.end is not None or self._child.closed_channel or self._child.violation:
                self.discard()  # it died between requests, of what an earlier one left behind
        self._begin(_Attempt(line, timeout_s, retried=False))

    def step(self) -> Reply | None:
        """Looks after the request that runs, without waiting. Returns its reply when there is one."""
        child, attempt = self._child, self._attempt
        if child is None or attempt is None:
            raise RuntimeError("the worker has no request")
        for message in child.exchange():
            reply = self._receive(attempt, message)
            if self._attempt is not attempt:  # replied, or begun again
                return reply
        if child.end is not None:
            return self._conclude(child, attempt)
        return self._watch(child, attempt)

    def watched(self) -> list[tuple[int, int]]:
        """(descriptor, poll events) that make a `step` worth while."""
        return [] if self._child is None else self._child.watched()

    def tick_s(self) -> float:
        """After how many seconds a `step` is due even if nothing has happened."""
        tick = _TICK_S if self._limits.memory_bytes is None else _MEMORY_TICK_S
        if self._attempt is None:
            return tick
        due = min(self._attempt.deadline, self._attempt.kernel_deadline) - time.monotonic()
        return max(0.001, min(tick, due))

    def discard(self) -> None:
        """Kills the process, if there is one, and forgets the request that runs. The next one starts anew."""
        if self._child is not None:
            self._child.close()
        self._child = None
        self._attempt = None

    def close(self) -> None:
        """Ends the process, and the server if it is the worker's own."""
        self.discard()
        if self._owns_server:
            self._server.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, attempt: _Attempt) -> None:
        if self._child is not None:
            self._attempt = attempt
            self._child.forget_output()
            attempt.phase = "start"
            attempt.fresh = not self._ran_kernel
            self._deliver(self._child, attempt)
            return
        self._ran_kernel = False
        self._channel_closed_at = float("inf")
        self._oom_kills = _kernel_oom_kills()
        boot = {
            "job": self._job.function,
            "setup_function": self._job.setup_function,
            "setup": dict(self._job.setup),
            "reply_bytes": self._limits.reply_bytes,
        }
        self._child = Child(self._server, boot, self._limits.reply_bytes)
        self._attempt = attempt
        attempt.deadline = time.monotonic() + self._limits.boot_s

    def _deliver(self, child: Child, attempt: _Attempt) -> None:
        child.send(attempt.line)
        now = time.monotonic()
        attempt.enter("start", now)
        attempt.deadline = now + attempt.timeout_s

    def _receive(self, attempt: _Attempt, message: dict[str, Any]) -> Reply | None:
        child = self._child
        if attempt.doom is not None or child is None:
            return None
        if "ready" in message and attempt.phase == "boot":
            self._deliver(child, attempt)
        elif "failed" in message:
            return self._settle(attempt, Status.EXCEPTION, raised=Raised(**message["failed"]), keep=False)
        elif message.get("id") != self._request_id:
            pass  # from a thread that an earlier request has left running
        elif "phase" in message:
            self._enter(attempt, message["phase"], message["t"])
        elif "value" in message:
            attempt.leave(message["t"])
            value = message["value"]
            return self._settle(attempt, Status.OK, value=value, keep=not value.get("retire"))
        elif "exception" in message:
            attempt.leave(message["t"])
            return self._settle(attempt, Status.EXCEPTION, raised=Raised(**message["exception"]), keep=True)
        return None

    def _enter(self, attempt: _Attempt, phase: str, at: float) -> None:
        attempt.enter(phase, at)
        if phase == KERNEL:
            self._ran_kernel = True
            if self._limits.kernel_s is not None:
                attempt.kernel_deadline = at + self._limits.kernel_s

    def _watch(self, child: Child, attempt: _Attempt) -> Reply | None:
        """Passes sentence on a worker that misbehaves, and carries it out."""
        now = time.monotonic()
        if attempt.doom is None:
            attempt.doom = self._sentence(child, attempt, now)
            if attempt.doom is not None and attempt.doom.status is Status.HANG:
                child.dump_stacks()
        doom = attempt.doom
        if doom is None or now < doom.kill_at:
            return None
        if not attempt.killed:
            child.kill()
            attempt.killed = True
        if now < doom.kill_at + _UNKILLABLE_S:
            return None
        attempt.leave(now)  # stuck in the kernel of the operating system: abandoned there
        detail = f"{doom.detail}; it can't be killed (pid {child.pid})"
        return self._settle(attempt, doom.status, detail=detail, keep=False)

    def _sentence(self, child: Child, attempt: _Attempt, now: float) -> _Doom | None:
        limits = self._limits
        if child.violation:
            return _Doom(Status.CRASH, child.violation, now)
        if limits.memory_bytes is not None and child.resident_bytes() > limits.memory_bytes:
            return _Doom(Status.OUT_OF_MEMORY, f"more than {limits.memory_bytes} bytes resident", now)
        if now >= attempt.deadline:
            limit = limits.boot_s if attempt.phase == "boot" else attempt.timeout_s
            return _Doom(Status.HANG, f"no answer within {limit:g} s", now + _DUMP_S)
        if now >= attempt.kernel_deadline:
            return _Doom(Status.HANG, f"in its kernel for more than {limits.kernel_s:g} s", now + _DUMP_S)
        if child.closed_channel:
            self._channel_closed_at = min(self._channel_closed_at, now)
            if now >= self._channel_closed_at + _CLOSED_CHANNEL_S:
                return _Doom(Status.CRASH, "the worker closed its channel", now)
        return None

    def _conclude(self, child: Child, attempt: _Attempt) -> Reply | None:
        """The process is gone. Who did it?"""
        attempt.leave(time.monotonic())
        assert child.end is not None
        code, doom = child.end.code, attempt.doom
        if doom is not None:
            return self._settle(attempt, doom.status, detail=doom.detail, keep=False)
        if code is None:
            detail = child.end.error
        elif code == LOST_CHANNEL:
            detail = "the worker's channel was closed or replaced"
        elif code < 0:
            detail = f"killed by {signal_name(-code)}"
        else:
            detail = f"exited with code {code} without a reply"
        status = Status.CRASH
        if code == -signal.SIGKILL and _kernel_oom_kills() > self._oom_kills:
            status, detail = Status.OUT_OF_MEMORY, "killed by the kernel for want of memory"
        return self._settle(attempt, status, detail=detail, exit_code=code, lost=code is None, keep=False)

    def _settle(
        self,
        attempt: _Attempt,
        status: Status,
        *,
        keep: bool,
        value: dict[str, Any] | None = None,
        raised: Raised | None = None,
        detail: str = "",
        exit_code: int | None = None,
        lost: bool = False,
    ) -> Reply | None:
        """Makes the reply, or begins the second attempt. `keep`: the process serves the next request."""
        child = self._child
        assert child is not None
        early = status is not Status.OK and not attempt.reached_kernel
        if not attempt.retried and (lost or (early and not attempt.fresh)):
            self.discard()
            self._begin(_Attempt(attempt.line, attempt.timeout_s, retried=True))
            return None
        if raised is not None:
            detail = f"{raised.type}: {raised.message}"
        reply = Reply(
            status=status,
            phase=attempt.phase,
            seconds=attempt.seconds,
            value=value,
            raised=raised,
            exit_code=exit_code,
            detail=detail,
            output="" if status is Status.OK else child.output(),
            harness=early,
            fresh=attempt.fresh,
            retried=attempt.retried,
        )
        self._attempt = None
        if not keep:
            self.discard()
        return reply


def wait_for(workers: Iterable[Worker], wake: int | None = None) -> None:
    """Waits until a `step` of one of the workers is due, or the descriptor `wake` is readable."""
    poller = select.poll()
    if wake is not None:
        poller.register(wake, select.POLLIN)
    tick = 60.0
    for worker in workers:
        tick = min(tick, worker.tick_s())
        for descriptor, events in worker.watched():
            poller.register(descriptor, events)
    poller.poll(tick * 1000)


def fair_memory_bytes(jobs: int) -> int:
    """A memory limit for each of `jobs` workers: together, four fifths of what machine or container has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:  # no cgroups, or none of version 2
        limit = "max"
    if limit.isdigit():
        memory = min(memory, int(limit))
    return memory * 4 // (5 * jobs)


def _kernel_oom_kills() -> int:
    """How many processes the kernel has killed for memory since it started; 0 where it does not say."""
    try:
        with open("/proc/vmstat", "rb") as file:
            for line in file:
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0
