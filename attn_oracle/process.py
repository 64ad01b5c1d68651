"""The process of ours that draws and judges cases for this one: `fuzz.serve`, over lines of JSON."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
"""Where `oracle`, `fuzz` and `suites` of ours are."""

_START = "import sys; sys.path.insert(0, sys.argv[1]); from fuzz.serve_start import main; main()"
_TAIL = 2000


class UsageError(ValueError):
    """What was asked for cannot be: one line that names it and says what is allowed."""


class Unavailable(Exception):
    """What was asked for cannot run here. The message is the reason."""


class HarnessError(RuntimeError):
    """Our own code failed, not the kernel. Remedy: report it, with the text."""


class Process:
    """The other side of `fuzz.serve`. Started at the first request, ended by `close` or with this process."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self.opened: dict[str, tuple[tuple[str, ...], str, str]] = {}
        """of each target that the other side has: modules, the engine asked for, the engine it runs on"""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises UsageError, Unavailable or HarnessError."""
        return self._answer({"do": do, **request})

    def draw(self, target: str, pick: Callable[[dict[str, Any]], int]) -> dict[str, Any]:
        """Draw a case; `pick` answers {"choose": n} and {"integer": [low, high]}. What it raises ends the case."""
        said = self._answer({"do": "draw", "target": target})
        while "case" not in said:
            try:
                picked = pick(said)
            except BaseException:
                self._answer({"pick": None})
                raise
            said = self._answer({"pick": picked})
        return said

    def close(self) -> None:
        """End the process, if there is one."""
        if self._child is None:
            return
        child, self._child = self._child, None
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin, child.stdout:
            pass
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        child = self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(message) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise HarnessError(f"the process that judges cases ended: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "stop" in answer:
            raise UsageError(answer["stop"])
        if answer.get("skip") is not None:
            raise Unavailable(answer["skip"])
        if "harness" in answer:
            raise HarnessError("\n".join(filter(None, (answer["harness"], answer.get("traceback")))))
        return answer

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None:
            # Ours comes first; behind it the path of this session, on which the user's own modules are found.
            path = [str(ROOT), *(entry for entry in sys.path if entry and Path(entry) != ROOT)]
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
            atexit.register(self.close)
        return self._child

    def _tail(self) -> str:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - _TAIL))
        return self._said.read().decode("utf-8", "replace").strip() or "it said nothing"


_process: Process | None = None


def shared() -> Process:
    """The one of this session. A process that was forked has its own."""
    global _process
    if _process is None:
        _process = Process()
        os.register_at_fork(after_in_child=_forget)
    return _process


def _forget() -> None:
    global _process
    _process = None
