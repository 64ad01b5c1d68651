"""Candidates that need a process of their own, since a process has one engine and one meaning of `triton`.

A process runs one case once for each line that it is sent, which says the way, and answers with a line of JSON: CPU
seconds, programs of the largest grid (of the emulator's launches), and the outputs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from fuzz import engine as engines
from fuzz import registry
from fuzz.bench import fixed
from fuzz.bench.report import NotMeasured
from fuzz.buffers import Poison
from fuzz.call import call
from fuzz.check.memory import IN_PLACE
from fuzz.check.scratch import poisoned_allocations
from fuzz.engine import loader
from fuzz.engine.emulator import Options, session
from fuzz.engine.emulator.facade import H200
from fuzz.instance import build
from fuzz.tensor_data import to_data
from oracle.kinds import Engine


class Way(StrEnum):
    """How a process runs its case."""

    BATCHED = "batched"
    """emulated, as ever"""
    SERIAL = "serial"
    """emulated, one program after the other"""
    INTERPRETED = "interpreted"
    """by Triton's own interpreter"""


class Process:
    """A process that runs one case."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def once(self, way: Way) -> dict[str, Any]:
        """Run the case once. A process of the interpreter is for it alone.

        Raises NotMeasured with the last line of the process's errors if it ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{way.value}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self._process.stdout.readline()
        if not answer:
            errors = self._process.communicate()[1].strip().splitlines()
            raise NotMeasured(errors[-1] if errors else f"the process ended with {self._process.returncode}")
        found: dict[str, Any] = json.loads(answer)
        return found


@contextmanager
def process(name: str) -> Iterator[Process]:
    """A fresh process that runs the case called `name`."""
    root = str(Path(__file__).parents[2])
    path = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", f"from fuzz.bench.alone import serve; serve({name!r})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            yield Process(started)
        finally:
            started.kill()


def serve(name: str) -> None:
    """What such a process does: run the case for each line that comes in."""
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(run(name, Way(line.strip()))), file=answers, flush=True)


def run(name: str, way: Way) -> dict[str, Any]:
    """Run the case once in this process."""
    if way is Way.INTERPRETED:
        # On any engine but ours kernels are loaded with the installed triton, which interprets on the CPU here.
        engines.start(Engine.CUDA, compile_only=True)
        loader.pretend(H200)
    else:
        engines.start(Engine.EMULATOR)
    target = registry.load()[fixed.target_of(name)]
    instance = build(fixed.case_of(name), Poison.POSITIVE)
    if target.reset is not None:
        target.reset()
    # Poisoned, so that what a kernel leaves unwritten compares as equal.
    with session(Options(serial=way is Way.SERIAL)) as log, poisoned_allocations(Poison.POSITIVE):
        start = time.process_time()
        outputs = call(target, instance)
        seconds = time.process_time() - start
    found = outputs or {buffer: instance.buffers[buffer].view for buffer in IN_PLACE}
    programs = max((launch.programs for launch in log.launches), default=0)
    return {"seconds": seconds, "programs": programs, "outputs": to_data(found)}
