"""Findings on disk, each written as soon as it is found: whatever ends the process, they are there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fuzz.campaign.finding import Finding
from fuzz.campaign.run import HarnessError
from fuzz.whole import write_whole


class Keeper:
    """One file in ``folder`` for each distinct finding, ``finding-ID.json``, and for each failure of our own code.

    A finding with a smaller case takes the place of the one that it makes superfluous, if that is this run's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failure: OSError | None = None
        """the first file that could not be written"""
        self.smaller: dict[str, Finding] = {}
        """what a finding that the search kept, by its id, was made into"""
        self._shown: dict[tuple[str | None, ...], Finding] = {}
        self._written: set[str] = set()
        self._older: set[str] = set()
        self._errors = 0

    def open(self) -> None:
        """Make the folder. Raises ``OSError`` where it cannot be made or nothing can be written to it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as probe:
            probe.write(b"x")

    def keep(self, findings: Iterable[Finding]) -> None:
        """Write what is new, or shows a fault on a smaller case. Never raises ``OSError``: see ``failure``."""
        for finding in findings:
            before = self._shown.get(finding.fault)
            if before is not None and before.size <= finding.size:
                continue
            if not self._write(_file(finding), finding.to_dict()):
                continue
            self._shown[finding.fault] = finding
            if before is not None and before.id != finding.id:
                self._remove(_file(before))

    def resume(self, findings: Iterable[Finding]) -> None:
        """Write what an earlier run of the same search found, if it is not there any more, and take it for ours."""
        findings = list(findings)
        self._written.update(_file(finding) for finding in findings)
        self.keep(findings)

    def replace(self, before: Finding, after: Finding) -> None:
        """Keep ``after`` in the place of ``before``, and of what that was made into so far, which it makes superfluous.

        Never raises ``OSError``.
        """
        if before == after or not self._write(_file(after), after.to_dict()):
            return
        superfluous = {_file(before), _file(self.smaller.get(before.id, before))}
        self.smaller[before.id] = after
        still_shown = {_file(finding) for finding in self.smaller.values()}
        for name in sorted(superfluous - still_shown):
            self._remove(name)

    def keep_error(self, error: HarnessError) -> None:
        """Write a failure of our own code."""
        self._write(f"harness-{self._errors}.json", error.to_dict())
        self._errors += 1

    @property
    def paths(self) -> dict[str, str]:
        """The file of each finding that was written, by the finding's id."""
        shown = [self.smaller.get(finding.id, finding) for finding in self._shown.values()]
        return {finding.id: str(self.folder / _file(finding)) for finding in shown}

    def _write(self, name: str, data: dict[str, Any]) -> bool:
        path = self.folder / name
        if name not in self._written and path.exists():
            self._older.add(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(data, indent=2) + "\n")
        except OSError as error:
            self.failure = self.failure or error
            return False
        self._written.add(name)
        return True

    def _remove(self, name: str) -> None:
        if name in self._older:
            return
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            self.failure = self.failure or error


def _file(finding: Finding) -> str:
    return f"finding-{finding.id}.json"
