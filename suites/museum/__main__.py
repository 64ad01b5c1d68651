"""Kill each of the museum's mutants with cases of an ordinary campaign, and remake docs/results/museum.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fuzz.cli import guarded
from fuzz.commands import built_in_ledger
from fuzz.errors import Exit, Stop
from suites.museum import campaign, report
from suites.museum.entries import ENTRIES, chosen

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PAGE = Path("docs/results/museum.md")
CASES = 100


@app.command(help=__doc__)
def museum(
    entry: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only these, and no page is written.")] = None,
    cases: Annotated[int, typer.Option(min=1, help="Cases an entry gets, at most.")] = CASES,
    seed: Annotated[int, typer.Option(help="Of the campaign.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page.")] = PAGE,
) -> None:
    """See the module's text."""
    entries = chosen(entry) if entry else ENTRIES
    found = campaign.run(entries, cases, seed, jobs, built_in_ledger())
    if as_json:
        print(json.dumps(report.to_dict(found), indent=1))
    if entry is None:
        out.write_text(report.page(found), encoding="utf-8")
    elif not as_json:
        print("\n".join(report.table(found)))
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for line in report.complaints(found):
        console.print(line, markup=False)
    if not all(trial.executed for trial in found.trials):
        raise Stop(Exit.HARNESS)
    if not found.complete:
        raise Stop(Exit.FINDINGS)


if __name__ == "__main__":
    sys.exit(guarded(app))
