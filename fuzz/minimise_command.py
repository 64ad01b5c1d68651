"""``attn-oracle minimize`` and ``attn-oracle reproducer``: a finding made smaller, and a folder that shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fuzz import registry
from fuzz.campaign.finding import Finding, findings_of
from fuzz.campaign.minimise import Smaller, changes, minimise_finding
from fuzz.campaign.pool import Pool
from fuzz.campaign.run import run_cases
from fuzz.commands import Prepared, prepare_targets
from fuzz.errors import Exit, Stop, exit_of
from fuzz.finding_files import finding_files, read_finding
from fuzz.options import CASE_TIMEOUT_S
from fuzz.report.reproducer import open_reproducers, reproducers, write_reproducer
from fuzz.report.summary import SCHEMA
from fuzz.whole import write_whole
from oracle.kinds import Engine


def run_minimise(
    path: Path,
    engine: Engine,
    modules: tuple[str, ...],
    *,
    time_s: float,
    out: Path | None,
    jobs: int | None,
    as_json: bool,
    timeout_s: float = CASE_TIMEOUT_S,
) -> None:
    """Make the case of a finding smaller and write the finding to ``out``, or beside the old one."""
    known = registry.load(modules)
    given = read_finding(path, known)
    declaration = known[given.target]
    prepared = prepare_targets(
        [declaration], engine=engine, modules=modules, jobs=jobs, use_ledger=True, timeout_s=timeout_s
    )
    if prepared.skipped:
        raise Stop(Exit.NOTHING, f"{declaration.name}: {prepared.skipped[declaration.name]}")
    with prepared.pool() as pool:
        finding = _again(given, pool, prepared)
        found = minimise_finding(finding, declaration, pool, prepared.settings, time_s=time_s)
    target = (path.parent if out is None else out) / f"finding-{found.after.id}.json"
    _write(target, found.after)
    if as_json:
        print(json.dumps(_plain(found, target), indent=2))
    else:
        print(f"{declaration.name}: {finding.check}: {found.after.message}")
        print("\n".join(f"    {line}" for line in found.lines()))
        print(f"    {target}")


def _again(given: Finding, pool: Pool, prepared: Prepared) -> Finding:
    """The finding as it is here and now; its check must still fail. Raises ``Stop``."""
    (outcome,) = run_cases(pool, iter([(given.target, given.case)]), prepared.settings)
    if outcome.harness is not None:
        raise Stop(Exit.HARNESS, outcome.harness.message)
    if outcome.result.reason:
        raise Stop(Exit.NOTHING, f"{given.target}: {outcome.result.reason}")
    found = findings_of(given.target, given.case, outcome.result, prepared.settings)
    same = next((f for f in found if f.check is given.check), None)
    if same is None:
        failed = ", ".join(f.check for f in found)
        what = f"{given.check} does not fail here; what fails: {failed}" if failed else "nothing fails here"
        raise Stop(Exit.CLEAN, f"{given.target}: {what}")
    return same


def _showing(findings: Sequence[Finding], prepared: Prepared) -> tuple[list[Finding], list[tuple[Finding, str]]]:
    """Those that show here, and why each of the others does not.

    What was found on another engine is taken as it is: the calls are the same there.
    """
    showing: list[Finding] = []
    gone: list[tuple[Finding, str]] = []
    with prepared.pool() as pool:
        for finding in findings:
            try:
                if finding.engine is prepared.settings.engine:
                    _again(finding, pool, prepared)
                showing.append(finding)
            except Stop as stop:
                if stop.code is not Exit.CLEAN:
                    raise
                gone.append((finding, str(stop)))
    return showing, gone


def _write(path: Path, finding: Finding) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(finding.to_dict(), indent=2) + "\n")
    except OSError as error:
        raise Stop(exit_of(error), f"--out {path.parent}: cannot be written: {error.strerror}") from None


def _plain(found: Smaller, path: Path) -> dict[str, Any]:
    removed = [
        {"field": name, "before": old, "after": new} for name, old, new in changes(found.before.case, found.after.case)
    ]
    return {
        "schema": SCHEMA,
        "target": found.after.target,
        "check": found.after.check,
        "diagnosis": found.after.diagnosis,
        "removed": removed,
        "judged": found.judged,
        "complete": found.complete,
        "case": str(path),
    }


def run_reproducers(
    paths: Sequence[Path],
    engine: Engine,
    modules: tuple[str, ...],
    *,
    out: Path,
    jobs: int | None,
    as_json: bool,
    timeout_s: float = CASE_TIMEOUT_S,
) -> None:
    """Write a folder for each finding below ``out``: case, report, and a script where the calls can be written down."""
    known = registry.load(modules)
    findings = [read_finding(file, known) for path in paths for file in finding_files(path)]
    targets = list({f.target: known[f.target] for f in findings}.values())
    prepared = prepare_targets(targets, engine=engine, modules=modules, jobs=jobs, timeout_s=timeout_s)
    able, gone = _showing([f for f in findings if f.target not in prepared.skipped], prepared)
    written: list[dict[str, Any]] = []
    for finding, reason in gone:
        written.append({"finding": finding.id, "target": finding.target, "folder": None, "reason": reason})
        if not as_json:
            print(f"{reason}: no folder is written")
    with open_reproducers(prepared.settings) as pool:
        for finding, made in reproducers(pool, able, prepared.settings):
            folder = out / f"reproducer-{finding.id}"
            try:
                write_reproducer(folder, finding, made)
            except OSError as error:
                raise Stop(Exit.USAGE, f"--out {out}: cannot be written: {error.strerror}") from None
            written.append(
                {"finding": finding.id, "target": finding.target, "folder": str(folder), "reason": made.reason}
            )
            if not as_json:
                print(
                    f"{finding.target}: {finding.check}: {folder}{f': no script: {made.reason}' if made.reason else ''}"
                )
    if as_json:
        print(json.dumps({"schema": SCHEMA, "reproducers": written}, indent=2))
    for name, reason in prepared.skipped.items():
        Console(stderr=True).print(f"{name}: {reason}", markup=False)
    if not written:
        raise Stop(Exit.NOTHING, "no script can be made here")
