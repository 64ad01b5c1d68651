"""The same cases over several versions of sglang, each unpacked wheel in a process of its own.

Only single files of sglang are executed, so that a wheel built for another Python serves as well: it is unpacked, not
installed. The result is a table of findings by version: where each was seen first, and where it was seen no more.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.table import Table

from fuzz.commands import wide_console
from fuzz.errors import Exit, Stop, exit_of

SCHEMA = 1
NEW = "new"
GLIBC = ("2_17", "2_28", "2_34", "2_35")
"""Of the wheels that may be asked for; nothing compiled in them is loaded."""

PYTHON = "3.12"


def parse_versions(text: str) -> list[str]:
    """The versions of ``--sglang A,B``, oldest first. Raises ``Stop`` (usage)."""
    try:
        return [str(v) for v in sorted({Version(part.strip()) for part in text.split(",")})]
    except InvalidVersion:
        raise Stop(Exit.USAGE, f"--sglang: {text[:60]!r}; allowed: versions, as in 0.5.15,0.5.23") from None


def unpacked(version: str, cache: Path) -> Path:
    """The folder that holds sglang's ``version``, downloaded once. Raises ``Stop`` where it cannot be had."""
    folder = cache / f"sglang-{version}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        platforms = [f"--platform=manylinux_{glibc}_{platform.machine()}" for glibc in GLIBC]
        options = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}", *platforms, "--dest", made]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, f"sglang=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = next(Path(made).glob("*.whl"), None)
        if done.returncode or wheel is None:
            raise Stop(Exit.USAGE, f"--sglang: sglang=={version} cannot be downloaded: {_why(done.stderr)}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(made) / "files")
        (Path(made) / "files").replace(folder)
    return folder


def _why(said: str) -> str:
    """The last error of pip's, which may say other things after it."""
    lines = said.strip().splitlines() or ["pip gave no wheel"]
    return next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])


@dataclass(frozen=True)
class Run:
    """What the command said with one version: its exit code and its JSON."""

    version: str
    code: int
    report: dict[str, Any]

    def findings(self) -> set[tuple[str, str, str]]:
        """Target, check, and the ledger's entry or ``new``."""
        return {
            (target, finding["check"], finding["known"] or NEW)
            for target, summary in self.report["targets"].items()
            for finding in summary["findings"]
        }

    def cases(self) -> int:
        """How many ran, of all targets."""
        return sum(summary["cases"] for summary in self.report["targets"].values())

    def ran(self, target: str) -> bool:
        """Whether any case of the target ran."""
        summary = self.report["targets"].get(target)
        return summary is not None and bool(summary["cases"])


def run(version: str, folder: Path, command: Sequence[str], arguments: Sequence[str], out: Path) -> Run:
    """``command`` in a process that finds sglang in ``folder``. Raises ``Stop`` where it gives no report."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder.resolve()))))
    whole = [sys.executable, *command, *arguments, "--json", "--out", str(out / f"sglang-{version}")]
    code, output = _output(whole, {**os.environ, "PYTHONPATH": path})
    try:
        report = json.loads(output)
    except ValueError:
        if code in (Exit.USAGE, Exit.NOTHING):
            # It has said why; every other version would say the same.
            raise Stop(Exit(code)) from None
        raise Stop(Exit.HARNESS, f"sglang {version}: the run ended with {code} and no report") from None
    used = report["versions"]["sglang"]
    if used != version:
        raise Stop(Exit.HARNESS, f"sglang {version}: the run had {used}, which comes first on the path")
    return Run(version, code, report)


def _output(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, bytes]:
    """Exit code and standard output of ``command``. What ends this process ends that one before it."""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as child:
        before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            output, _ = child.communicate()
        except KeyboardInterrupt:
            # From a terminal it gets the signal too, and ends in order.
            child.communicate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return child.returncode, output


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a finding: by version, whether it was seen (None: its target did not run), first seen, fixed in.

    The checks by which a target shows a known defect are one finding; of what is new each is one.
    """
    checks: dict[tuple[str, str], set[str]] = {}
    for target, check, entry in set().union(*(run.findings() for run in runs)):
        checks.setdefault((target, check if entry == NEW else entry), set()).add(check)
    return [_row(runs, target, name, own) for (target, name), own in sorted(checks.items())]


def _row(runs: Sequence[Run], target: str, name: str, checks: set[str]) -> dict[str, Any]:
    entry = NEW if name in checks else name
    found = {run.version: {check for t, check, e in run.findings() if (t, e) == (target, entry)} for run in runs}
    seen = {run.version: bool(found[run.version] & checks) if run.ran(target) else None for run in runs}
    shown = [version for version, there in seen.items() if there]
    later = [version for version, there in seen.items() if there is False and Version(version) > Version(shown[-1])]
    row = {"target": target, "checks": sorted(checks), "known": None if entry == NEW else entry, "seen": seen}
    return row | {"first_seen": shown[0], "fixed_in": next(iter(later), None)}


SEEN = {True: "seen", False: "-", None: "did not run"}


def cells(table: Sequence[dict[str, Any]], versions: Sequence[str]) -> list[list[str]]:
    """The table's head and its rows, as text."""
    head = ["target", "entry", "checks", *versions, "first seen", "fixed in"]
    return [
        head,
        *(
            [
                row["target"],
                row["known"] or NEW,
                ", ".join(row["checks"]),
                *(SEEN[row["seen"][version]] for version in versions),
                row["first_seen"],
                row["fixed_in"] or "",
            ]
            for row in table
        ),
    ]


def render(table: Sequence[dict[str, Any]], versions: Sequence[str]) -> Table:
    """The table for a terminal."""
    head, *body = cells(table, versions)
    shown = Table(title="findings by version of sglang")
    for name in head:
        shown.add_column(name, overflow="fold")
    for row in body:
        shown.add_row(*row)
    return shown


def markdown(table: Sequence[dict[str, Any]], versions: Sequence[str]) -> str:
    """The same as Markdown."""
    head, *body = cells(table, versions)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


def without_sweep(arguments: Sequence[str]) -> list[str]:
    """The command's own arguments less those of the sweep, which runs it: ``--sglang``, ``--out``, ``--json``."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--sglang", "--out"):
            skip = True
        elif argument != "--json" and not re.match(r"--(sglang|out)=", argument):
            kept.append(argument)
    return kept


def worst(codes: Sequence[int]) -> int:
    """The exit code of the whole, by the precedence of exit codes; the harness's for one that there is not."""
    order = (Exit.HARNESS, Exit.USAGE, Exit.FINDINGS, Exit.NOTHING, Exit.CLEAN)
    if any(code not in set(order) for code in codes):
        return int(Exit.HARNESS)
    return next(int(code) for code in order if code in codes)


def sweep(text: str, command: Sequence[str], arguments: Sequence[str], out: Path, as_json: bool) -> None:
    """Run ``python command arguments`` over the versions that ``text`` lists, and print the table.

    Wheels are kept under ``out``, and the table as ``sglang-versions.md``. Raises ``Stop`` with the exit code of the
    whole.
    """
    versions, console = parse_versions(text), Console(stderr=True)
    try:
        folders = {version: unpacked(version, out / "wheels") for version in versions}
    except OSError as error:
        raise _cannot_write(out, error) from None
    runs = []
    for version, folder in folders.items():
        console.print(f"sglang {version}")
        runs.append(run(version, folder, command, without_sweep(arguments), out))
    table = rows(runs)
    cases = {done.version: done.cases() for done in runs}
    counted = "cases: " + ", ".join(f"{count} with {version}" for version, count in cases.items())
    try:
        (out / "sglang-versions.md").write_text(f"{markdown(table, versions)}\n{counted}\n", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(out, error) from None
    if as_json:
        print(json.dumps({"schema": SCHEMA, "versions": versions, "cases": cases, "findings": table}, indent=2))
    else:
        if table:
            wide_console().print(render(table, versions))
        print(counted if table else f"no finding; {counted}")
    raise Stop(Exit(worst([done.code for done in runs])))


def _cannot_write(out: Path, error: OSError) -> Stop:
    return Stop(exit_of(error), f"--out {out}: cannot be written: {error.strerror}")
