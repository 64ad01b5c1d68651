"""Times that can be compared: the candidates take turns within one run, and medians are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch


def nothing() -> None:
    """For devices that need no waiting."""


@dataclass(frozen=True)
class Times:
    """Seconds of each turn of one candidate."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


def take_turns(
    candidates: Mapping[str, Callable[[], object]], turns: int, wait: Callable[[], None] = nothing
) -> dict[str, Times]:
    """Times of each candidate over `turns` turns, after one that does not count.

    Each turn runs every candidate once, so that what else the machine does hits all of them alike. `wait` returns
    when the device is idle.
    """
    times = {name: Times() for name in candidates}
    for turn in range(turns + 1):
        for name, run in candidates.items():
            wait()
            start = time.perf_counter()
            run()
            wait()
            if turn:
                times[name].seconds.append(time.perf_counter() - start)
    return times


def ratio(times: Mapping[str, Times], above: str, below: str) -> float:
    """Ratio of two candidates' medians."""
    return times[above].median / times[below].median


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block torch uses so many threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shown(times: Mapping[str, Times]) -> str:
    """The times in words: medians and, since a busy machine shows in the difference, the best."""
    return ", ".join(f"{name} {1e3 * t.median:.4g} ms (best {1e3 * t.best:.4g})" for name, t in times.items())
