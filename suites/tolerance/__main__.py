"""What the budgets are worth: remake docs/results/tolerance.md, or parts of what it says.

Each part is kept as JSON beside the page, so that parts can be made on different days and machines.
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
from fuzz.options import duration
from fuzz.versions import gpu_name
from suites.tolerance import diagnosis as naming
from suites.tolerance import report as pages
from suites.tolerance.adversarial import adversarial
from suites.tolerance.detection import SEEDS, SUITE, Table, examine_all, units
from suites.tolerance.soundness import run as campaign
from suites.tolerance.soundness import soundness

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Out = Annotated[Path, typer.Option(metavar="FILE", help="The page; its parts lie in a folder of that name.")]
Contexts = Annotated[str, typer.Option(metavar="N,...", help="Numbers of keys.")]
Device = Annotated[str, typer.Option(help="Where kernels and oracle run: cpu or cuda.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes.")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Seeds a probe, where not those of the full table.")]

PAGE = Path("docs/results/tolerance.md")
ALL = ",".join(map(str, SEEDS))


def made(device: str, seeds: int, began: float) -> Mapping[str, Any]:
    """When, where and with what a part was made."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": "cpu" if device == "cpu" else gpu_name() or device,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "seeds": seeds,
        "seconds": round(time.monotonic() - began),
    }


def contexts_of(text: str) -> list[int]:
    """Comma-separated contexts. Raises Stop."""
    parts = text.split(",")
    if not all(part.isdecimal() and 8 <= int(part) <= 1 << 20 for part in parts):
        raise Stop(
            Exit.USAGE, f"--contexts: {text!r}; allowed: numbers of keys from 8 to {1 << 20}, separated by commas"
        )
    return [int(part) for part in parts]


def usable(device: str) -> str:
    """A device that works here. Raises Stop."""
    if device not in ("cpu", "cuda"):
        raise Stop(Exit.USAGE, f"--device: {device!r}; allowed: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise Stop(Exit.NOTHING, "--device: cuda; torch finds no GPU here")
    return device


@app.command()
def detection(
    out: Out = PAGE, contexts: Contexts = ALL, device: Device = "cpu", jobs: Jobs = 1, seeds: Seeds = None
) -> None:
    """Every fault on every probe, before our rules and those of other projects."""
    chosen, where = contexts_of(contexts), usable(device)
    for context in chosen:
        began, wanted = time.monotonic(), units(context, SUITE, seeds)
        records = []
        for unit, found in zip(wanted, examine_all(wanted, where, jobs), strict=True):
            records += found
            print(f"detection: {unit.context} keys, {unit.probe}, seed {unit.seed}", file=sys.stderr, flush=True)
        table = Table(context, tuple(records))
        pages.save(out, f"detection-{context}", table.to_dict(), made(where, len(table.seeds), began))
    pages.write(out)


@app.command()
def diagnosis(out: Out = PAGE, contexts: Contexts = ALL, device: Device = "cpu") -> None:
    """Each fault that is detected, diagnosed once at each context."""
    chosen, where = contexts_of(contexts), usable(device)
    for context in chosen:
        began, named = time.monotonic(), []
        for one in naming.name_all(context, device=where):
            named.append(one)
            print(f"diagnosis: {context} keys, {one.fault}: {one.named}", file=sys.stderr, flush=True)
        pages.save(out, f"diagnosis-{context}", naming.to_dict(named), made(where, 1, began))
    pages.write(out)


app.command()(soundness)
app.command()(adversarial)


@app.command(name="all")
def everything(
    out: Out = PAGE,
    contexts: Contexts = ALL,
    device: Device = "cpu",
    jobs: Jobs = 1,
    soundness_time: Annotated[str, typer.Option(metavar="10m", help="How long the soundness campaign lasts.")] = "10m",
) -> None:
    """Every part, one after the other, and the page."""
    seconds = duration("--soundness-time", soundness_time)
    detection(out, contexts, device, jobs)
    diagnosis(out, contexts, device)
    campaign(device, 1, seconds, jobs=jobs, out=pages.folder_of(out) / "soundness.json")
    pages.write(out)


@app.command()
def report(out: Out = PAGE) -> None:
    """Only the page, of the parts that are there."""
    pages.write(out)


if __name__ == "__main__":
    sys.exit(guarded(app))
