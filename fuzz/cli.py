"""The command line. Exit: 0 clean, 1 findings, 2 bad usage or input, 3 the harness failed, 125 nothing can run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fuzz.bench import UnknownFigure
from fuzz.case import CaseError, load_case
from fuzz.commands import Exit, Stop, duration, parse_engine
from fuzz.engine import EngineError
from fuzz.ledger import LedgerError
from fuzz.registry import RegistryError
from oracle.kinds import Engine

EXPECTED = (Stop, CaseError, EngineError, LedgerError, RegistryError, UnknownFigure)
"""What a user can cause: shown as one line, without a traceback."""

app = typer.Typer(
    name="attn-oracle",
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Modules = Annotated[
    list[str] | None,
    typer.Option("--targets", metavar="MODULE", help="Load targets from a module or a .py file. Repeatable."),
]
EngineOption = Annotated[
    str, typer.Option("--engine", metavar="auto|emulator|cuda|hip", help="auto: the GPU, if torch sees one.")
]
Targets = Annotated[
    list[str] | None, typer.Option("--target", metavar="T", help="A glob over target names. Repeatable.")
]
Seed = Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Case i is a function of it.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Worker processes. Default: the machine's cores.")]


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which engines work, what is missing and how to get it."""
    from fuzz.doctor import doctor as examine

    report = examine()
    if as_json:
        _print_json(report.to_dict())
    else:
        print("\n".join(report.lines()))


@app.command()
def targets(as_json: Json = False, modules: Modules = None) -> None:
    """List every target, its engines here, or why it cannot run here."""
    from fuzz import registry

    known = registry.load(modules or ())
    rows = {name: {engine: registry.why_not(d, engine) or _engine_reason(engine) for engine in Engine}
            for name, d in known.items()}  # fmt: skip
    if as_json:
        listed = {
            name: {
                "operation": d.operation,
                "engines": rows[name],
                "convention_source": d.convention.source,
            }
            for name, d in known.items()
        }
        _print_json({"schema": 1, "targets": listed})
        return
    for name, declaration in known.items():
        works = [engine.value for engine, reason in rows[name].items() if reason is None]
        print(f"{name}  {declaration.operation}  {', '.join(works) or 'cannot run here'}")
        for engine, reason in rows[name].items():
            if reason is not None:
                print(f"    {engine}: {reason}")


def _engine_reason(engine: Engine) -> str | None:
    from fuzz import engine as engines

    return engines.unavailable(engine)


@app.command()
def certify(as_json: Json = False, engine: EngineOption = "auto") -> None:
    """Check the oracle against independent references, and the engine against the oracle."""
    from fuzz.certify import certify as check

    chosen = parse_engine(engine)
    results = check(chosen)
    failed = [c for c in results if not c.passed]
    if as_json:
        _print_json({"schema": 1, "engine": chosen, "checks": [c.to_dict() for c in results]})
    else:
        for c in results:
            print(f"{'ok  ' if c.passed else 'FAIL'}  {c.room}  {c.name}{'' if c.passed else ': ' + c.detail}")
        print(f"{chosen}: {len(results) - len(failed)} of {len(results)} checks passed")
    if failed:
        raise Stop(Exit.HARNESS)


@app.command()
def run(
    case: Annotated[Path, typer.Argument(metavar="CASE", help="A case file.")],
    target: Targets = None,
    engine: EngineOption = "auto",
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Exit 128 instead of 2 and 3, for `git bisect run`.")
    ] = False,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Run one case on every target that supports it, or on those named. The ledger is ignored."""
    from fuzz.commands import run_case

    with _bisecting(bisect):
        chosen = parse_engine(engine)
        run_case(load_case(case), target or (), chosen, tuple(modules or ()), as_json)


@contextmanager
def _bisecting(bisect: bool) -> Iterator[None]:
    try:
        yield
    except EXPECTED as error:
        stop = _stop_of(error)
        if bisect and stop.code in (Exit.USAGE, Exit.HARNESS):
            raise Stop(Exit.BISECT_ABORT, str(stop)) from None
        raise


@app.command()
def fuzz(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="Cases a target: the same findings again.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="10m", help="Time for everything, shared fairly: 90s, 10m, 2h.")
    ] = None,
    seed: Seed = 0,
    engine: EngineOption = "auto",
    jobs: Jobs = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where findings are kept.")] = Path(".attn-oracle"),
    no_ledger: Annotated[bool, typer.Option("--no-ledger", help="Report known defects as new.")] = False,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Search for cases on which a target is wrong."""
    from fuzz.commands import run_fuzz

    if (cases is None) == (time is None):
        raise Stop(Exit.USAGE, "fuzz: give one of --cases N and --time 10m")
    run_fuzz(
        patterns or (),
        cases=cases,
        time_s=None if time is None else duration("--time", time),
        seed=seed,
        engine=parse_engine(engine),
        jobs=jobs,
        out=out,
        use_ledger=not no_ledger,
        modules=tuple(modules or ()),
        as_json=as_json,
    )


@app.command()
def replay(
    finding: Annotated[Path, typer.Argument(metavar="FINDING|DIR", help="A finding's file, or a folder of them.")],
    engine: EngineOption = "auto",
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Run the case of a finding again, on its target. The ledger is ignored."""
    from fuzz.commands import replay_findings

    replay_findings(finding, parse_engine(engine), tuple(modules or ()), as_json)


@app.command()
def bench(
    as_json: Json = False,
    engine: EngineOption = "auto",
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these figures. Repeatable.")] = None,
) -> None:
    """Measure the performance figures, each a ratio within one run."""
    from fuzz.bench import bench as measure

    report = measure(parse_engine(engine), only or ())
    if as_json:
        _print_json(report.to_dict())
    else:
        print("\n".join(report.lines()))


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def _stop_of(error: Exception) -> Stop:
    """An expected error as an exit code and one line."""
    if isinstance(error, Stop):
        return error
    return Stop(Exit.NOTHING if isinstance(error, EngineError) else Exit.USAGE, str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded(app, arguments)


def guarded(command: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Every expected error is one line on stderr."""
    try:
        command(args=None if arguments is None else list(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else Exit.CLEAN
    except EXPECTED as error:
        expected = _stop_of(error)
        if str(expected):
            Console(stderr=True).print(Text(f"attn-oracle: {expected}"), soft_wrap=True)
        return expected.code
    return Exit.CLEAN


if __name__ == "__main__":
    sys.exit(main())
