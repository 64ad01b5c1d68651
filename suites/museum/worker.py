"""What a worker does for the museum: the ordinary job on a target's cases, over a mutated source tree or the real one.

Each request wants a process of its own, in which no target was loaded before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import suites
from fuzz.campaign import job
from fuzz.check.result import CaseResult


def run(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Judge ``request["cases"]`` on ``request["target"]`` in order; over a mutant, up to the first that fails.

    ``request["mutant"]`` is None, or ``folder``, ``path`` and ``lines`` of the mutant. Returns ``results`` of the
    cases, and ``executed``: whether one of the lines ran.
    """
    if "suites.targets" in sys.modules:
        raise RuntimeError("targets were loaded before: a mutant needs a new process")
    mutant, results = request["mutant"], []
    if mutant is not None:
        _use(Path(mutant["folder"]))
    job.setup({"engine": "emulator", "modules": [], "threads": 1})
    reached: set[int] = set()
    for case in request["cases"]:
        with lines_of(mutant and mutant["path"], reached):
            data = job.run({"target": request["target"], "case": case, "coverage": False}, progress)
        results.append(data)
        if mutant is not None and CaseResult.from_dict(data).failures:
            break
    executed = mutant is not None and bool(reached & set(mutant["lines"]))
    return {"results": results, "executed": executed, "retire": True}


def _use(folder: Path) -> None:
    """Let imports find the tree in ``folder`` first. Of our own package this module was imported before."""
    sys.path.insert(0, str(folder))
    if (folder / "suites").is_dir():
        suites.__path__.insert(0, str(folder / "suites"))


@contextmanager
def lines_of(path: str | None, reached: set[int]) -> Iterator[None]:
    """Within the block, lines of the file at ``path`` that run are added to ``reached``, in threads begun there too."""

    def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        reached.add(frame.f_lineno)
        return line

    def entered(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return line if frame.f_code.co_filename == path else None

    if path is None:
        yield
        return
    # Ranks have threads of their own (suites.targets.ranks).
    threading.settrace(entered)
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
