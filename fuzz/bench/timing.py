"""Times that can be compared: the candidates take turns within one run, and medians are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch


def nothing() -> None:
    """For devices that need no waiting."""


def medians(
    candidates: Mapping[str, Callable[[], object]], turns: int, wait: Callable[[], None] = nothing
) -> dict[str, float]:
    """Median seconds of each candidate over `turns` turns, after one that does not count.

    Each turn runs every candidate once, so that what else the machine does hits all of them alike. `wait` returns
    when the device is idle.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns + 1):
        for name, run in candidates.items():
            wait()
            start = time.perf_counter()
            run()
            wait()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(found) for name, found in seconds.items()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block torch uses so many threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shown(seconds: Mapping[str, float]) -> str:
    """The times in words."""
    return ", ".join(f"{name} {1e3 * value:.4g} ms" for name, value in seconds.items())
