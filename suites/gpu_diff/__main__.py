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

from fuzz.campaign.pool import Pool
from fuzz.campaign.run import run_cases
from fuzz.cli import CASE_TIMEOUT, EngineOption, Jobs, Json, Modules, Seed, Timeout, guarded
from fuzz.commands import Prepared, parse_engine, prepare, replay_options
from fuzz.errors import Exit, Stop
from fuzz.ledger import Defect
from fuzz.options import duration
from fuzz.search_command import finish, keeper, search
from oracle.kinds import Engine
from suites.gpu_diff.sweep import sweep

CASES = 400
"""Cases a target where time allows: well beyond what covering all pairs takes."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def gpu_diff(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    time: Annotated[str, typer.Option(metavar="10m", help="Time for everything, shared fairly.")] = "10m",
    cases: Annotated[int, typer.Option(min=1, help="At most so many cases a target.")] = CASES,
    seed: Seed = 0,
    engine: EngineOption = "auto",
    jobs: Jobs = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where findings are kept.")] = Path(".attn-oracle"),
    no_ledger: Annotated[bool, typer.Option("--no-ledger", help="Report known defects as new.")] = False,
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
    as_json: Json = False,
    sglang: Annotated[
        str | None, typer.Option(metavar="A,B", help="The same over several versions of sglang, and a table of them.")
    ] = None,
) -> None:
    """See the module's text."""
    if sglang is not None:
        sweep(sglang, sys.argv[1:], out, as_json)
    began = monotonic()
    time_s, chosen = duration("--time", time), parse_engine(engine)
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
        timeout_s=duration("--timeout", timeout),
    )
    kept = keeper(out)
    with prepared.pool() as pool:
        stale = check_ledger(pool, prepared, console)
        campaign = prepared.campaign(cases, max(0.0, time_s - (monotonic() - began)))
        ending = search(campaign, pool, kept)
    for defect in stale:
        message = f"stale ledger entry {defect.id}: its own case passes; remove the entry or narrow its versions"
        console.print(Text(message, style="red"))
    try:
        finish(campaign, prepared.skipped, kept, as_json, replay_options(engine, modules or ()), ending)
    except Stop as stop:
        if stale and stop.code is Exit.NOTHING:
            raise Stop(Exit.FINDINGS) from None
        raise
    if stale:
        raise Stop(Exit.FINDINGS)


def check_ledger(pool: Pool, prepared: Prepared, console: Console) -> list[Defect]:
    """Run the own case of every entry that applies, on each of its targets; returns the entries that pass on one."""
    settings, names = prepared.settings, {d.name for d in prepared.targets}
    asked = [(d, target) for d in settings.defects for target in d.targets if target in names]
    stale: dict[str, Defect] = {}
    outcomes = run_cases(pool, iter([(target, d.case) for d, target in asked]), settings)
    for (defect, target), outcome in zip(asked, outcomes, strict=True):
        if outcome.harness is not None:
            raise Stop(Exit.HARNESS, f"ledger entry {defect.id}: {outcome.harness.message}")
        failed = outcome.result.failures
        if not any(defect.matches(target, f.check, outcome.diagnosis(f.check), defect.case) for f in failed):
            stale[defect.id] = defect
    known = len({defect.id for defect, _ in asked}) - len(stale)
    console.print(f"{known} known defect{'' if known == 1 else 's'} shown again")
    return list(stale.values())


if __name__ == "__main__":
    sys.exit(guarded(app))
