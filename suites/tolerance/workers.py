"""Several processes of one command, each with a file of its own that it goes on from; nothing recorded is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 4.0
"""How long after its deadline a process may take to write what it has; then it is ended."""
_LOOK_S = 0.5
_COLLECT_S = 10.0
_STARTS = 20


@dataclass(eq=False)
class _Worker:
    command: Sequence[str]
    process: subprocess.Popen[bytes]
    starts: int = 1


def parts_of(out: Path) -> Path:
    """The folder of the parts that a file is the sum of."""
    return out.with_name(out.name + ".parts")


def marker_of(part: Path) -> Path:
    """Where a process says what it is about to try: what it says there when it begins, it did not survive."""
    return part.with_name(part.name + ".now")


def work(
    commands: Sequence[Sequence[str]],
    deadline: float,
    collect: Callable[[], None],
    ended: Sequence[int] = (0, 1, 2, 3, 125),
) -> list[int]:
    """Run Python with each of the arguments until `deadline` (`time.monotonic`, which processes share).

    A process that ends before its time with another code than `ended` is started again, and goes on from its file.
    `collect` is called now and then, and at the end. Returns how often each was started.
    """
    workers = [_Worker(command, _start(command)) for command in commands]
    told = time.monotonic()
    try:
        while (now := time.monotonic()) < deadline + GRACE_S:
            for worker in workers:
                code = worker.process.poll()
                if code is not None and code not in ended and now < deadline and worker.starts < _STARTS:
                    worker.process, worker.starts = _start(worker.command), worker.starts + 1
            if all(worker.process.poll() is not None for worker in workers):
                break
            if now - told > _COLLECT_S:
                told = now
                collect()
            time.sleep(_LOOK_S)
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait()
        collect()
    return [worker.starts for worker in workers]


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
