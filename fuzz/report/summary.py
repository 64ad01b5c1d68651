"""The result of a run: one JSON object for scripts, one table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuzz.campaign.finding import Finding
from fuzz.campaign.run import PHASES, Campaign, TargetSummary
from fuzz.check.diagnosis import told_of
from fuzz.plan import Coverage
from fuzz.report.failure import replay_command
from fuzz.space import Pair
from oracle.verdict import Verdict

SCHEMA = 1
NONE_SMALLER: Mapping[str, Finding] = {}


def to_dict(
    campaign: Campaign,
    skipped: Mapping[str, str],
    paths: Mapping[str, str],
    smaller: Mapping[str, Finding] = NONE_SMALLER,
) -> dict[str, Any]:
    """The JSON object of ``fuzz`` and gpu_diff.

    ``skipped`` says why a target did not run at all; ``paths`` maps a finding's id to the file that holds it,
    ``smaller`` to what it was made into.
    """
    settings = campaign.settings
    targets = {name: _target(summary, paths, smaller) for name, summary in campaign.summaries.items()}
    targets |= {name: _absent(reason) for name, reason in skipped.items()}
    return {
        "schema": SCHEMA,
        "seed": settings.seed,
        "engine": settings.engine,
        "versions": dict(settings.versions),
        "targets": targets,
        # How the targets' cases take turns depends on the number of workers.
        "harness_errors": [error.to_dict() for error in sorted(campaign.harness_errors, key=lambda e: e.target)],
    }


def _target(summary: TargetSummary, paths: Mapping[str, str], smaller: Mapping[str, Finding]) -> dict[str, Any]:
    return {
        "cases": summary.cases,
        "elements": summary.elements,
        "vacuous_elements": summary.vacuous_elements,
        "worst_ratio": summary.worst_ratio,
        "margins": dict(sorted(summary.margins.items())),
        "verdicts": {v.value: n for v, n in sorted(summary.verdicts.items())},
        "skipped": dict(summary.skipped),
        "coverage": coverage(summary.coverage),
        "findings": [_finding(f, paths) for f in shown(summary.findings, smaller)],
        "time": {name: round(summary.seconds[name], 4) for name in (*PHASES, "other")},
    }


def _absent(reason: str) -> dict[str, Any]:
    empty = dict.fromkeys((*PHASES, "other"), 0.0)
    return {"cases": 0, "elements": 0, "verdicts": {}, "skipped": {reason: 1}, "findings": [], "time": empty}


def _finding(finding: Finding, paths: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": finding.id,
        "signature": finding.signature,
        "check": finding.check,
        "diagnosis": finding.diagnosis,
        "message": finding.message,
        "worst_ratio": finding.worst_ratio,
        "case": paths.get(finding.id),
        "known": finding.known,
    }


def coverage(found: Coverage) -> dict[str, Any]:
    """Pairs and boundary classes seen and declared, and every hole by name.

    ``matrix`` has ``[feature, feature, pairs seen, pairs declared]`` for every two features that make pairs.
    """
    seen, declared = found.boundary_classes()
    wanted = Counter(_features(pair) for pair in found.wanted)
    reached = Counter(_features(pair) for pair in found.seen)
    return {
        "pairs": len(found.seen),
        "pairs_declared": len(found.wanted),
        "boundaries": boundaries(found),
        "holes": [words(pair) for pair in found.holes],
        "boundary_classes": sorted(seen),
        "boundary_classes_missing": sorted(declared - seen),
        "matrix": [[*names, reached[names], count] for names, count in sorted(wanted.items())],
    }


def _features(pair: Pair) -> tuple[str, ...]:
    return tuple(sorted(name for name, _ in pair))


def boundaries(found: Coverage) -> dict[str, dict[str, list[int]]]:
    """By dtypes and boundary class of a length: how many other features were tried with them, and how many can be."""
    missing = found.missing_cells()
    table: dict[str, dict[str, list[int]]] = {}
    for (dtypes, boundary), wanted in found.wanted_cells.items():
        cell = [len(wanted) - len(missing[dtypes, boundary]), len(wanted)]
        table.setdefault("/".join(dtypes), {})[boundary] = cell
    return table


def words(pair: Pair) -> str:
    """``name=label & name=label``."""
    return " & ".join(f"{name}={label}" for name, label in sorted(pair))


def distinct(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each fault that can be told apart: the one on the clearest case, of those the smallest."""
    groups: dict[tuple[str | None, ...], Finding] = {}
    for finding in findings:
        key = finding.fault
        if key not in groups or finding.size < groups[key].size:
            groups[key] = finding
    return list(groups.values())


def shown(findings: Sequence[Finding], smaller: Mapping[str, Finding]) -> list[Finding]:
    """Each distinct finding, or what it was made into; those that were made into the same case are one."""
    found = (smaller.get(finding.id, finding) for finding in distinct(findings))
    return list({finding.id: finding for finding in found}.values())


def print_table(campaign: Campaign, skipped: Mapping[str, str], console: Console) -> None:
    """Target, engine, cases, verdicts, coverage, skipped and why."""
    table = Table(title=f"{campaign.settings.engine} engine, seed {campaign.settings.seed}")
    for name in ("target", "cases", "verdicts", "elements", "err/budget", "pairs", "boundaries", "skipped"):
        table.add_column(name, overflow="fold")
    for name, summary in campaign.summaries.items():
        seen, declared = summary.coverage.boundary_classes()
        wanted = summary.coverage.wanted
        ratio = "" if summary.worst_ratio is None else f"{summary.worst_ratio:.2g}"
        table.add_row(
            name,
            str(summary.cases),
            _verdicts(summary),
            str(summary.elements),
            ratio,
            f"{len(summary.coverage.seen)}/{len(wanted)}",
            f"{len(seen)}/{len(declared)}",
            "; ".join(f"{reason}: {count}" for reason, count in summary.skipped.items()),
        )
    for name, reason in skipped.items():
        table.add_row(name, "0", "", "", "", "", "", reason)
    console.print(table)
    for name, summary in campaign.summaries.items():
        _print_holes(name, summary.coverage, console)


def _verdicts(summary: TargetSummary) -> Text:
    text = Text()
    for verdict in Verdict:
        if count := summary.verdicts[verdict]:
            style = "red" if verdict.is_finding else "green" if verdict is Verdict.PASS else "yellow"
            text.append(f"{', ' if text else ''}{verdict} {count}", style=style)
    if known := sum(1 for f in _cases_known(summary)):
        text.append(f" ({known} known)")
    return text


def _cases_known(summary: TargetSummary) -> set[str]:
    unknown = {f.case.to_json() for f in summary.unknown}
    return {f.case.to_json() for f in summary.findings} - unknown


def _print_holes(name: str, found: Coverage, console: Console) -> None:
    holes = found.holes
    if holes:
        shown = ", ".join(words(pair) for pair in holes[:3])
        console.print(f"{name}: {len(holes)} feature pairs never tried: {shown}{', ...' if len(holes) > 3 else ''}")


def print_findings(
    findings: Sequence[Finding], paths: Mapping[str, str], console: Console, options: Sequence[str] = ()
) -> None:
    """Each distinct finding: what failed, on which smallest case, and how to show it again.

    ``options`` are those that a replay needs.
    """
    for finding in distinct(findings):
        known = f"known defect {finding.known}" if finding.known else "NEW"
        console.print(Text(f"{finding.target}: {finding.check}: {known}", style="yellow" if finding.known else "red"))
        console.print(Text(f"    {finding.message}"))
        for line in told_of(finding.evidence):
            console.print(Text(f"    {line}"))
        if loosest := finding.evidence.get("loosest"):
            console.print(Text(f"    budget: the loosest is assumed of {', '.join(loosest)}"))
        if finding.id in paths:
            command = replay_command(paths[finding.id], options)
            # In one line however long it is, so that it can be copied.
            console.print(Text(f"    {command}"), soft_wrap=True)
