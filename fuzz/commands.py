"""What the commands that run targets do, without the parsing of their options."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fuzz import engine as engines
from fuzz import ledger, registry
from fuzz.campaign.finding import Finding
from fuzz.campaign.pool import Pool
from fuzz.campaign.run import Campaign, HarnessError, Outcome, Settings, open_pool, run_cases
from fuzz.case import Case, CaseError, case_from_dict
from fuzz.report import summary as summaries
from fuzz.report.coverage import coverage_dict, coverage_lines, covered
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


@dataclass(frozen=True)
class Prepared:
    """Targets that can run, why others cannot, and how to run them."""

    targets: list[Declaration]
    skipped: dict[str, str]
    settings: Settings

    def campaign(self, cases: int | None, time_s: float | None) -> Campaign:
        """A search over the targets that can run."""
        return Campaign(self.targets, self.settings, cases, time_s)

    def pool(self) -> Pool:
        """Workers for it; use as a context manager."""
        return open_pool(self.settings)


def prepare(
    patterns: Sequence[str],
    *,
    engine: Engine,
    modules: tuple[str, ...],
    seed: int = 0,
    jobs: int | None = None,
    use_ledger: bool = False,
    coverage: bool = False,
) -> Prepared:
    """Load and select targets. Raises ``RegistryError`` and ``LedgerError``."""
    able, skipped = runnable(registry.select(registry.load(modules), patterns), engine)
    settings = Settings(
        engine=engine,
        seed=seed,
        jobs=jobs or default_jobs(engine),
        modules=modules,
        ledger=built_in_ledger() if use_ledger else (),
        versions=versions(),
        coverage=coverage,
    )
    return Prepared(able, skipped, settings)


# --------------------------------------------------------------- run and replay


def run_case_files(
    cases: Sequence[Case],
    patterns: Sequence[str],
    engine: Engine,
    modules: tuple[str, ...],
    as_json: bool,
    coverage: bool = False,
) -> None:
    """Judge cases on the targets that support them. Ends with ``Stop`` unless all is clean."""
    if coverage and engine is not Engine.EMULATOR:
        raise Stop(Exit.USAGE, f"--coverage: {engine} has none; allowed: --engine emulator")
    prepared = prepare(patterns, engine=engine, modules=modules, jobs=1, coverage=coverage)
    pairs: list[tuple[Declaration, Case]] = []
    skipped = dict(prepared.skipped) if patterns else {}
    for case in cases:
        for target in prepared.targets:
            if not patterns and target.operation is not case.operation:
                continue
            reason = unsupported(target, case)
            if reason is None:
                pairs.append((target, case))
            else:
                skipped[target.name] = reason
    ran = {target.name for target, _ in pairs}
    _judge(prepared, pairs, {name: reason for name, reason in skipped.items() if name not in ran}, as_json)


def replay_findings(path: Path, engine: Engine, modules: tuple[str, ...], as_json: bool) -> None:
    """Run the case of one finding, or of every finding in a folder, on its target."""
    pairs = [_read_finding(file) for file in _finding_files(path)]
    prepared = prepare(sorted({target for target, _ in pairs}), engine=engine, modules=modules, jobs=1)
    known = {d.name: d for d in prepared.targets}
    _judge(prepared, [(known[name], case) for name, case in pairs if name in known], prepared.skipped, as_json)


def _judge(
    prepared: Prepared, pairs: Sequence[tuple[Declaration, Case]], skipped: Mapping[str, str], as_json: bool
) -> None:
    """Judge (target, case) pairs and report them as a campaign's result, with every check's outcome."""
    campaign = Campaign([], prepared.settings, None, None)
    outcomes = []
    with prepared.pool() as pool:
        requests = iter([(declaration.name, case) for declaration, case in pairs])
        for (declaration, _), outcome in zip(pairs, run_cases(pool, requests, prepared.settings), strict=True):
            outcomes.append(outcome)
            campaign.count(declaration, outcome)
    if as_json:
        data = summaries.to_dict(campaign, skipped, {})
        for outcome in outcomes:
            checks = data["targets"][outcome.target].setdefault("checks", [])
            checks.append([check.to_dict() for check in outcome.result.checks])
        if prepared.settings.coverage:
            data["coverage"] = coverage_dict(covered(outcomes))
        print(json.dumps(data, indent=2))
    else:
        for outcome in outcomes:
            _print_outcome(outcome)
        for name, reason in skipped.items():
            print(f"{name}: unsupported: {reason}")
        if prepared.settings.coverage:
            print("\n".join(coverage_lines(covered(outcomes))))
    stop_unless_clean(campaign)


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


def _print_outcome(outcome: Outcome) -> None:
    result = outcome.result
    if outcome.harness is not None:
        print(f"{outcome.target}: the harness failed")
        return
    ratio = "" if result.worst_ratio is None else f", worst error/budget {result.worst_ratio:.3g}"
    print(f"{outcome.target}: {result.verdict}{f': {result.reason}' if result.reason else ''}{ratio}")
    for check in result.checks:
        print(f"    {check.verdict:<8} {check.check:<12} {check.message}".rstrip())


# ----------------------------------------------------------- fuzz and gpu_diff


def search(campaign: Campaign, pool: Pool) -> None:
    """Run a campaign with progress on stderr; Ctrl-C ends it, and what was found stays."""
    with progress(campaign):
        try:
            campaign.run(pool)
        except KeyboardInterrupt:
            Console(stderr=True).print("interrupted: what was found so far follows")


def stop_unless_clean(campaign: Campaign) -> None:
    """End with the exit code that the campaign's result asks for. Known defects are no findings."""
    if campaign.harness_errors:
        raise Stop(Exit.HARNESS, campaign.harness_errors[0].message)
    if any(summary.unknown for summary in campaign.summaries.values()):
        raise Stop(Exit.FINDINGS)
    judged = sum(s.cases - s.verdicts[Verdict.UNSUPPORTED] for s in campaign.summaries.values())
    if not judged:
        raise Stop(Exit.NOTHING, "nothing asked for can run here")


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
    paths = write_findings(found, campaign.harness_errors, out)
    if as_json:
        print(json.dumps(summaries.to_dict(campaign, skipped, paths), indent=2))
    else:
        console = wide_console()
        summaries.print_findings(found, paths, console)
        summaries.print_table(campaign, skipped, console)
    stop_unless_clean(campaign)


def wide_console() -> Console:
    """Stdout; where it is no terminal, wide enough for a table without folded words."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def write_findings(found: Sequence[Finding], errors: Sequence[HarnessError], out: Path) -> dict[str, str]:
    """One file for each distinct finding, ``finding-ID.json``, and for each failure of our own code.

    Returns the path by id. Raises ``Stop`` where the folder cannot be written.
    """
    files = {f"finding-{f.id}.json": f.to_dict() for f in summaries.distinct(found)}
    files |= {f"harness-{i}.json": error.to_dict() for i, error in enumerate(errors)}
    try:
        for name, data in files.items():
            out.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise Stop(Exit.USAGE, f"--out {out}: cannot be written: {error.strerror}") from None
    return {f.id: str(out / f"finding-{f.id}.json") for f in summaries.distinct(found)}
