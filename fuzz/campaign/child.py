"""The driver's view of one forked worker process: three channels, none of which can block the driver."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
from dataclasses import dataclass
from typing import Any

from fuzz.campaign import job_loop
from fuzz.campaign.server import Server

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STEP_BYTES = 4 << 20  # read at most this much of a channel before looking at the clock again
_OUTPUT_KEPT = 16_384
_OUTPUT_SHOWN = 4096

_numbers = itertools.count(1)


@dataclass(frozen=True)
class End:
    """How a worker ended. `code`: exit code, negative for a signal; None: the server could not say."""

    code: int | None
    error: str = ""


class Child:
    """A worker process, from the order to fork it to the report of its end.

    The data socket carries lines of JSON both ways. A pipe carries what it prints, of which the tail is kept.
    A pipe from the server carries the pid, then the exit code; it is right even where the data socket isn't,
    because the worker has closed it, or has left children who hold it open.
    """

    def __init__(self, server: Server, boot: dict[str, Any], reply_bytes: int) -> None:
        self._server = server
        self._number = next(_numbers)
        self._line_limit = reply_bytes + (1 << 16)
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            self._data, there = socket.socketpair()
            ours.callback(self._data.close)
            theirs.callback(there.close)
            self._output, output = os.pipe()
            ours.callback(os.close, self._output)
            theirs.callback(os.close, output)
            self._report, report = os.pipe()
            ours.callback(os.close, self._report)
            theirs.callback(os.close, report)
            self._data.setblocking(False)
            os.set_blocking(self._output, False)
            os.set_blocking(self._report, False)
            server.spawn(self._number, [there.fileno(), output, report])
            self._open = ours.pop_all()
        self.pid: int | None = None
        self.end: End | None = None
        self.closed_channel = False
        self.violation = ""  # why what came from the worker is no protocol
        self._output_closed = False
        self._outgoing = bytearray(job_loop.encode(boot))
        self._incoming = bytearray()
        self._reported = b""
        self._tail = bytearray()

    def send(self, line: bytes) -> None:
        """Queues an encoded message; `exchange` writes what can't be written at once."""
        self._outgoing += line
        self._write()

    def exchange(self) -> list[dict[str, Any]]:
        """Writes and reads what can be without waiting; returns the messages that have arrived."""
        self._write()
        self._read_report()  # first: all that was sent before the end is then in the other channels
        self._read_output()
        return self._read_data()

    def watched(self) -> list[tuple[int, int]]:
        """(descriptor, poll events) for which `exchange` has something to do."""
        found = []
        if self.end is None:
            found.append((self._report, select.POLLIN))
        if not self._output_closed:
            found.append((self._output, select.POLLIN))
        if not self.closed_channel and not self.violation:
            found.append((self._data.fileno(), select.POLLIN | (select.POLLOUT if self._outgoing else 0)))
        return found

    def resident_bytes(self) -> int:
        """The resident memory of the worker process itself; 0 when it is not there."""
        if self.pid is None:
            return 0
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * _PAGE_BYTES
        except OSError:
            return 0

    def forget_output(self) -> None:
        """Drops what was printed up to now."""
        self._read_output()
        self._tail.clear()

    def output(self) -> str:
        """The last 4 KiB printed, without faulthandler's long list of extension modules."""
        lines = self._tail.split(b"\n")
        kept = b"\n".join(line for line in lines if not line.startswith(b"Extension modules:"))
        return kept[-_OUTPUT_SHOWN:].decode("utf-8", "replace")

    def dump_stacks(self) -> None:
        """Asks the worker's faulthandler for the Python stacks of its threads, into its output."""
        self._server.signal(self._number, signal.SIGQUIT)

    def kill(self) -> None:
        """Kills the worker's process group; `end` follows."""
        self._server.signal(self._number, signal.SIGKILL)

    def close(self) -> None:
        """Kills what may be left and closes the channels, without waiting: the server buries the dead."""
        if self.end is None:
            self.kill()
        self._open.close()

    def _write(self) -> None:
        while self._outgoing and not self.closed_channel:
            try:
                sent = self._data.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError:  # the worker's end is closed; reading shows it, after what was sent before
                self._outgoing.clear()
                return
            del self._outgoing[:sent]

    def _read_report(self) -> None:
        while self.end is None:
            piece = _read_some(self._report)
            if piece is None:
                return
            if not piece:
                self.end = End(None, "the worker server died")
                return
            self._reported += piece
            *lines, self._reported = self._reported.split(b"\n")
            for line in lines:
                report = json.loads(line)
                self.pid = report.get("pid", self.pid)
                if "exit" in report:
                    self.end = End(report["exit"])
                elif "error" in report:
                    self.end = End(None, report["error"])

    def _read_output(self) -> None:
        taken = 0
        while not self._output_closed and taken < _STEP_BYTES:
            piece = _read_some(self._output)
            if piece is None:
                return
            self._output_closed = not piece
            taken += len(piece)
            self._tail += piece
            del self._tail[:-_OUTPUT_KEPT]

    def _read_data(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        allowed = _STEP_BYTES if self.end is None else self._line_limit
        while allowed > 0 and not self.closed_channel and not self.violation:
            try:
                piece = self._data.recv(1 << 18)
            except BlockingIOError:
                break
            except ConnectionResetError:  # it ended with a request unread
                piece = b""
            self.closed_channel = not piece
            allowed -= len(piece)
            self._incoming += piece
            if b"\n" in piece:
                *lines, rest = self._incoming.split(b"\n")
                self._incoming = rest
                messages += self._parsed(lines)
            if len(self._incoming) > self._line_limit:
                self.violation = "the worker sent a line that is too long"
        return messages

    def _parsed(self, lines: list[bytearray]) -> list[dict[str, Any]]:
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.violation = "the worker wrote something else into its channel"
                break
            messages.append(message)
        return messages


def _read_some(descriptor: int) -> bytes | None:
    """What can be read now; empty at the end, None when there is nothing yet."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None
