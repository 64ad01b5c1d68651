"""Measure the figures that can be had here, and say why for each other one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial

from fuzz import engine as engines
from fuzz.bench import budget, campaign, emulator, naive, oracle, plugin
from fuzz.bench import report as names
from fuzz.bench.report import NAMES, BenchReport, Figure, NotMeasured, UnknownFigure
from oracle.kinds import Engine

Measure = Callable[[], Figure]


def bench(engine: Engine, only: Sequence[str] = ()) -> BenchReport:
    """Measure every figure whose name matches one of the globs in `only` (all where there are none).

    Figures of the CPU are measured on any engine, those of a GPU if `engine` is one that runs here. Takes minutes;
    progress goes to stderr. Raises UnknownFigure for a glob that matches nothing, and EngineError if `engine` cannot
    run here.
    """
    wanted = select(only)
    unavailable = engines.unavailable(engine)
    if unavailable is not None:
        raise engines.EngineError(unavailable)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        print(f"bench: this machine is busy (load {load:.1f}, {cores} cores): expect poor figures", file=sys.stderr)
    figures: list[Figure] = []
    reasons: dict[str, str] = {}
    for name in wanted:
        print(f"bench: {name}", file=sys.stderr, flush=True)
        try:
            figures.append(measure(name, engine))
        except NotMeasured as reason:
            reasons[name] = str(reason)
            print(f"bench: {name}: not measured: {reason}", file=sys.stderr, flush=True)
        else:
            print(f"bench: {name}: {figures[-1].value:.3g} {figures[-1].unit}", file=sys.stderr, flush=True)
    return BenchReport(tuple(figures), reasons)


def select(only: Sequence[str]) -> list[str]:
    """Names that match one of the globs, in the order of reports. Raises UnknownFigure."""
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in NAMES):
            raise UnknownFigure(f"figure {pattern!r}: unknown; known: {', '.join(NAMES)}")
    return [name for name in NAMES if not only or any(fnmatchcase(name, pattern) for pattern in only)]


def measure(name: str, engine: Engine) -> Figure:
    """One figure. Raises NotMeasured with the reason."""
    if name in _ON_GPU:
        if engine is Engine.EMULATOR:
            raise NotMeasured("needs a GPU: --engine cuda or hip")
        return _ON_GPU[name]()
    return _ON_CPU[name]() if name in _ON_CPU else campaign.overhead(engine)


_ON_CPU: dict[str, Measure] = {
    names.ORACLE_CPU: oracle.cpu_vs_sdpa,
    names.WORST_CASE: partial(budget.worst_case_cost, "cpu"),
    names.PROBABLE: partial(budget.probable_cost, "cpu"),
    names.TIGHTNESS: budget.tightness,
    names.DETECTED: budget.detected,
    names.INTERPRETER: emulator.vs_interpreter,
    names.BATCHED: emulator.batched_vs_serial,
    names.FUZZ_CPU: naive.cpu_vs_naive,
    names.PLUGIN: plugin.import_ms,
}
_ON_GPU: dict[str, Measure] = {
    names.ORACLE_CUDA: oracle.cuda_vs_sdpa,
    names.ORACLE_MATMUL: oracle.cuda_vs_matmul,
    names.ORACLE_MEMORY: oracle.cuda_memory_vs_sdpa,
    names.WORST_CASE_CUDA: partial(budget.worst_case_cost, "cuda"),
    names.PROBABLE_CUDA: partial(budget.probable_cost, "cuda"),
    names.FUZZ_CUDA: naive.cuda_vs_naive,
}
