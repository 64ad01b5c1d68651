"""What `attn-oracle compile` does: record the specialisations of each target's cases, compile, report."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fuzz import registry
from fuzz.campaign.pool import Pool
from fuzz.campaign.reply import Reply
from fuzz.campaign.server import Server
from fuzz.campaign.worker import Job
from fuzz.case import Case
from fuzz.check.result import Check
from fuzz.commands import built_in_ledger, default_jobs, runnable
from fuzz.engine.compile_gate import Arch, ArchError, Compilation, Outcome, Request, compile_all, parse_arch
from fuzz.engine.compile_gate.gate import as_dict
from fuzz.engine.compile_gate.wire import from_dict
from fuzz.errors import Exit, Stop
from fuzz.ledger import Defect, Versions
from fuzz.plan import Plan
from fuzz.space import Space
from fuzz.versions import versions
from oracle.declare import Declaration
from oracle.kinds import Engine

SCHEMA = 1
_BUDGET = 600
_RECORD_TIMEOUT_S = 120.0
_RECORD = "fuzz.engine.compile_gate.jobs"


@dataclass(frozen=True)
class Judged:
    """One compilation of a target's. ``known``: the ledger entry that explains its failure, or None."""

    compilation: Compilation
    known: str | None = None


@dataclass
class TargetReport:
    """One target: its cases, the specialisations that they use on each architecture, and what became of those."""

    declaration: Declaration
    cases: int = 0
    requests: dict[Arch, dict[str, Request]] = field(default_factory=dict)
    users: dict[str, list[Case]] = field(default_factory=dict)
    """The cases that use each specialisation."""
    skipped: Counter[str] = field(default_factory=Counter)
    judged: list[Judged] = field(default_factory=list)

    def declares(self, arch: Arch) -> bool:
        """Whether the target claims to run on an architecture: a failure for another one is no finding."""
        archs = self.declaration.supports.archs
        return not archs or arch.name in archs

    @property
    def specialisations(self) -> int:
        """Distinct ones. Launchers choose by the machine, so that an architecture may not use all of them."""
        return len({key for requests in self.requests.values() for key in requests})

    @property
    def failures(self) -> list[Judged]:
        """Failures for architectures that the target declares."""
        return [j for j in self.judged if j.compilation.outcome is Outcome.FAILS and self.declares(j.compilation.arch)]

    @property
    def findings(self) -> list[Judged]:
        """Those that the ledger does not explain."""
        return [j for j in self.failures if j.known is None]


@dataclass(frozen=True)
class Settings:
    """What to record and compile. ``modules`` are the user's own target modules."""

    archs: tuple[Arch, ...]
    cases: int
    seed: int = 0
    jobs: int = 1
    modules: tuple[str, ...] = ()
    ledger: tuple[Defect, ...] = ()
    versions: Versions = field(default_factory=dict)

    def explains(self, target: str, arch: Arch, users: Sequence[Case]) -> str | None:
        """The ledger entry that knows why a specialisation fails: it explains a crash of every case that uses it."""
        entries = (d for d in self.ledger if d.applies(arch.engine, self.versions))
        return next((d.id for d in entries if all(d.matches(target, Check.CRASH, None, c) for c in users)), None)


def parse_archs(text: str) -> tuple[Arch, ...]:
    """The architectures in ``gfx942,sm_90``, each once. Raises ``Stop`` (usage)."""
    try:
        return tuple(dict.fromkeys(parse_arch(name.strip()) for name in text.split(",")))
    except ArchError as error:
        raise Stop(Exit.USAGE, f"--arch: {error}") from None


def run_compile(
    patterns: Sequence[str],
    *,
    archs: str,
    cases: int,
    seed: int,
    jobs: int | None,
    modules: tuple[str, ...],
    use_ledger: bool,
    as_json: bool,
) -> None:
    """Compile what the targets' cases use; print the result. Ends with ``Stop`` unless all is clean or known."""
    chosen = parse_archs(archs)
    declarations = registry.select(registry.load(modules), patterns)
    if importlib.util.find_spec("triton") is None:
        raise Stop(Exit.NOTHING, "triton is not installed: pip install attn-oracle[triton]")
    settings = Settings(
        archs=chosen,
        cases=cases,
        seed=seed,
        jobs=jobs or default_jobs(Engine.EMULATOR),
        modules=modules,
        ledger=built_in_ledger() if use_ledger else (),
        versions=versions(),
    )
    able, unable = judged_here(declarations)
    reports = [TargetReport(d) for d in able]
    errors = list(record_all(reports, settings))
    compile_reports(reports, settings)
    if as_json:
        print(json.dumps(to_dict(reports, unable, errors, settings), indent=2))
    else:
        print("\n".join(lines(reports, unable, settings)))
    finish(reports, errors)


def judged_here(declarations: Sequence[Declaration]) -> tuple[list[Declaration], dict[str, str]]:
    """Targets that the installed Triton may judge, and why it may not judge each of the others."""
    needs = {
        d.name: f"its compiler is {c}, and another's verdict on it would be false"
        for d in declarations
        if (c := d.supports.compiler) is not None
    }
    able, unable = runnable([d for d in declarations if d.name not in needs], Engine.EMULATOR)
    return able, needs | unable


def record_all(reports: Sequence[TargetReport], settings: Settings) -> Iterator[str]:
    """Run each target's cases in the emulator, as a GPU of each architecture, and note the specialisations.

    Yields failures of our own code.
    """
    plans = {r.declaration.name: Plan(Space(r.declaration, _BUDGET, False), settings.seed) for r in reports}
    drawn = {name: list(islice(plan, settings.cases)) for name, plan in plans.items()}
    total = settings.cases * len(reports) * len(settings.archs)
    with Server() as server, _progress("cases", total) as step:
        for arch in settings.archs:
            setup = {"arch": arch.name, "modules": list(settings.modules)}
            job = Job(f"{_RECORD}:record", f"{_RECORD}:setup_recording", setup)
            with Pool(job, settings.jobs, server) as pool:
                for report in reports:
                    name = report.declaration.name
                    asked = ({"target": name, "case": case.to_dict()} for case in drawn[name])
                    for index, reply in pool.map(asked, _RECORD_TIMEOUT_S):
                        step(name)
                        if reply.harness:
                            yield f"{name}, phase {reply.phase}: {reply.detail}"
                        else:
                            _note(report, arch, drawn[name][index], reply)


def _note(report: TargetReport, arch: Arch, case: Case, reply: Reply) -> None:
    report.cases += 1
    requests = report.requests.setdefault(arch, {})
    if not reply.ok or reply.value is None:
        # Whether that is a defect is for `fuzz` to say: here nothing was launched.
        report.skipped[f"not recorded: {reply.detail}"] += 1
        return
    if reply.value["stopped"]:
        report.skipped[f"recorded in part: {reply.value['stopped']}"] += 1
    for plain in reply.value["specialisations"]:
        adapter, key = report.declaration.function.__module__, json.dumps(plain)
        requests.setdefault(key, Request(adapter, from_dict(plain)))
        report.users.setdefault(key, []).append(case)


def compile_reports(reports: Sequence[TargetReport], settings: Settings) -> None:
    """Compile what every target uses on each architecture. What targets share is compiled once."""
    asked: dict[Arch, dict[str, Request]] = {
        arch: {key: request for report in reports for key, request in report.requests.get(arch, {}).items()}
        for arch in settings.archs
    }
    with Server() as server, _progress("compilations", sum(map(len, asked.values()))) as step:
        for arch, distinct in asked.items():
            done: dict[str, Compilation] = {}
            compilations = compile_all(
                list(distinct.values()), arch, modules=settings.modules, jobs=settings.jobs, server=server
            )
            for key, compilation in zip(distinct, compilations, strict=True):
                step(arch.name)
                done[key] = compilation
            for report in reports:
                report.judged += [_judged(report, key, done[key], settings) for key in report.requests.get(arch, {})]


def _judged(report: TargetReport, key: str, compilation: Compilation, settings: Settings) -> Judged:
    if compilation.outcome is not Outcome.FAILS:
        return Judged(compilation)
    name = report.declaration.name
    return Judged(compilation, settings.explains(name, compilation.arch, report.users[key]))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    """A live bar on a terminal; elsewhere a line at the end. On stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        console.print(f"{total} {what}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def finish(reports: Iterable[TargetReport], errors: Sequence[str]) -> None:
    """End with ``Stop`` unless something was judged and all of it is clean."""
    reports = list(reports)
    if errors:
        raise Stop(Exit.HARNESS, errors[0])
    if any(report.findings for report in reports):
        raise Stop(Exit.FINDINGS)
    if all(j.compilation.outcome is Outcome.NOT_JUDGED for report in reports for j in report.judged):
        raise Stop(Exit.NOTHING, "nothing asked for could be compiled here")


# ---------------------------------------------------------------------- output


def lines(reports: Sequence[TargetReport], unable: dict[str, str], settings: Settings) -> Iterator[str]:
    """The result as text: a line for each target and architecture, and one for each failure."""
    for report in reports:
        skipped = f", {sum(report.skipped.values())} of them not or in part" if report.skipped else ""
        counts = f"{report.cases} runs recorded{skipped}, {report.specialisations} specialisations"
        yield f"{report.declaration.name}: {counts}"
        for reason, count in report.skipped.items():
            yield f"    {reason}{f' ({count} runs)' if count > 1 else ''}"
        for arch in settings.archs:
            yield from _arch_lines(report, arch)
    for name, reason in unable.items():
        yield f"{name}: not judged: {reason}"


def _arch_lines(report: TargetReport, arch: Arch) -> Iterator[str]:
    own = [j.compilation for j in report.judged if j.compilation.arch == arch]
    if not own:
        return
    counts = Counter(c.outcome for c in own)
    shown = ", ".join(f"{counts[outcome]} {_verb(outcome, counts[outcome])}" for outcome in Outcome if counts[outcome])
    yield f"    {arch.name}: {shown}{_needs(own)}"
    told: Counter[tuple[str, str]] = Counter()
    for judged in (j for j in report.judged if j.compilation.arch == arch):
        if judged.compilation.outcome is not Outcome.COMPILES:
            told[_word(report, judged), _place(judged.compilation)] += 1
    for (word, place), count in told.items():
        yield f"        {word} {place}{f' ({count} specialisations)' if count > 1 else ''}"


def _word(report: TargetReport, judged: Judged) -> str:
    """What a compilation that did not succeed is called."""
    if judged.compilation.outcome is Outcome.NOT_JUDGED:
        return "NOT JUDGED"
    if not report.declares(judged.compilation.arch):
        return "not declared"
    return "FAIL" if judged.known is None else f"known defect {judged.known}:"


def _verb(outcome: Outcome, count: int) -> str:
    plural = {Outcome.COMPILES: "compile", Outcome.FAILS: "fail"}
    return outcome if count == 1 else plural.get(outcome, outcome)


def _place(compilation: Compilation) -> str:
    kernel, line = compilation.specialisation, compilation.line
    where = f"{Path(kernel.file).name}{'' if line is None else f':{line}'}"
    return f"{kernel.kernel} ({where}): {compilation.message}"


def _needs(compilations: Sequence[Compilation]) -> str:
    """The most that one of them takes, and which of them spill."""
    known = [(c, c.resources) for c in compilations if c.resources is not None]
    if not known:
        return ""
    registers = max((r.registers or 0 for _, r in known), default=0)
    spilling = [c for c, r in known if r.spills]
    text = f"; at most {registers} registers, {max(r.shared for _, r in known)} bytes shared"
    if not spilling:
        return f"{text}, no spills"
    kernels = ", ".join(dict.fromkeys(c.specialisation.kernel for c in spilling))
    return f"{text}, {len(spilling)} with spills ({kernels})"


def to_dict(
    reports: Sequence[TargetReport], unable: dict[str, str], errors: Sequence[str], settings: Settings
) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    targets: dict[str, Any] = {}
    for report in reports:
        archs = {arch.name: report.declares(arch) for arch in settings.archs}
        targets[report.declaration.name] = {
            "cases": report.cases,
            "specialisations": report.specialisations,
            "skipped": dict(report.skipped),
            "declares": archs,
            "compilations": [as_dict(j.compilation) for j in report.judged],
            "findings": [{**as_dict(j.compilation), "known": j.known} for j in report.failures],
        }
    for name, reason in unable.items():
        targets[name] = {"cases": 0, "specialisations": 0, "skipped": {reason: 1}, "compilations": [], "findings": []}
    return {
        "schema": SCHEMA,
        "seed": settings.seed,
        "archs": [arch.name for arch in settings.archs],
        "versions": versions(),
        "targets": targets,
        "harness_errors": list(errors),
    }
