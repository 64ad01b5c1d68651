"""The emulator against a GPU: every target that runs on both gets the same cases, and their outputs are compared.

Copies and index lists must agree bit for bit; where numbers are computed, two engines may differ by what two correct
executions may (twice the worst-case bound). A case that fails on either engine is shown and not compared.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import Tensor

from fuzz import registry
from fuzz.campaign.pool import Pool
from fuzz.campaign.reply import Reply
from fuzz.campaign.worker import Job, Limits, fair_memory_bytes
from fuzz.case import Case
from fuzz.check.agreement import Agreement, compare
from fuzz.cli import CASE_TIMEOUT, Jobs, Seed, Timeout, guarded
from fuzz.commands import built_in_ledger, parse_engine, runnable
from fuzz.errors import Exit, Stop
from fuzz.options import case_timeout
from fuzz.plan import Plan
from fuzz.space import Space
from fuzz.tensor_data import from_data
from fuzz.versions import versions
from oracle.declare import Declaration
from oracle.kinds import Engine

FAILED, UNSUPPORTED = "failed", "unsupported"
OUTCOMES = (*Agreement, FAILED, UNSUPPORTED)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass
class Row:
    """What came out for one target: how many cases ended how, the largest ratio, and what needs an explanation."""

    target: str
    outcomes: Counter[str] = field(default_factory=Counter)
    ratio: float = 0.0
    notes: list[dict[str, Any]] = field(default_factory=list)


@app.command(help=__doc__)
def engines(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    gpu: Annotated[str, typer.Option(metavar="cuda|hip", help="The engine to compare the emulator with.")] = "cuda",
    cases: Annotated[int, typer.Option(min=1, help="Cases a target.")] = 80,
    seed: Seed = 0,
    jobs: Jobs = None,
    timeout: Timeout = CASE_TIMEOUT,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows as JSON.")] = None,
) -> None:
    """See the module's text."""
    engine, timeout_s = parse_engine(gpu), case_timeout(timeout)
    targets = shared_targets(patterns or (), engine)
    console, rows = Console(stderr=True), []
    count = max(1, jobs or os.cpu_count() or 1)
    with _pool(Engine.EMULATOR, count) as emulated, _pool(engine, max(1, count // 4)) as native:
        for target in targets:
            row = compare_target(target, islice(Plan(Space(target), seed), cases), (emulated, native), timeout_s)
            console.print(", ".join([row.target, *(f"{n} {what}" for what, n in row.outcomes.items())]))
            rows.append(row)
    print(markdown(rows))
    if out is not None:
        data = {"schema": 1, "seed": seed, "engine": engine, "versions": versions(), "rows": [vars(r) for r in rows]}
        out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if any(note["outcome"] == Agreement.BEYOND and note["known"] is None for row in rows for note in row.notes):
        raise Stop(Exit.FINDINGS)


def shared_targets(patterns: Sequence[str], engine: Engine) -> list[Declaration]:
    """Targets that run on the emulator and on ``engine`` here. Raises ``Stop`` if there are none."""
    chosen = registry.select(registry.load(), patterns)
    on_both = [d for d in runnable(chosen, engine)[0] if registry.why_not(d, Engine.EMULATOR) is None]
    if not on_both:
        raise Stop(Exit.NOTHING, f"no target runs on both the emulator and {engine} here")
    return on_both


def compare_target(target: Declaration, cases: Iterator[Case], pools: tuple[Pool, Pool], timeout_s: float) -> Row:
    """Run ``cases`` on both engines and compare."""
    row, known = Row(target.name), [d for d in built_in_ledger() if target.name in d.targets]
    kept = list(cases)
    requests = [{"target": target.name, "case": case.to_dict()} for case in kept]
    replies = [[reply for _, reply in pool.map(iter(requests), timeout_s)] for pool in pools]
    for case, emulated, native in zip(kept, *replies, strict=True):
        outcome, ratio, said = _compared(target, case, emulated, native)
        row.outcomes[outcome] += 1
        row.ratio = max(row.ratio, ratio or 0.0)
        if outcome in (Agreement.BEYOND, FAILED):
            entry = next(
                (d.id for d in known if any(d.matches(target.name, c, d.diagnosis, case) for c in d.checks)), None
            )
            row.notes.append({"outcome": outcome, "said": said, "ratio": ratio, "known": entry, "case": case.to_dict()})
    return row


def _compared(target: Declaration, case: Case, emulated: Reply, native: Reply) -> tuple[str, float | None, str]:
    """Outcome, ratio where there is one, and what a failure said."""
    sides = []
    for reply in (emulated, native):
        found = _outputs(reply)
        if isinstance(found, tuple):
            return found[0], None, found[1]
        sides.append(found)
    compared = compare(target, case, *sides)
    return compared.agreement, compared.ratio, ""


def _outputs(reply: Reply) -> dict[str, Tensor] | tuple[str, str]:
    if not reply.ok or reply.value is None:
        return FAILED, reply.detail or (reply.raised.message if reply.raised else "")
    if "outputs" in reply.value:
        return from_data(reply.value["outputs"])
    if UNSUPPORTED in reply.value:
        return UNSUPPORTED, reply.value[UNSUPPORTED]
    return FAILED, reply.value["raised"]


def _pool(engine: Engine, jobs: int) -> Pool:
    job = Job("fuzz.campaign.job:outputs", "fuzz.campaign.job:setup", {"engine": engine, "modules": [], "threads": 1})
    return Pool(job, jobs, limits=Limits(memory_bytes=fair_memory_bytes(2 * jobs)))


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    lines = [
        "| target | cases | identical | within | beyond | failed on one | unsupported | difference / allowed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        counts = " | ".join(str(row.outcomes[what]) for what in OUTCOMES)
        lines.append(f"| {row.target} | {row.outcomes.total()} | {counts} | {row.ratio:.2f} |")
    total: Counter[str] = sum((row.outcomes for row in rows), Counter())
    counts = " | ".join(str(total[what]) for what in OUTCOMES)
    return "\n".join([*lines, f"| all | {total.total()} | {counts} | {max((r.ratio for r in rows), default=0):.2f} |"])


if __name__ == "__main__":
    sys.exit(guarded(app))
