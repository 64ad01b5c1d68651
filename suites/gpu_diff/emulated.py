"""The table of docs/results/emulator.md: targets on the emulator, their verdicts, and what their kernels reached.

python -m suites.gpu_diff.emulated 'sglang*' --cases 100
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Annotated

import typer

from fuzz.campaign.finding import Finding
from fuzz.campaign.run import Outcome
from fuzz.cli import CASE_TIMEOUT, Jobs, Modules, Seed, Timeout, guarded
from fuzz.commands import prepare, stop_unless_clean
from fuzz.engine.emulator import Coverage
from fuzz.options import case_timeout
from fuzz.progress import progress
from fuzz.report.markdown import defects, table
from fuzz.search_command import terminable
from oracle.kinds import Engine

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def emulated(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    cases: Annotated[int, typer.Option(min=1, help="Cases a target.")] = 100,
    seed: Seed = 0,
    jobs: Jobs = None,
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
) -> None:
    """See the module's text."""
    prepared = prepare(
        patterns or (),
        engine=Engine.EMULATOR,
        modules=tuple(modules or ()),
        seed=seed,
        jobs=jobs,
        use_ledger=True,
        coverage=True,
        timeout_s=case_timeout(timeout),
    )
    campaign = prepared.campaign(cases, None)
    reached: dict[str, Coverage] = defaultdict(Coverage)
    with prepared.pool() as pool, progress(campaign) as step:

        def note(outcome: Outcome, found: list[Finding]) -> None:
            if outcome.result.coverage is not None:
                reached[outcome.target].merge(Coverage.from_dict(outcome.result.coverage))
            step(outcome, found)

        campaign.on_outcome = note
        with terminable():
            campaign.run(pool)
    print("\n".join([*table(campaign, reached), "", *defects(campaign)]))
    stop_unless_clean(campaign)


if __name__ == "__main__":
    sys.exit(guarded(app))
