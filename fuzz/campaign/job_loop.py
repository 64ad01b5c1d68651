"""The worker's side: runs a job again and again in a forked process, and answers in lines of JSON.

The job is not trusted to behave. Its file descriptors 0, 1 and 2 are not the protocol's; the protocol's
descriptor has a high number, and is checked before each use; what the job leaves behind (threads, forked
children, redirected output) can neither answer for it nor read the next request.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

Progress = Callable[[str], None]
JobFunction = Callable[[dict[str, Any], Progress], dict[str, Any]]

LOST_CHANNEL = 71  # the exit code of a worker whose protocol descriptor was closed or replaced

_HIGH_DESCRIPTOR = 200  # above what jobs close or reuse by accident
_TRACEBACK_CHARS = 16_384


def encode(message: dict[str, Any]) -> bytes:
    """One line of JSON. Raises TypeError, ValueError or RecursionError for what JSON can't say."""
    return json.dumps(message).encode("ascii") + b"\n"


def run_jobs(data: int, output: int) -> NoReturn:
    """Serves requests from the socket `data` until its other end closes; stdout and stderr go to `output`."""
    channel = _Channel(_move_up(data))
    output = _move_up(output)
    _capture(output)
    _buffer_by_line()
    faulthandler.enable(file=output, all_threads=True)
    # The driver sends SIGQUIT to a hung worker, so that its stack is in the output before it is killed.
    faulthandler.register(signal.SIGQUIT, file=output, all_threads=True)

    boot = channel.receive()
    try:
        job = _prepare(boot)
    except BaseException as error:  # noqa: BLE001 - the boundary: whatever the import raises is reported
        channel.send(encode({"failed": _describe(error)}))
        os._exit(0)
    channel.send(encode({"ready": True}))
    while True:
        message = channel.receive()
        _capture(output)  # an earlier request may have closed or redirected them
        channel.send(_answer(job, message, channel, boot["reply_bytes"]))


def _prepare(boot: dict[str, Any]) -> JobFunction:
    job: JobFunction = _resolve(boot["job"])
    if boot["setup_function"] is not None:
        _resolve(boot["setup_function"])(boot["setup"])
    return job


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _answer(job: JobFunction, message: dict[str, Any], channel: _Channel, reply_bytes: int) -> bytes:
    number = message["id"]

    def progress(phase: str) -> None:
        if channel.is_mine():
            channel.send(encode({"id": number, "phase": str(phase), "t": time.monotonic()}))

    try:
        value = job(message["request"], progress)
        if not isinstance(value, dict):
            raise TypeError(f"the job returned {type(value).__name__}, not a dict")
        answer = encode({"id": number, "value": value, "t": time.monotonic()})
        if len(answer) > reply_bytes:
            raise ValueError(f"the reply has {len(answer)} bytes, more than the limit of {reply_bytes}")
    except BaseException as error:  # noqa: BLE001 - the boundary: SystemExit of a job is an answer too
        answer = encode({"id": number, "exception": _describe(error), "t": time.monotonic()})
    return answer


def _describe(error: BaseException) -> dict[str, str]:
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - a __str__ of others
        message = "(its __str__ raised)"
    text = "".join(traceback.format_exception(error))
    described = {
        "type": type(error).__name__,
        "message": message[:1000],
        "traceback": text[-_TRACEBACK_CHARS:],
    }
    # Lone surrogates would come through JSON, and break the first file or terminal that they are written to.
    return {key: text.encode("utf-8", "backslashreplace").decode() for key, text in described.items()}


class _Channel:
    """The worker's end of the socket: lines, from one process only (a forked child of a job ends here)."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._descriptor = descriptor
        self._inode = os.fstat(descriptor).st_ino
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._incoming = b""

    def is_mine(self) -> bool:
        return os.getpid() == self._pid

    def send(self, line: bytes) -> None:
        self._check()
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            os._exit(LOST_CHANNEL)

    def receive(self) -> dict[str, Any]:
        self._check()
        while b"\n" not in self._incoming:
            try:
                piece = self._socket.recv(1 << 16)
            except OSError:
                os._exit(LOST_CHANNEL)
            if not piece:
                os._exit(0)
            self._incoming += piece
        line, _, self._incoming = self._incoming.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _check(self) -> None:
        if not self.is_mine():
            os._exit(0)
        try:
            inode = os.fstat(self._descriptor).st_ino
        except OSError:
            os._exit(LOST_CHANNEL)
        if inode != self._inode:
            os._exit(LOST_CHANNEL)


def _move_up(descriptor: int) -> int:
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)
    except OSError:  # a descriptor limit below _HIGH_DESCRIPTOR
        return descriptor
    os.close(descriptor)
    return moved


def _capture(output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)


def _buffer_by_line() -> None:
    """What was printed before a crash must be in the output, C's stdout included."""
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    libc = ctypes.CDLL(None)
    line_buffered = 1  # _IOLBF in both glibc and musl
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, line_buffered, ctypes.c_size_t(0))
