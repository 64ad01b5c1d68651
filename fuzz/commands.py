"""What commands that run targets share, and those that judge given cases: run, replay, diagnose."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fuzz import engine as engines
from fuzz import ledger, registry
from fuzz.campaign.pool import Pool
from fuzz.campaign.rounds import WHOLE, Shard
from fuzz.campaign.run import Campaign, Outcome, Settings, open_pool, run_cases
from fuzz.case import Case
from fuzz.check.diagnosis import KEY
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.errors import Exit, Stop
from fuzz.finding_files import finding_files, read_case
from fuzz.options import CASE_TIMEOUT_S
from fuzz.report import summary as summaries
from fuzz.report.coverage import coverage_dict, coverage_lines, covered
from fuzz.report.failure import failure_text, target_options
from fuzz.support import unsupported
from fuzz.versions import versions
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict


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
    asked: Sequence[Declaration] = ()
    """Both of them, in order."""

    def campaign(self, cases: int | None, time_s: float | None, shard: Shard = WHOLE, huge: bool = False) -> Campaign:
        """A search over the targets that can run; ``huge``: also over pools of more than 2**31 elements."""
        return Campaign(self.targets, self.settings, cases, time_s, shard=shard, huge=huge)

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
    timeout_s: float = CASE_TIMEOUT_S,
) -> Prepared:
    """Load targets and select them by globs. Raises ``RegistryError`` and ``LedgerError``."""
    return prepare_targets(
        registry.select(registry.load(modules), patterns),
        engine=engine,
        modules=modules,
        seed=seed,
        jobs=jobs,
        use_ledger=use_ledger,
        coverage=coverage,
        timeout_s=timeout_s,
    )


def prepare_targets(
    targets: Sequence[Declaration],
    *,
    engine: Engine,
    modules: tuple[str, ...],
    seed: int = 0,
    jobs: int | None = None,
    use_ledger: bool = False,
    coverage: bool = False,
    timeout_s: float = CASE_TIMEOUT_S,
) -> Prepared:
    """What it takes to run targets that are loaded. Without ``use_ledger`` it only tells faults apart.

    Raises ``LedgerError``.
    """
    able, skipped = runnable(targets, engine)
    settings = Settings(
        engine=engine,
        seed=seed,
        jobs=jobs or default_jobs(engine),
        modules=modules,
        ledger=built_in_ledger(),
        excused=use_ledger,
        versions=versions(),
        coverage=coverage,
        timeout_s=timeout_s,
    )
    return Prepared(able, skipped, settings, targets)


def stop_unless_clean(campaign: Campaign) -> None:
    """End with the exit code that the campaign's result asks for. Known defects are no findings."""
    if campaign.harness_errors:
        raise Stop(Exit.HARNESS, campaign.harness_errors[0].message)
    if any(summary.unknown for summary in campaign.summaries.values()):
        raise Stop(Exit.FINDINGS)
    judged = sum(s.cases - s.verdicts[Verdict.UNSUPPORTED] for s in campaign.summaries.values())
    if not judged:
        raise Stop(Exit.NOTHING, "nothing asked for can run here")


MOST_ON_GPU = 16
"""Worker processes that use one GPU."""


def default_jobs(engine: Engine) -> int:
    """Worker processes: one a core. On a GPU, where most of the time goes into compiling on the CPU, no more than 16,
    and one for each GiB of its memory: each has a context there.
    """
    cores = len(os.sched_getaffinity(0))
    if engine is Engine.EMULATOR:
        return cores
    return max(1, min(cores, MOST_ON_GPU, engines.memory_bytes() >> 30))


def replay_options(engine: str, modules: Sequence[str]) -> list[str]:
    """What a replay has to be told as this command was; ``engine`` as it was given."""
    named = target_options(modules)
    return named if engine == "auto" else [*named, "--engine", engine]


def wide_console() -> Console:
    """Stdout; where it is no terminal, wide enough for a table without folded words."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


# --------------------------------------------------------------- run and replay


def run_case_files(
    cases: Sequence[Case],
    patterns: Sequence[str],
    engine: Engine,
    modules: tuple[str, ...],
    as_json: bool,
    coverage: bool = False,
    timeout_s: float = CASE_TIMEOUT_S,
) -> None:
    """Judge cases on the targets that support them. Ends with ``Stop`` unless all is clean."""
    if coverage and engine is not Engine.EMULATOR:
        raise Stop(Exit.USAGE, f"--coverage: {engine} has none; allowed: --engine emulator")
    prepared = prepare(patterns, engine=engine, modules=modules, jobs=1, coverage=coverage, timeout_s=timeout_s)
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


def replay_findings(
    path: Path, engine: Engine, modules: tuple[str, ...], as_json: bool, timeout_s: float = CASE_TIMEOUT_S
) -> None:
    """Run the case of one finding, or of every finding in a folder, on its target.

    A bad file in a folder is told on stderr and hides none of the others; the exit code is that of bad input.
    """
    known = registry.load(modules)
    pairs: list[tuple[Declaration, Case]] = []
    bad: list[Stop] = []
    for file in finding_files(path):
        try:
            pairs.append(read_case(file, known))
        except Stop as stop:
            if not path.is_dir():
                raise
            bad.append(stop)
            Console(stderr=True).print(Text(f"attn-oracle: {stop}"), soft_wrap=True)
    if pairs:
        targets = list({declaration.name: declaration for declaration, _ in pairs}.values())
        prepared = prepare_targets(targets, engine=engine, modules=modules, jobs=1, timeout_s=timeout_s)
        able = [pair for pair in pairs if pair[0].name not in prepared.skipped]
        try:
            _judge(prepared, able, prepared.skipped, as_json)
        except Stop as stop:
            if not bad or stop.code is Exit.HARNESS:
                raise
    if bad:
        raise Stop(Exit.USAGE, f"{path}: {len(bad)} of {len(bad) + len(pairs)} files are no findings of known targets")


def diagnose_finding(
    path: Path, engine: Engine, modules: tuple[str, ...], as_json: bool, timeout_s: float = CASE_TIMEOUT_S
) -> None:
    """Run the case of one finding again and say why it fails: every explanation, the best first."""
    declaration, case = read_case(path, registry.load(modules))
    prepared = prepare_targets([declaration], engine=engine, modules=modules, jobs=1, timeout_s=timeout_s)
    if prepared.skipped:
        raise Stop(Exit.NOTHING, f"{declaration.name}: {prepared.skipped[declaration.name]}")
    with prepared.pool() as pool:
        outcome = next(run_cases(pool, iter([(declaration.name, case)]), prepared.settings))
    if outcome.harness is not None:
        raise Stop(Exit.HARNESS, outcome.harness.message)
    failures = outcome.result.failures
    found = {check.check: check.evidence[KEY] for check in failures if KEY in check.evidence}
    if as_json:
        print(
            json.dumps(
                {
                    "schema": summaries.SCHEMA,
                    "target": declaration.name,
                    "engine": engine,
                    "failed": [check.check for check in failures],
                    "diagnoses": found,
                },
                indent=2,
            )
        )
    else:
        print("\n".join(_explained(declaration.name, failures, found)))
    if failures:
        raise Stop(Exit.FINDINGS)


def _explained(target: str, failures: Sequence[CheckResult], found: Mapping[Check, Mapping[str, Any]]) -> Iterator[str]:
    if not failures:
        yield f"{target}: nothing fails"
    for check in failures:
        yield f"{target}: {check.check}: {check.message}"
        if check.check not in found:
            yield "    not diagnosed: only wrong values and log-sum-exps are"
            continue
        best = found[check.check]
        for place, one in enumerate([best, *best["runners_up"]], 1):
            yield f"    {place}. {one['detail']}  (worst error/budget {float(one['ratio']):.3g})"


def _judge(
    prepared: Prepared, pairs: Sequence[tuple[Declaration, Case]], skipped: Mapping[str, str], as_json: bool
) -> None:
    """Judge (target, case) pairs and report them as a campaign's result, with every check's outcome.

    A case outside of what its target declares is not run.
    """
    campaign = Campaign([], prepared.settings, None, None)
    outcomes = []
    reasons = [unsupported(declaration, case) for declaration, case in pairs]
    requests = [(d.name, case) for (d, case), reason in zip(pairs, reasons, strict=True) if reason is None]
    with prepared.pool() as pool:
        judged = run_cases(pool, iter(requests), prepared.settings)
        for (declaration, case), reason in zip(pairs, reasons, strict=True):
            outcome = next(judged) if reason is None else _not_run(declaration, case, reason)
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


def _not_run(declaration: Declaration, case: Case, reason: str) -> Outcome:
    return Outcome(declaration.name, case, CaseResult(checks=(), reason=reason), {})


def _print_outcome(outcome: Outcome) -> None:
    result = outcome.result
    if outcome.harness is not None:
        print(f"{outcome.target}: the harness failed")
        return
    ratio = "" if result.worst_ratio is None else f", worst error/budget {result.worst_ratio:.3g}"
    nothing = ", nothing compared" if result.verdict is Verdict.PASS and not result.elements else ""
    print(f"{outcome.target}: {result.verdict}{f': {result.reason}' if result.reason else ''}{ratio}{nothing}")
    for check in result.checks:
        print(f"    {check.verdict:<8} {check.check:<12} {check.message}".rstrip())
    if result.failures:
        print(f"\n{failure_text(outcome.target, outcome.case, result.failures)}")
