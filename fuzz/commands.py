"""What the commands that run targets do, without the parsing of their options."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fuzz import engine as engines
from fuzz import ledger, registry
from fuzz.campaign.finding import Finding, findings_of
from fuzz.campaign.run import Campaign, Outcome, Settings, open_pool, run_cases
from fuzz.case import Case, CaseError, case_from_dict
from fuzz.report import summary as summaries
from fuzz.support import unsupported
from fuzz.versions import versions
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict


class Exit(IntEnum):
    """Exit codes. Where several apply: 3, 2, 1, 125, 0."""

    CLEAN = 0
    FINDINGS = 1
    USAGE = 2
    HARNESS = 3
    NOTHING = 125
    BISECT_ABORT = 128


class Stop(Exception):
    """End the command with an exit code and, perhaps, one line."""

    def __init__(self, code: Exit, message: str = "") -> None:
        super().__init__(message)
        self.code = code


def parse_engine(name: str) -> Engine:
    """The engine that ``--engine`` names. Raises ``Stop`` (usage) or ``EngineError`` (cannot run here)."""
    if name == "auto":
        return engines.detect()
    if name not in tuple(Engine):
        raise Stop(Exit.USAGE, f"--engine: {name!r}; allowed: auto, {', '.join(Engine)}")
    engine = Engine(name)
    reason = engines.unavailable(engine)
    if reason is not None:
        raise engines.EngineError(f"--engine {reason}")
    return engine


def duration(option: str, text: str) -> float:
    """Seconds in ``90s``, ``10m``, ``2h`` or a plain number of seconds. Raises ``Stop``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise Stop(Exit.USAGE, f"{option}: {text!r}; allowed: a time above zero such as 90s, 10m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def built_in_ledger() -> tuple[ledger.Defect, ...]:
    """The known defects that ship with us. Raises ``LedgerError``."""
    return ledger.load(Path(str(files("suites.gpu_diff") / "ledger.toml")))


def runnable(declarations: Sequence[Declaration], engine: Engine) -> tuple[list[Declaration], dict[str, str]]:
    """Targets that can run on ``engine`` here, and why each of the others cannot."""
    reasons = {d.name: registry.why_not(d, engine) for d in declarations}
    return [d for d in declarations if reasons[d.name] is None], {n: r for n, r in reasons.items() if r is not None}


def exit_code(found: Sequence[Finding], harness_errors: int, ran: int) -> Exit:
    """The exit code of a run, by precedence. Known defects are no findings."""
    if harness_errors:
        return Exit.HARNESS
    if any(f.known is None for f in found):
        return Exit.FINDINGS
    return Exit.CLEAN if ran else Exit.NOTHING


# ------------------------------------------------------------------------- run


def run_case(case: Case, patterns: Sequence[str], engine: Engine, modules: tuple[str, ...], as_json: bool) -> None:
    """Judge one case on the targets that support it. Ends with ``Stop`` unless all is clean."""
    known = registry.load(modules)
    chosen = registry.select(known, patterns)
    if not patterns:
        chosen = [d for d in chosen if d.operation is case.operation]
    able, skipped = runnable(chosen, engine)
    skipped |= {d.name: reason for d in able if (reason := unsupported(d, case)) is not None}
    names = [d.name for d in able if d.name not in skipped]
    settings = Settings(engine=engine, modules=modules, versions=versions())
    with open_pool(settings) as pool:
        outcomes = list(run_cases(pool, iter([(name, case) for name in names]), settings))
    _report_outcomes(outcomes, skipped, settings, as_json)


def replay_findings(path: Path, engine: Engine, modules: tuple[str, ...], as_json: bool) -> None:
    """Run the case of one finding, or of every finding in a folder, on its target."""
    pairs = [_read_finding(file) for file in _finding_files(path)]
    known = registry.load(modules)
    able, skipped = runnable(registry.select(known, sorted({target for target, _ in pairs})), engine)
    names = {d.name for d in able}
    settings = Settings(engine=engine, modules=modules, versions=versions())
    with open_pool(settings) as pool:
        outcomes = list(run_cases(pool, (pair for pair in pairs if pair[0] in names), settings))
    _report_outcomes(outcomes, skipped, settings, as_json)


def _finding_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("finding-*.json"))
    if not found:
        raise Stop(Exit.USAGE, f"{path}: holds no finding-*.json")
    return found


def _read_finding(path: Path) -> tuple[str, Case]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Stop(Exit.USAGE, f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Stop(Exit.USAGE, f"{path}: not JSON: {str(error)[:120]}") from None
    if not isinstance(data, dict) or not isinstance(data.get("target"), str):
        raise Stop(Exit.USAGE, f"{path}: finding.target: missing; allowed: a target's name")
    try:
        return data["target"], case_from_dict(data.get("case"))
    except CaseError as error:
        raise Stop(Exit.USAGE, f"{path}: {error}") from None


def _report_outcomes(
    outcomes: Sequence[Outcome], skipped: Mapping[str, str], settings: Settings, as_json: bool
) -> None:
    found = [f for o in outcomes for f in findings_of(o.target, o.case, o.result, settings)]
    errors = [o.harness_error for o in outcomes if o.harness_error]
    judged = [o for o in outcomes if not o.harness_error and o.result.verdict is not Verdict.UNSUPPORTED]
    if as_json:
        print(json.dumps(_outcomes_dict(outcomes, skipped, settings, found), indent=2))
    else:
        for outcome in outcomes:
            _print_outcome(outcome)
        for name, reason in skipped.items():
            print(f"{name}: unsupported: {reason}")
    code = exit_code(found, len(errors), len(judged))
    if code is not Exit.CLEAN:
        line = errors[0] if errors else "nothing asked for can run here" if code is Exit.NOTHING else ""
        raise Stop(code, line)


def _print_outcome(outcome: Outcome) -> None:
    result = outcome.result
    if outcome.harness_error:
        print(f"{outcome.target}: the harness failed")
        return
    ratio = "" if result.worst_ratio is None else f", worst error/budget {result.worst_ratio:.3g}"
    print(f"{outcome.target}: {result.verdict}{f': {result.reason}' if result.reason else ''}{ratio}")
    for check in result.checks:
        print(f"    {check.verdict:<8} {check.check:<12} {check.message}".rstrip())


def _outcomes_dict(
    outcomes: Sequence[Outcome], skipped: Mapping[str, str], settings: Settings, found: Sequence[Finding]
) -> dict[str, Any]:
    targets: dict[str, Any] = {}
    for outcome in outcomes:
        entry = targets.setdefault(
            outcome.target, {"cases": 0, "elements": 0, "verdicts": {}, "skipped": {}, "findings": [], "time": {}}
        )
        result = outcome.result
        entry["cases"] += 1
        entry["elements"] += result.elements
        entry["verdicts"][result.verdict.value] = entry["verdicts"].get(result.verdict.value, 0) + 1
        if result.reason:
            entry["skipped"][result.reason] = entry["skipped"].get(result.reason, 0) + 1
        entry["time"] = dict(outcome.seconds)
        entry["checks"] = [check.to_dict() for check in result.checks]
    for finding in found:
        targets[finding.target]["findings"].append(finding.to_dict())
    for name, reason in skipped.items():
        targets.setdefault(name, {"cases": 0, "verdicts": {}, "skipped": {reason: 1}, "findings": []})
    return {
        "schema": summaries.SCHEMA,
        "seed": None,
        "engine": settings.engine,
        "versions": dict(settings.versions),
        "targets": targets,
        "harness_errors": [o.harness_error for o in outcomes if o.harness_error],
    }


# ------------------------------------------------------------------------ fuzz


def run_fuzz(
    patterns: Sequence[str],
    *,
    cases: int | None,
    time_s: float | None,
    seed: int,
    engine: Engine,
    jobs: int | None,
    out: Path,
    use_ledger: bool,
    modules: tuple[str, ...],
    as_json: bool,
) -> None:
    """Search, keep the findings in ``out``, print the table. Ends with ``Stop`` unless all is clean."""
    chosen = registry.select(registry.load(modules), patterns)
    able, skipped = runnable(chosen, engine)
    settings = Settings(
        engine=engine,
        seed=seed,
        jobs=jobs or default_jobs(engine),
        modules=modules,
        ledger=built_in_ledger() if use_ledger else (),
        versions=versions(),
    )
    campaign = Campaign(able, settings, cases, time_s)
    with open_pool(settings) as pool, progress(campaign):
        try:
            campaign.run(pool)
        except KeyboardInterrupt:
            Console(stderr=True).print("interrupted: what was found so far follows")
    finish(campaign, skipped, out, as_json)


def default_jobs(engine: Engine) -> int:
    """Worker processes: one a core on the CPU; on a GPU a few, so that compilation overlaps with running."""
    cores = len(os.sched_getaffinity(0))
    return cores if engine is Engine.EMULATOR else min(cores, 8)


@contextmanager
def progress(campaign: Campaign) -> Iterator[None]:
    """A live bar on a terminal; elsewhere a plain line now and then. On stderr."""
    console = Console(stderr=True)
    total = None if campaign.cases is None else campaign.cases * len(campaign.targets)
    if not console.is_terminal:
        every = max(1, (total or 1000) // 10)
        done = 0

        def line(outcome: Outcome, found: list[Finding]) -> None:
            nonlocal done
            done += 1
            if done % every == 0:
                console.print(f"{done}{f' of {total}' if total else ''} cases")

        campaign.on_outcome = line
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("cases", total=total)

        def step(outcome: Outcome, found: list[Finding]) -> None:
            bar.update(task, advance=1, description=outcome.target)
            for finding in found:
                if finding.known is None:
                    bar.console.print(f"{finding.target}: {finding.check}: {finding.message}", markup=False)

        campaign.on_outcome = step
        yield


def finish(campaign: Campaign, skipped: Mapping[str, str], out: Path, as_json: bool) -> None:
    """Write the findings, print the result, end with ``Stop`` unless all is clean."""
    found = [f for s in campaign.summaries.values() for f in s.findings]
    paths = write_findings(found, out)
    if as_json:
        print(json.dumps(summaries.to_dict(campaign, skipped, paths), indent=2))
    else:
        console = wide_console()
        summaries.print_findings(found, paths, console)
        summaries.print_table(campaign, skipped, console)
    ran = sum(s.cases - s.verdicts[Verdict.UNSUPPORTED] for s in campaign.summaries.values())
    code = exit_code(found, len(campaign.harness_errors), ran)
    if code is not Exit.CLEAN:
        errors = [o.harness_error for o in campaign.harness_errors]
        raise Stop(code, errors[0] if errors else "nothing asked for can run here" if code is Exit.NOTHING else "")


def wide_console() -> Console:
    """Stdout; where it is no terminal, wide enough for a table without folded words."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def write_findings(found: Sequence[Finding], out: Path) -> dict[str, str]:
    """One file for each distinct finding, ``finding-ID.json``. Returns the path by id.

    Raises ``Stop`` where the folder cannot be written.
    """
    paths = {}
    try:
        for finding in summaries.distinct(found):
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"finding-{finding.id}.json"
            path.write_text(json.dumps(finding.to_dict(), indent=2) + "\n", encoding="utf-8")
            paths[finding.id] = str(path)
    except OSError as error:
        raise Stop(Exit.USAGE, f"--out {out}: cannot be written: {error.strerror}") from None
    return paths
