"""Remake docs/results/tolerance.md, or parts of what it says.

Parts: detection, diagnosis, soundness, all, and report, which only writes the page of what is there. Each part is
kept as JSON beside the page.
"""

import datetime
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fuzz.cli import guarded
from fuzz.errors import Exit, Stop
from fuzz.versions import gpu_name
from suites.tolerance import report
from suites.tolerance.detection import SEEDS, SUITE, Table, examine_all, units

PARTS = ("detection", "diagnosis", "soundness", "all", "report")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def made(device: str, seeds: int, began: float) -> Mapping[str, Any]:
    """When, where and with what a part was made."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": (gpu_name() or device) if device != "cpu" else "cpu",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "seeds": seeds,
        "seconds": round(time.monotonic() - began),
    }


def contexts_of(text: str) -> list[int]:
    """Comma-separated contexts. Raises Stop."""
    found = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if not found or len(found) != len(text.split(",")) or not all(8 <= n <= 1 << 20 for n in found):
        raise Stop(Exit.USAGE, f"--contexts: {text}; allowed: numbers of keys from 8 to {1 << 20}, separated by commas")
    return found


def detection(out: Path, contexts: list[int], device: str, jobs: int, seeds: int | None) -> None:
    """Run every fault on every probe, and keep the table of each context."""
    for context in contexts:
        began, wanted = time.monotonic(), units(context, SUITE, seeds)
        records = []
        for unit, found in zip(wanted, examine_all(wanted, device, jobs), strict=True):
            records += found
            print(f"detection: {unit.context} keys, {unit.probe}, seed {unit.seed}", file=sys.stderr, flush=True)
        table = Table(context, tuple(records))
        report.save(out, f"detection-{context}", table.to_dict(), made(device, len(table.seeds), began))


@app.command(help=__doc__)
def tolerance(
    part: Annotated[str, typer.Argument(metavar="|".join(PARTS))],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page; parts lie in the folder of its name.")] = Path(
        "docs/results/tolerance.md"
    ),
    contexts: Annotated[str, typer.Option(metavar="N,...", help="Numbers of keys.")] = ",".join(map(str, SEEDS)),
    device: Annotated[str, typer.Option(help="Where kernels and oracle run.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds a probe, for a shorter table.")] = None,
) -> None:
    """See the module's text."""
    if part not in PARTS:
        raise Stop(Exit.USAGE, f"{part}: unknown; allowed: {', '.join(PARTS)}")
    chosen = contexts_of(contexts)
    if part in ("detection", "all"):
        detection(out, chosen, device, jobs, seeds)
    report.write(out)


if __name__ == "__main__":
    sys.exit(guarded(app))
