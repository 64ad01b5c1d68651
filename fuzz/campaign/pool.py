"""Many workers: a stream of requests in, replies out in the order of the requests."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import TracebackType
from typing import Any

from fuzz.campaign.groups import Order, Queue
from fuzz.campaign.reply import Reply
from fuzz.campaign.server import Server
from fuzz.campaign.worker import Job, Limits, Worker, wait_for


class Pool:
    """Workers that share one server. One `map` at a time; workers stay warm between maps.

    Which worker gets which request depends on timing and on groups; the replies' order does not. A crash costs its own
    request only: the others in flight are with other workers.
    """

    def __init__(
        self,
        job: Job,
        jobs: int = 1,
        server: Server | None = None,
        limits: Limits | None = None,
        group: Callable[[dict[str, Any]], Hashable] | None = None,
    ) -> None:
        """Without a `server`, the pool makes one of its own, and closes it in `close`.

        `group` tells which requests share compiled kernels: see `groups`. To have a choice, the pool then looks
        further ahead.
        """
        self._job = job
        self._jobs = jobs
        self._server = server or Server()
        self._owns_server = server is None
        self._limits = limits
        self._workers: list[Worker] = []
        self._queue = Queue(group)
        self._ahead = 2 if group is None else 4
        self._mapping = False

    def map(
        self, requests: Iterable[dict[str, Any] | None], timeout_s: float, jobs: int | None = None
    ) -> Iterator[tuple[int, Reply]]:
        """Yields (index, reply) in index order, with at most 2 * jobs requests taken and not yet yielded, 4 * jobs
        where there are groups.

        `requests` is iterated in the caller's thread, when a reply is asked for; workers run on while the
        caller is busy with a reply. A request of None is none: what to ask next depends on replies that are still
        to come. RuntimeError if there are none. If the iterator is closed early, or an exception (Ctrl-C too) passes
        through it, every worker is killed; the pool can still be used again.
        """
        count = self._jobs if jobs is None else jobs
        if count < 1:
            raise ValueError(f"jobs must be at least 1, not {count}")
        while len(self._workers) < count:
            self._workers.append(Worker(self._job, self._server, self._limits))
        return self._map(iter(requests), timeout_s, count)

    def alone(self, request: dict[str, Any], timeout_s: float, limits: Limits | None = None) -> Reply:
        """Runs one request in a new process, which ends with it, beside the workers of a `map` that is under way."""
        worker = Worker(self._job, self._server, limits or self._limits)
        try:
            return worker.run(request, timeout_s)
        finally:
            worker.discard()

    def close(self) -> None:
        """Ends all workers, and the server if it is the pool's own. The next `map` would start them anew."""
        for worker in self._workers:
            worker.discard()
        if self._owns_server:
            self._server.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _map(
        self, requests: Iterator[dict[str, Any] | None], timeout_s: float, count: int
    ) -> Iterator[tuple[int, Reply]]:
        if self._mapping:
            raise RuntimeError("the pool has a map under way")
        self._mapping = True
        pump = _Pump(self._workers[:count], timeout_s, self._queue)
        finished = False
        try:
            pump.start()
            taken = yielded = 0
            exhausted = False
            while True:
                while not exhausted and taken - yielded < self._ahead * count:
                    try:
                        request = next(requests)
                    except StopIteration:
                        exhausted = True
                        break
                    if request is None:
                        break
                    pump.put(taken, request)
                    taken += 1
                if yielded == taken:
                    if exhausted:
                        break
                    raise RuntimeError("the next request waits for a reply, and none is to come")
                yield yielded, pump.get(yielded)
                yielded += 1
            finished = True
        finally:
            pump.stop()
            self._mapping = False
            if not finished:
                self.close()


class _Pump:
    """A thread that gives requests to idle workers and looks after the busy ones."""

    def __init__(self, workers: list[Worker], timeout_s: float, queue: Queue) -> None:
        self._workers = workers
        self._idle = list(range(len(workers)))
        self._busy: list[tuple[Order, int]] = []
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._queue = queue
        self._done: dict[int, Reply] = {}
        self._failure: BaseException | None = None
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="worker pump", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, index: int, request: dict[str, Any]) -> None:
        with self._changed:
            self._queue.put(index, request)
        os.write(self._wake_write, b".")

    def get(self, index: int) -> Reply:
        """Waits for the reply of a request. Raises what made the thread fail, if it did."""
        with self._changed:
            self._changed.wait_for(lambda: index in self._done or self._failure is not None)
            if index in self._done:
                return self._done.pop(index)
            assert self._failure is not None
            raise self._failure

    def stop(self) -> None:
        """Ends the thread; busy workers are left as they are."""
        self._stopping = True
        os.write(self._wake_write, b".")
        if self._thread.ident is not None:
            self._thread.join()
        self._queue.forget()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._assign()
                wait_for([self._workers[number] for _, number in self._busy], self._wake_read)
                self._drain_wake()
                self._step()
        except BaseException as error:  # noqa: BLE001 - raised again by `get`, in the caller's thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _assign(self) -> None:
        for number in list(self._idle):
            with self._changed:
                order = self._queue.take(number)
            if order is None:
                continue
            self._idle.remove(number)
            self._workers[number].submit(order.request, self._timeout_s)
            self._busy.append((order, number))

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 1 << 12)

    def _step(self) -> None:
        for entry in list(self._busy):
            order, number = entry
            reply = self._workers[number].step()
            if reply is not None:
                self._busy.remove(entry)
                self._idle.append(number)
                with self._changed:
                    self._queue.done(number, order)
                    self._done[order.index] = reply
                    self._changed.notify_all()
