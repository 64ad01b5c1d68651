"""The differential tests: every target that can run here, against the oracle, within a time budget.

First each known defect that applies runs its own case: one that passes is stale and fails the run. Then every
target gets its share of the time, until all feature pairs are covered and its number of cases is reached.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fuzz import registry
from fuzz.campaign.finding import findings_of
from fuzz.campaign.pool import Pool
from fuzz.campaign.run import Campaign, Settings, open_pool, run_cases
from fuzz.cli import EngineOption, Jobs, Json, Modules, Seed, guarded
from fuzz.commands import (
    Exit,
    Stop,
    built_in_ledger,
    default_jobs,
    duration,
    finish,
    parse_engine,
    progress,
    runnable,
)
from fuzz.ledger import Defect
from fuzz.versions import versions
from oracle.kinds import Engine

CASES = 400
"""Cases a target where time allows: well beyond what covering all pairs takes."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def gpu_diff(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    time: Annotated[str, typer.Option(metavar="5m", help="Time for everything, shared fairly.")] = "5m",
    cases: Annotated[int, typer.Option(min=1, help="At most so many cases a target.")] = CASES,
    seed: Seed = 0,
    engine: EngineOption = "auto",
    jobs: Jobs = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where findings are kept.")] = Path(".attn-oracle"),
    no_ledger: Annotated[bool, typer.Option("--no-ledger", help="Report known defects as new.")] = False,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """See the module's text."""
    chosen = parse_engine(engine)
    time_s = duration("--time", time)
    console = Console(stderr=True)
    if engine == "auto" and chosen is Engine.EMULATOR:
        console.print("no GPU that torch can use: kernels run in the emulator, on the CPU")
    able, skipped = runnable(registry.select(registry.load(modules or ()), patterns or ()), chosen)
    settings = Settings(
        engine=chosen,
        seed=seed,
        jobs=jobs or default_jobs(chosen),
        modules=tuple(modules or ()),
        ledger=() if no_ledger else built_in_ledger(),
        versions=versions(),
    )
    campaign = Campaign(able, settings, cases, time_s)
    with open_pool(settings) as pool:
        stale = check_ledger(pool, settings, {d.name for d in able}, console)
        with progress(campaign):
            try:
                campaign.run(pool)
            except KeyboardInterrupt:
                console.print("interrupted: what was found so far follows")
    for defect in stale:
        message = f"stale ledger entry {defect.id}: its own case passes; remove the entry or narrow its versions"
        console.print(Text(message, style="red"))
    try:
        finish(campaign, skipped, out, as_json)
    except Stop as stop:
        if stop.code is not Exit.NOTHING or not stale:
            raise
    if stale:
        raise Stop(Exit.FINDINGS)


def check_ledger(pool: Pool, settings: Settings, names: set[str], console: Console) -> list[Defect]:
    """Run the own case of every entry that applies; returns the entries whose case passes."""
    entries = [d for d in settings.defects if d.target in names]
    stale = []
    outcomes = run_cases(pool, ((d.target, d.case) for d in entries), settings)
    for defect, outcome in zip(entries, outcomes, strict=True):
        if outcome.harness_error:
            raise Stop(Exit.HARNESS, f"ledger entry {defect.id}: {outcome.harness_error}")
        found = findings_of(outcome.target, outcome.case, outcome.result, settings)
        if not any(f.known == defect.id for f in found):
            stale.append(defect)
    known = len(entries) - len(stale)
    console.print(f"{known} known defect{'' if known == 1 else 's'} shown again")
    return stale


if __name__ == "__main__":
    sys.exit(guarded(app))
