"""Cases a second of a campaign, beside the loop that one would write first: make a case, run the kernel, compare.

The loop is one process and does one thing after the other. It calls the kernel once for each case and compares with
a fixed tolerance; a campaign calls it three times and more, and checks memory, poison and relations too. Both take the
first cases of the same plans, the targets by turns, and both start from an empty cache of compiled kernels, in
processes that have started the device and Triton's driver.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fuzz import engine as engines
from fuzz import registry
from fuzz.bench.report import FUZZ_CPU, FUZZ_CUDA, Figure, NotMeasured
from fuzz.buffers import Poison
from fuzz.call import call
from fuzz.campaign.run import Campaign, Settings, open_pool, run_cases
from fuzz.case import Case, case_from_dict
from fuzz.commands import default_jobs
from fuzz.engine import loader
from fuzz.engine.emulator.facade import H200
from fuzz.instance import build
from fuzz.plan import Plan
from fuzz.space import Space
from oracle.attention import solve
from oracle.declare import Declaration
from oracle.kinds import Engine

TARGETS = ("sglang.triton.decode_grouped", "sglang.triton.extend_with_lse", "sglang.shuffle_5d.gather")
WARM_UP = "torch.sdpa_with_lse"
CPU_CASES = 8
GPU_CASES = 12
SEED = 6
MOST_TOKENS = 600
LOOP_S = 80.0
"""The loop begins no other case after so long: the campaign then has fewer as well."""
CACHE = "TRITON_CACHE_DIR"


def cpu_vs_naive() -> Figure:
    """On the CPU: our emulator, against Triton's interpreter."""
    return _figure(FUZZ_CPU, Engine.EMULATOR, CPU_CASES, "TRITON_INTERPRET=1")


def cuda_vs_naive() -> Figure:
    """On a GPU: the workers' compilations overlap."""
    return _figure(FUZZ_CUDA, engines.detect(), GPU_CASES, "compiled kernels")


def _figure(name: str, engine: Engine, cases: int, way: str) -> Figure:
    _check(engine)
    jobs = default_jobs(engine)
    with _empty_cache() as theirs:
        loop = _loop(engine, cases)
        compiled = _compiled(theirs)
    ran, raised = loop["ran"], loop["raised"]
    if not ran:
        raise NotMeasured(f"every call of the loop raised; the first: {raised[0]}")
    with _empty_cache() as own:
        ours = _campaign(ran, engine, jobs)
        words = f"{_compiled(own)} kernels compiled, {compiled} by the loop; " if compiled else ""
    kernel = sum(seconds for _, _, seconds, _ in ran)
    whole = sum(seconds for _, _, _, seconds in ran)
    left_out = f"; {len(raised)} left out, on which the loop's calls raise, the first: {raised[0]}" if raised else ""
    return Figure(
        name,
        whole / ours,
        "times",
        f"a loop over the same {len(ran)} cases of {', '.join(TARGETS)}, {way}, one after the other",
        True,
        f"{words}{jobs} workers {ours:.3g} s, the loop {whole:.3g} s, {kernel:.3g} s of it in calls{left_out}",
    )


def _compiled(cache: Path) -> int:
    """Kernels in a cache of Triton's: each has a file that lists its others."""
    return sum(1 for _ in cache.rglob("__grp__*.json"))


def _check(engine: Engine) -> None:
    if importlib.util.find_spec("triton") is None:
        raise NotMeasured("triton is not installed, and the loop runs the kernels with it")
    known = registry.load()
    for name in TARGETS:
        reason = registry.why_not(known[name], engine)
        if reason is not None:
            raise NotMeasured(f"{name}: {reason}")


@contextmanager
def _empty_cache() -> Iterator[Path]:
    before = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ[CACHE]
            else:
                os.environ[CACHE] = before


def _campaign(ran: Sequence[Sequence[Any]], engine: Engine, jobs: int) -> float:
    """Wall seconds; the workers are there before, as the loop's process is."""
    settings = Settings(engine=engine, seed=SEED, jobs=jobs)
    known = registry.load()
    with open_pool(settings) as pool:
        # No kernel of Triton's: the cache stays empty.
        Campaign([known[WARM_UP]], settings, cases=2 * jobs, time_s=None).run(pool)
        requests = [(name, case_from_dict(case)) for name, case, _, _ in ran]
        start = time.perf_counter()
        outcomes = list(run_cases(pool, iter(requests), settings))
        seconds = time.perf_counter() - start
    broken = next((outcome.harness for outcome in outcomes if outcome.harness is not None), None)
    if broken is not None:
        raise NotMeasured(f"the campaign failed: {broken.message}")
    return seconds


def _loop(engine: Engine, cases: int) -> dict[str, Any]:
    """Run the loop in a process of its own, since a process has one meaning of `triton`; and in another from the next
    case on where a kernel broke the device, which no later one can use.
    """
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    interpreted = {"TRITON_INTERPRET": "1"} if engine is Engine.EMULATOR else {}
    whole: dict[str, Any] = {"ran": [], "raised": []}
    first: int | None = 0
    while first is not None:
        left = LOOP_S - sum(seconds for *_, seconds in whole["ran"])
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-c",
                f"from fuzz.bench.naive import loop; loop{(engine.value, cases, first, left)}",
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **interpreted},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NotMeasured(f"the loop failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        found = json.loads(done.stdout.splitlines()[-1])
        for name, part in whole.items():
            part += found[name]
        first = found["next"]
    return whole


def loop(engine: str, cases: int, first: int, seconds: float) -> None:
    """The loop from case `first` on, printed as one line of JSON: what ran, with seconds of the call and of all; what
    raised; and the next case, if the device is broken. None is begun after so many seconds.
    """
    torch.set_num_threads(1)
    emulated = Engine(engine) is Engine.EMULATOR
    engines.start(Engine.CUDA if emulated else Engine(engine), compile_only=emulated)
    if emulated:
        loader.pretend(H200)
    else:
        engines.warm(Engine(engine))
    device = "cpu" if emulated else "cuda"
    known = registry.load()
    ran, raised, following, begun = [], [], None, time.perf_counter()
    for index, (name, case) in enumerate(by_turns(known, cases)):
        if index < first:
            continue
        start = time.perf_counter()
        if start - begun > seconds:
            break
        try:
            called = _one(known[name], case, device)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            raised.append(f"{type(error).__name__}: {error}"[:120])
            if not emulated and not engines.works(Engine(engine)):
                following = index + 1
                break
        else:
            ran.append((name, case.to_dict(), called, time.perf_counter() - start))
    print(json.dumps({"ran": ran, "raised": raised, "next": following}))


def by_turns(known: Mapping[str, Declaration], cases: int) -> Iterator[tuple[str, Case]]:
    """The first cases of each target's plan, one of each target after the other."""
    plans = [islice(Plan(Space(known[name], MOST_TOKENS), SEED), cases) for name in TARGETS]
    for turn in zip(*plans, strict=True):
        yield from zip(TARGETS, turn, strict=True)


def _one(target: Declaration, case: Case, device: str) -> float:
    """Make the case, run, compare. Seconds of the call."""
    instance = build(case, Poison.POSITIVE, device)
    start = time.perf_counter()
    outputs = call(target, instance)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if instance.problem is not None:
        torch.allclose(outputs["out"].double(), solve(instance.problem).out, atol=1e-2, rtol=1e-2, equal_nan=True)
    else:
        for wanted, found in zip(instance.linear.values(), outputs.values(), strict=True):
            torch.equal(wanted.to(device), found)
    return seconds
