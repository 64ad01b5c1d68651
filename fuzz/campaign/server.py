"""The driver's handle on the server process that forks workers (see `fork_server`)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import fuzz

# `fuzz` is imported from where the driver has it, whatever else of that name is on sys.path; then sys.path is
# the driver's. There is no __main__ to import again, so it makes no difference how the driver was started.
_START = """
import json, sys
a = json.loads(sys.argv[1])
sys.path[:] = [a["root"], *a["path"]]
from fuzz.campaign import fork_server
sys.path[:] = a["path"]
fork_server.main(a["control"], a["driver"], a["preload"])
"""
_EXIT_S = 5.0


class Server:
    """A process with modules preloaded, from which workers are forked. Started at the first use.

    `preload`: modules to import once (none may initialise CUDA). `env`: additions to the environment, which
    workers inherit. One that died is replaced at the next `spawn`. Safe to use from several threads.
    """

    def __init__(self, preload: Sequence[str] = ("torch",), env: Mapping[str, str] | None = None) -> None:
        self._preload = list(preload)
        self._env = dict(env or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no server."""
        return None if self._process is None else self._process.pid

    def spawn(self, worker: int, descriptors: Sequence[int]) -> None:
        """Orders a worker that gets `descriptors`: its socket, its output, where to report its end."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._restart()
            try:
                self._order({"order": "spawn", "worker": worker}, descriptors)
            except (BrokenPipeError, ConnectionResetError):  # it died since
                self._restart()
                self._order({"order": "spawn", "worker": worker}, descriptors)

    def signal(self, worker: int, signum: int) -> None:
        """Sends a signal to a worker (SIGKILL: to its whole process group), if it still is there."""
        with self._lock:
            if self._link is None:
                return
            # A dead server: its workers are dead with it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._order({"order": "signal", "worker": worker, "signal": int(signum)})

    def close(self) -> None:
        """Ends the server and every worker; returns when they are gone. A later `spawn` starts anew."""
        with self._lock:
            self._stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, message: dict[str, object], descriptors: Sequence[int] = ()) -> None:
        assert self._link is not None
        socket.send_fds(self._link, [json.dumps(message).encode()], list(descriptors))

    def _restart(self) -> None:
        self._stop()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = {
            "root": str(Path(fuzz.__path__[0]).resolve().parent),
            "path": [entry for entry in sys.path if isinstance(entry, str)],  # as the import system does
            "control": there.fileno(),
            "driver": os.getpid(),
            "preload": self._preload,
        }
        with there:
            try:
                # -P: the current folder must not come before the standard library.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _START, json.dumps(arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                    start_new_session=True,
                    env={**os.environ, **self._env},
                )
            except BaseException:
                here.close()
                raise
        self._link = here

    def _stop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            try:
                self._process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
