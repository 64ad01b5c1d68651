"""What a test session has asked for, and what its searches have found. The pytest plugin reads and writes both."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from attn_oracle.options import DEFAULT_OUT, Options, missing_device, unwritable
from attn_oracle.process import UsageError

PLUGIN = "attn_oracle_pytest"


class EngineUnavailable(UsageError):
    """The engine that is named for the whole run cannot run here. A test that was skipped for it would look green."""


def options(call: Options | None = None) -> Options:
    """The options in force: the command line's over the call's, over the marker's, over the configuration file's."""
    plugin = sys.modules.get(PLUGIN)
    if plugin is None:
        return call or Options()
    command, marker, configured = plugin.layers()
    found: Options = command.over((call or Options()).over(marker.over(configured)))
    return found


def engine(call: Options | None = None) -> str:
    """The engine in force, `auto` where none is named.

    Raises EngineUnavailable where the configuration file names one that cannot run here. One that a call or a marker
    names is that test's alone, and what the command line names was looked at before the first test.
    """
    chosen = options(call).engine or "auto"
    plugin = sys.modules.get(PLUGIN)
    if plugin is None or (call is not None and call.engine is not None):
        return chosen
    command, marker, configured = plugin.layers()
    if command.engine is marker.engine is None and configured.engine is not None:
        reason = missing_device(configured.engine)
        if reason is not None:
            said = f"attn_engine: {configured.engine!r} cannot run here: {reason}"
            raise EngineUnavailable(f"{said}; allowed: auto, emulator (--attn-engine=auto for one run)")
    return chosen


def check_out() -> None:
    """Raises UsageError where the configuration file names a folder of findings that cannot be written.

    What the command line names was looked at before the first test.
    """
    plugin = sys.modules.get(PLUGIN)
    if plugin is None:
        return
    command, _, configured = plugin.layers()
    if command.out is None and configured.out is not None and (reason := _unwritable(configured.out)) is not None:
        raise UsageError(f"attn_out {reason}")


_unwritable = cache(unwritable)
"""Once a session, whatever the number of its searches."""


@dataclass
class Record:
    """One search, as plain data goes into the report of its test."""

    target: str
    engine: str
    seed: int | None = None
    cases: int = 0
    elements: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    worst_ratio: float | None = None
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """by class of failure: finding, path, replay, text; unwritten, where its file could not be: why"""
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """judgements by case"""

    def count(self, judged: Mapping[str, Any]) -> None:
        """Add a case's judgement."""
        self.cases += 1
        self.elements += judged["elements"]
        self.verdicts[judged["verdict"]] = self.verdicts.get(judged["verdict"], 0) + 1
        ratio = judged["worst_ratio"]
        if ratio is not None:
            self.worst_ratio = max(ratio, self.worst_ratio or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a report: JSON, without the evidence that a finding's file holds."""
        return {
            "target": self.target,
            "engine": self.engine,
            "seed": self.seed,
            "cases": self.cases,
            "elements": self.elements,
            "verdicts": dict(self.verdicts),
            "worst_ratio": self.worst_ratio,
            "findings": [
                {
                    **{name: kept["finding"][name] for name in ("id", "signature", "check", "diagnosis", "message")},
                    **{name: kept[name] for name in ("case", "path", "replay")},
                    "unwritten": kept.get("unwritten"),
                }
                for kept in self.findings.values()
            ],
        }


records: list[Record] = []
"""Of the test that runs."""


def take() -> list[Record]:
    """The records since the last call, with every finding written to its file, or why it could not be."""
    found, records[:] = list(records), []
    for record in found:
        for kept in record.findings.values():
            _written(kept)
    return found


def keep(record: Record, kind: str, kept: dict[str, Any]) -> None:
    """Put a finding into a record, in place of that of the same class.

    The plugin writes what is kept when the test ends. Without it nobody would, so the file is written here.
    """
    if PLUGIN not in sys.modules:
        _unlink(record.findings.get(kind))
        _written(kept)
    record.findings[kind] = kept


def forget(record: Record) -> None:
    """Drop the findings of a record."""
    if PLUGIN not in sys.modules:
        for kept in record.findings.values():
            _unlink(kept)
    record.findings.clear()


def _written(kept: dict[str, Any]) -> None:
    """Write a finding's file. A disk that takes no more ends no test and no session: the finding is still told."""
    try:
        write(Path(kept["path"]), kept["finding"])
    except OSError as error:
        kept["unwritten"] = f"{kept['path']}: cannot be written: {error.strerror}"


def _unlink(kept: Mapping[str, Any] | None) -> None:
    if kept is not None and "unwritten" not in kept:
        Path(kept["path"]).unlink(missing_ok=True)


def path_of(finding: Mapping[str, Any]) -> Path:
    """Where a finding is kept: `attn-oracle replay` reads it."""
    return Path(options().out or DEFAULT_OUT) / f"finding-{finding['id']}.json"


def write(path: Path, finding: Mapping[str, Any]) -> None:
    """Write a finding's file, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(finding, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
