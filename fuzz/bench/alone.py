"""Comparisons that need a process of their own, since a process has one engine and one meaning of `triton`.

Run as a program with the name of a comparison; prints the times as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from fuzz import engine as engines
from fuzz import registry
from fuzz.bench.report import NotMeasured
from fuzz.bench.timing import Times, take_turns
from fuzz.buffers import Poison
from fuzz.call import call
from fuzz.case import load_case
from fuzz.certify.compiled import load_kernels
from fuzz.engine.emulator import Options, session
from fuzz.instance import build
from oracle import philox
from oracle.kinds import Engine

GATHER = "sglang.shuffle_5d.gather"
CASE = Path(__file__).with_name("gather.json")
PAIRS = 16384
SEED = 3
TURNS = 5
_TIMEOUT_S = 300.0


def batched_and_serial() -> dict[str, Times]:
    """The gather on one case, emulated in batches and one program after the other; one thread."""
    engines.start(Engine.EMULATOR)
    target, instance = registry.load()[GATHER], build(load_case(CASE), Poison.POSITIVE)

    def run(options: Options) -> Callable[[], object]:
        def once() -> None:
            with session(options):
                call(target, instance)

        return once

    return take_turns({"serial": run(Options(serial=True)), "batched": run(Options())}, TURNS)


def interpreter_and_emulator() -> dict[str, Times]:
    """Our division kernel; one thread. The environment has TRITON_INTERPRET=1 already."""
    # On any engine but ours the kernels see the installed triton, which interprets here.
    interpreted, emulated = load_kernels(Engine.CUDA), load_kernels(Engine.EMULATOR)
    a = philox.uniform_int(SEED, 0, PAIRS, -1000, 1000).int()
    b = philox.uniform_int(SEED, 1, PAIRS, 1, 40).int()
    candidates = {"interpreter": lambda: interpreted.divide(a, b), "emulator": lambda: emulated.divide(a, b)}
    return take_turns(candidates, TURNS)


COMPARISONS = {f.__name__: f for f in (batched_and_serial, interpreter_and_emulator)}


def alone(name: str, **environment: str) -> dict[str, Times]:
    """A comparison's times, from a fresh process. Raises NotMeasured with its last line if that fails."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"from fuzz.bench.alone import main; main({name!r})"],
        env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise NotMeasured(lines[-1] if lines else f"the process ended with {done.returncode}")
    return {candidate: Times(seconds) for candidate, seconds in json.loads(done.stdout).items()}


def main(name: str) -> None:
    """Run a comparison here and print its times."""
    torch.set_num_threads(1)
    print(json.dumps({candidate: times.seconds for candidate, times in COMPARISONS[name]().items()}))
