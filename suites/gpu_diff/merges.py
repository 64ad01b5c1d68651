"""Merges of attention states, number of ranks by kind of states: what passes, and what does not and why.

Every cell is a few cases with these features, drawn from the target's own space.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from fuzz.campaign.finding import findings_of
from fuzz.campaign.run import Outcome, run_cases
from fuzz.case import Case, States
from fuzz.cli import CASE_TIMEOUT, EngineOption, Jobs, Seed, Timeout, guarded
from fuzz.commands import Prepared, parse_engine, prepare
from fuzz.errors import Exit, Stop
from fuzz.options import duration
from fuzz.plan import CANDIDATES, CounterChooser
from fuzz.space import Space
from oracle.declare import Declaration
from oracle.kinds import Operation
from oracle.verdict import Verdict

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Cell:
    """One target with one number of ranks and one kind of states."""

    target: str
    parts: int
    states: str


@app.command(help=__doc__)
def merges(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    cases: Annotated[int, typer.Option(min=1, help="Cases a cell.")] = 5,
    seed: Seed = 0,
    engine: EngineOption = "auto",
    jobs: Jobs = None,
    timeout: Timeout = CASE_TIMEOUT,
) -> None:
    """See the module's text."""
    prepared = prepare(
        patterns or (),
        engine=parse_engine(engine),
        modules=(),
        seed=seed,
        jobs=jobs,
        use_ledger=True,
        timeout_s=duration("--timeout", timeout),
    )
    targets = [target for target in prepared.targets if target.operation is Operation.LSE_MERGE]
    if not targets:
        raise Stop(Exit.NOTHING, "no target that merges states can run here")
    found = judge(prepared, targets, cases, seed)
    print(markdown(targets, found))
    if any("NEW" in text for text in found.values()):
        raise Stop(Exit.FINDINGS)


def judge(prepared: Prepared, targets: list[Declaration], count: int, seed: int) -> dict[Cell, str]:
    """What each cell of each target came to, in words."""
    asked = [(cell, case) for target in targets for cell, case in drawn(target, count, seed)]
    outcomes: dict[Cell, list[Outcome]] = {}
    with prepared.pool() as pool:
        results = run_cases(pool, iter([(cell.target, case) for cell, case in asked]), prepared.settings)
        for (cell, _), outcome in zip(asked, results, strict=True):
            if outcome.harness is not None:
                raise Stop(Exit.HARNESS, outcome.harness.message)
            outcomes.setdefault(cell, []).append(outcome)
    return {cell: in_words(own, prepared) for cell, own in outcomes.items()}


def drawn(target: Declaration, count: int, seed: int) -> Iterator[tuple[Cell, Case]]:
    """``count`` cases for every number of ranks and kind of states that the target supports."""
    space = Space(target)
    for parts in sorted(target.supports.parts):
        for states in space.dimensions["states"]:
            pins = {"parts": str(parts), "states": states, "requests": "many"}
            for index in range(count):
                case = space.draw(CounterChooser(seed, (parts * len(States) + index) * CANDIDATES, pins))
                yield Cell(target.name, parts, states), case


def in_words(outcomes: list[Outcome], prepared: Prepared) -> str:
    """All outcomes of a cell: "pass", each distinct failure with its ledger entry, or why nothing ran."""
    said: list[str] = []
    checks: dict[str, set[str]] = {}
    for outcome in outcomes:
        if outcome.result.verdict is Verdict.UNSUPPORTED:
            said.append(f"unsupported: {outcome.result.reason}")
        elif outcome.result.verdict is Verdict.PASS:
            said.append("pass")
        for finding in findings_of(outcome.target, outcome.case, outcome.result, prepared.settings):
            checks.setdefault(finding.known or f"NEW: {finding.message}", set()).add(finding.check)
    said += [f"{what} ({', '.join(sorted(own))})" for what, own in checks.items()]
    return "; ".join(dict.fromkeys(said))


def markdown(targets: list[Declaration], found: dict[Cell, str]) -> str:
    """A table a target: a row for each number of ranks, a column for each kind of states; texts below it."""
    lines: list[str] = []
    for target in targets:
        own = {cell: text for cell, text in found.items() if cell.target == target.name}
        kinds = list(dict.fromkeys(cell.states for cell in own))
        notes: dict[str, int] = {}
        lines += [f"### {target.name}", "", f"| ranks | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
        for parts in sorted({cell.parts for cell in own}):
            texts = [own[Cell(target.name, parts, kind)] for kind in kinds]
            shown = [t if t == "pass" else f"see {notes.setdefault(t, len(notes) + 1)}" for t in texts]
            lines.append(f"| {parts} | {' | '.join(shown)} |")
        lines += ["", *(f"{number}. {text}" for text, number in notes.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(guarded(app))
