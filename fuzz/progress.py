"""How a search shows that it gets on: on stderr, a live bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fuzz.campaign.finding import Finding
from fuzz.campaign.run import Campaign, Outcome

LINE_EVERY_S = 15.0
"""Off a terminal, the longest silence of a search."""

Step = Callable[[Outcome, list[Finding]], None]


@contextmanager
def progress(campaign: Campaign) -> Iterator[Step]:
    """A live bar on a terminal; elsewhere a plain line now and then. On stderr."""
    console = Console(stderr=True)
    total = None if campaign.cases is None else campaign.cases * len(campaign.targets) // campaign.shard.of
    done = sum(summary.cases for summary in campaign.summaries.values())
    if not console.is_terminal:
        with _plain_progress(console, done, total) as line:
            yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("cases", total=total, completed=done)

        def step(outcome: Outcome, found: list[Finding]) -> None:
            bar.update(task, advance=1, description=outcome.target)
            for finding in found:
                if finding.known is None:
                    bar.console.print(f"{finding.target}: {finding.check}: {finding.message}", markup=False)

        yield step


@contextmanager
def _plain_progress(console: Console, done: int, total: int | None) -> Iterator[Step]:
    """A line for every tenth of the cases, and whenever nothing was said for ``LINE_EVERY_S``."""
    every = max(1, (total or 1000) // 10)
    began, said, ended = monotonic(), threading.Event(), threading.Event()

    def say() -> None:
        console.print(f"{done}{f' of {total}' if total else ''} cases, {monotonic() - began:.0f} s")

    def line(outcome: Outcome, found: list[Finding]) -> None:
        nonlocal done
        done += 1
        if done % every == 0:
            said.set()
            say()

    def break_silence() -> None:
        while not ended.wait(LINE_EVERY_S):
            if not said.is_set():
                say()
            said.clear()

    # A thread, as a single case may take minutes.
    thread = threading.Thread(target=break_silence, name="progress", daemon=True)
    thread.start()
    try:
        yield line
    finally:
        ended.set()
        thread.join()
