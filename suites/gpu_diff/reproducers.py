"""Reproducer scripts of the known defects: write those of one engine here, and run a folder of them on another machine.

python -m suites.gpu_diff.reproducers write DIR --shows cuda 'sglang.*'
python3 DIR/run_all.py          needs torch and the kernels' packages, and none of us
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fuzz.campaign.finding import Finding, findings_of
from fuzz.campaign.run import Settings, run_cases
from fuzz.cli import EngineOption, Jobs, Modules, guarded
from fuzz.commands import Prepared, parse_engine, prepare
from fuzz.errors import Exit, Stop
from fuzz.ledger import Defect
from fuzz.report.reproducer import open_reproducers, reproducers, write_reproducer
from oracle.kinds import Engine
from oracle.verdict import Verdict

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def commands() -> None:
    """Reproducer scripts of the known defects."""


@app.command()
def write(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to.")],
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    shows: Annotated[str, typer.Option(metavar="ENGINE", help="Defects that this engine shows.")] = "cuda",
    engine: EngineOption = "auto",
    jobs: Jobs = None,
    modules: Modules = None,
) -> None:
    """Write a folder for each known defect that an engine shows, and the script that runs them all."""
    if shows not in tuple(Engine):
        raise Stop(Exit.USAGE, f"--shows: {shows!r}; allowed: {', '.join(Engine)}")
    prepared = prepare(
        patterns or (),
        engine=parse_engine(engine),
        modules=tuple(modules or ()),
        jobs=jobs,
        use_ledger=True,
    )
    findings = known_findings(prepared, Engine(shows))
    with open_reproducers(prepared.settings) as pool:
        made = reproducers(pool, [finding for _, finding in findings], prepared.settings)
        for (defect, _), (finding, script) in zip(findings, made, strict=True):
            written = write_reproducer(folder / defect.id, finding, script)
            print(
                f"{defect.id}: {written}" if script.script else f"{defect.id}: no script: {script.reason}", flush=True
            )
    (folder / "run_all.py").write_text(RUN_ALL, encoding="utf-8")


def known_findings(prepared: Prepared, shows: Engine) -> list[tuple[Defect, Finding]]:
    """Each known defect that ``shows`` shows, as a finding: as it comes out here, or as its entry says."""
    names = {target.name for target in prepared.targets}
    found = []
    for defect in prepared.settings.ledger:
        target = next((name for name in defect.targets if name in names), None)
        here = defect.applies(prepared.settings.engine, prepared.settings.versions)
        if target is not None and shows in defect.engines and (here or _installed(defect, prepared.settings)):
            found.append((defect, target, here))
    with prepared.pool() as pool:
        outcomes = run_cases(pool, iter([(target, d.case) for d, target, _ in found]), prepared.settings)
        pairs = list(zip(found, outcomes, strict=True))
    findings = []
    for (defect, target, _), outcome in pairs:
        seen = findings_of(target, defect.case, outcome.result, prepared.settings)
        own = [f for f in seen if f.check in defect.checks]
        findings.append((defect, own[0] if own else _as_entered(defect, target, prepared.settings)))
    return findings


def _installed(defect: Defect, settings: Settings) -> bool:
    """Whether the kernels' packages are those of the entry; the compiler may be another, or missing."""
    packages = {name: wanted for name, wanted in defect.packages.items() if name != "triton"}
    return all((v := settings.versions.get(n)) is not None and w.contains(v, True) for n, w in packages.items())


def _as_entered(defect: Defect, target: str, settings: Settings) -> Finding:
    """The finding that the entry describes."""
    return Finding(
        target=target,
        check=defect.checks[0],
        verdict=Verdict.FAIL,
        message=f"{defect.summary} (as entered; it does not show on {settings.engine})",
        evidence={},
        diagnosis=defect.diagnosis,
        worst_ratio=None,
        engine=settings.engine,
        versions=settings.versions,
        known=defect.id,
        case=defect.case,
    )


RUN_ALL = '''#!/usr/bin/env python3
"""Run every reproduce.py below this folder; a table of how each ended, also as a file if one is named."""

import subprocess
import sys
from pathlib import Path

WORDS = {0: "does not show", 1: "shows", 2: "cannot run here"}
rows = ["| defect | ended with | | what it said |", "|---|---|---|---|"]
for script in sorted(Path(__file__).resolve().parent.glob("*/reproduce.py")):
    try:
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
        code, lines = done.returncode, (done.stdout + done.stderr).strip().splitlines()
    except subprocess.TimeoutExpired:
        code, lines = "time", ["took longer than 300 s"]
    print(f"== {script.parent.name}: {code}", *lines[:12], sep="\\n    ", flush=True)
    told = [line for line in lines if ": " in line and not line.startswith(("not everything", "sglang.", "/"))]
    said = (told or lines or [""])[0].replace("|", "/").strip()[:150]
    rows.append(f"| {script.parent.name} | {code} | {WORDS.get(code, 'something else')} | {said} |")
print("\\n".join(rows))
if len(sys.argv) > 1:
    Path(sys.argv[1]).write_text("\\n".join(rows) + "\\n")
'''

if __name__ == "__main__":
    sys.exit(guarded(app))
