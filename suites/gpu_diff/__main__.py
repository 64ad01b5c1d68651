"""The differential tests: every target that can run here, against the oracle, within a time budget.

First each known defect that applies runs its own case: one that passes is stale and fails the run. Then every
target gets its share of the time, up to a number of cases that is well beyond covering all feature pairs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fuzz import registry
from fuzz.campaign.pool import Pool
from fuzz.campaign.run import Campaign, run_cases
from fuzz.cli import (
    CASE_TIMEOUT,
    MINIMISE_TIME,
    EngineOption,
    Jobs,
    Json,
    MinimiseTime,
    Modules,
    Seed,
    Sglang,
    Timeout,
    guarded,
)
from fuzz.commands import Prepared, parse_engine, prepare, replay_options, wide_console
from fuzz.errors import Exit, Stop
from fuzz.ledger import Defect
from fuzz.options import case_timeout, duration
from fuzz.report import functions
from fuzz.report import summary as summaries
from fuzz.search_command import explained, finish, keeper, search
from fuzz.sweep import sweep
from oracle.failure.words import count
from oracle.kinds import Engine
from suites.gpu_diff import bundle

CASES = 400
"""Cases a target where time allows: well beyond what covering all pairs takes."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def gpu_diff(
    context: typer.Context,
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    time: Annotated[str, typer.Option(metavar="10m", help="Time for everything, shared fairly.")] = "10m",
    cases: Annotated[int, typer.Option(min=1, help="At most so many cases a target.")] = CASES,
    seed: Seed = 0,
    engine: EngineOption = "auto",
    jobs: Jobs = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where findings are kept.")] = Path(".attn-oracle"),
    no_ledger: Annotated[bool, typer.Option("--no-ledger", help="Report known defects as new.")] = False,
    minimise_time: MinimiseTime = MINIMISE_TIME,
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
    as_json: Json = False,
    sglang: Sglang = None,
    bundle_to: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="Write one file to send back; on hip it is written unasked."),
    ] = None,
) -> None:
    """See the module's text."""
    if sglang is not None:
        if bundle_to is not None:
            raise Stop(Exit.USAGE, "--bundle: one version a file; allowed: without --sglang")
        sweep(sglang, ("-m", "suites.gpu_diff"), context.obj, out, as_json)
    minimise_s = duration("--minimise-time", minimise_time, zero=True)
    began = monotonic()
    time_s, chosen = duration("--time", time), parse_engine(engine)
    bundled = bundle.destination(bundle_to, chosen, out)
    console = Console(stderr=True)
    if engine == "auto" and chosen is Engine.EMULATOR:
        console.print("no GPU that torch can use: kernels run in the emulator, on the CPU")
    prepared = prepare(
        patterns or (),
        engine=chosen,
        modules=tuple(modules or ()),
        seed=seed,
        jobs=jobs,
        use_ledger=not no_ledger,
        timeout_s=case_timeout(timeout),
    )
    kept = keeper(out)
    with prepared.pool() as pool:
        shown, stale = ([], []) if no_ledger else check_ledger(pool, prepared, console)
        campaign = prepared.campaign(cases, max(0.0, time_s - (monotonic() - began)))
        campaign.on_outcome = recorder = bundle.Recorder()
        ending = search(campaign, pool, kept)
        if not ending.interrupted:
            ending = explained(campaign, pool, kept, minimise_s)
    if bundled is not None:
        bundle.write(bundled, bundle.bundle(campaign, recorder, prepared.skipped, shown, stale, context.obj))
        console.print(Text(f"result bundle: {bundled}"), soft_wrap=True)
    for defect in stale:
        message = f"stale ledger entry {defect.id}: its own case passes; remove the entry or narrow its versions"
        console.print(Text(message, style="red"))
    if not as_json:
        wide_console().print(functions.table(_functions(prepared, campaign)))
    try:
        finish(campaign, prepared.skipped, kept, as_json, replay_options(engine, modules or ()), ending)
    except Stop as stop:
        if stale and stop.code is Exit.NOTHING:
            raise Stop(Exit.FINDINGS) from None
        raise
    if stale:
        raise Stop(Exit.FINDINGS)


def _functions(prepared: Prepared, campaign: Campaign) -> list[functions.Row]:
    """What the functions that were asked for went through in this run."""
    reasons = {d.name: {engine: registry.why_not(d, engine) for engine in Engine} for d in prepared.asked}
    result = summaries.to_dict(campaign, prepared.skipped, {})
    return functions.rows(prepared.asked, reasons, prepared.settings.ledger, [result])


def check_ledger(pool: Pool, prepared: Prepared, console: Console) -> tuple[list[Defect], list[Defect]]:
    """Run the own case of every entry that applies, on each of its targets.

    Returns the entries that are shown again, and those that are stale: one target passes.
    """
    settings, known = prepared.settings, {d.name: d for d in prepared.targets}
    asked = [(d, target) for d in settings.defects for target in d.targets if target in known]
    stale: dict[str, Defect] = {}
    outcomes = run_cases(pool, iter([(target, d.case_for(known[target])) for d, target in asked]), settings)
    for (defect, target), outcome in zip(asked, outcomes, strict=True):
        if outcome.harness is not None:
            raise Stop(Exit.HARNESS, f"ledger entry {defect.id}: {outcome.harness.message}")
        failed = outcome.result.failures
        if not any(defect.matches(target, f.check, outcome.diagnosis(f.check), outcome.case) for f in failed):
            stale[defect.id] = defect
    shown = list({defect.id: defect for defect, _ in asked if defect.id not in stale}.values())
    console.print(f"{count(len(shown), 'known defect')} shown again")
    return shown, list(stale.values())


if __name__ == "__main__":
    sys.exit(guarded(app))
