"""The command line. Exit: 0 clean, 1 findings, 2 bad usage or input, 3 the harness failed, 125 nothing can run."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.console import Console
from rich.text import Text

from fuzz.errors import Exit, Expected, OutputError, Stop
from fuzz.options import CASE_TIMEOUT_S, case_timeout, duration, integer
from fuzz.usage import Refused, line
from oracle.dependencies import missing, said_of
from oracle.kinds import Engine

# What needs torch is imported by the commands: help, and what is wrong with the options, come at once.

CASE_TIMEOUT = f"{CASE_TIMEOUT_S:g}"
"""The default of ``--timeout``."""

CASES, JOBS = integer("--cases", 1, 10**9), integer("--jobs", 1, 1024)
"""More of them is a slip of the finger: a target's cases would take years, and so many processes no machine holds."""

SEED = integer("--seed", 0, (1 << 63) - 1)

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""

MINIMISE_TIME = "60s"
"""The default of ``--minimise-time``."""

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
Seed = Annotated[int, typer.Option(parser=SEED, metavar="N", help="Case i is a function of it.")]
MinimiseTime = Annotated[
    str,
    typer.Option(metavar="60s", help="Then make new findings smaller, and write their reproducers; 0s: neither."),
]
Timeout = Annotated[str, typer.Option("--timeout", metavar="SECONDS", help="For one case; beyond it the case hangs.")]
Sglang = Annotated[
    str | None, typer.Option("--sglang", metavar="A,B", help="The same over several versions of sglang, and a table.")
]
Jobs = Annotated[
    int | None, typer.Option(parser=JOBS, metavar="N", help="Worker processes. Default: the machine's cores.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from fuzz.versions import PRODUCT, own

        print(f"{PRODUCT} {own()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which engines work, what is missing and how to get it; exit 125 if a needed package is."""
    from fuzz.doctor import doctor as examine

    report = examine()
    if as_json:
        _print_json(report.to_dict())
    else:
        print("\n".join(report.lines()))
    if missing():
        raise Stop(Exit.NOTHING)


@app.command()
def targets(
    as_json: Json = False,
    modules: Modules = None,
    functions: Annotated[
        bool, typer.Option("--functions", help="By function: over what, where, how many cases, what is known.")
    ] = False,
    result: Annotated[
        list[Path] | None,
        typer.Option("--result", metavar="FILE", help="Count the cases of a --json result or a bundle. Repeatable."),
    ] = None,
) -> None:
    """List every target, its engines here, or why it cannot run here."""
    if result and not functions:
        raise Stop(Exit.USAGE, "--result: allowed: with --functions")
    from fuzz import registry
    from fuzz.report.targets import lines, to_dict

    known = registry.load(modules or ())
    rows = {name: {engine: registry.why_not(d, engine) for engine in Engine} for name, d in known.items()}
    if functions:
        _print_functions(list(known.values()), rows, result or (), as_json)
        return
    if as_json:
        _print_json({"schema": 1, "targets": {name: to_dict(d, rows[name]) for name, d in known.items()}})
        return
    for name, declaration in known.items():
        print("\n".join(lines(declaration, rows[name])))


def _print_functions(known: Sequence[Any], reasons: Any, result: Sequence[Path], as_json: bool) -> None:
    from fuzz.commands import built_in_ledger, wide_console
    from fuzz.report import functions

    found = functions.rows(known, reasons, built_in_ledger(), [functions.read_result(path) for path in result])
    if as_json:
        _print_json({"schema": 1, "functions": [row.to_dict() for row in found]})
    else:
        wide_console().print(functions.table(found))


@app.command()
def certify(as_json: Json = False, engine: EngineOption = "auto") -> None:
    """Check the oracle against independent references, and the engine against the oracle."""
    from fuzz.certify import certify as check
    from fuzz.commands import parse_engine

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
    cases: Annotated[list[Path], typer.Argument(metavar="CASE...", help="Case files.")],
    target: Targets = None,
    engine: EngineOption = "auto",
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Exit 128 instead of 2 and 3, for `git bisect run`.")
    ] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Say what of each kernel the cases never reached. Emulator only.")
    ] = False,
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Run cases on every target that supports them, or on those named. The ledger is ignored."""
    with _bisecting(bisect):
        timeout_s = case_timeout(timeout)
        loaded = _each_loaded(cases)
        from fuzz.commands import parse_engine, run_case_files

        chosen = parse_engine(engine)
        run_case_files(loaded, target or (), chosen, tuple(modules or ()), as_json, coverage, timeout_s)


def _each_loaded(paths: Sequence[Path]) -> list[Any]:
    """The case of each file. Where some are bad there is a line for each: the last is raised."""
    from fuzz.case import CaseError, load_case

    loaded, bad = [], []
    for path in paths:
        try:
            loaded.append(load_case(path))
        except CaseError as error:
            bad.append(error)
    for earlier in bad[:-1]:
        _told(_stop_of(earlier))
    if bad:
        raise bad[-1]
    return loaded


@contextmanager
def _bisecting(bisect: bool) -> Iterator[None]:
    try:
        yield
        sys.stdout.flush()
    except Expected as error:
        stop = _stop_of(error)
        if bisect and stop.code in (Exit.USAGE, Exit.HARNESS):
            raise Stop(Exit.BISECT_ABORT, str(stop)) from None
        raise


@app.command()
def fuzz(
    context: typer.Context,
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    cases: Annotated[
        int | None, typer.Option(parser=CASES, metavar="N", help="Cases a target: the same findings again.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="10m", help="Time for everything, shared fairly: 90s, 10m, 2h.")
    ] = None,
    seed: Seed = 0,
    engine: EngineOption = "auto",
    jobs: Jobs = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the store and the findings are kept.")] = Path(
        ".attn-oracle"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search that the store holds.")] = False,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Only part I of N; others run elsewhere.")] = "1/1",
    no_ledger: Annotated[bool, typer.Option("--no-ledger", help="Report known defects as new.")] = False,
    huge: Annotated[
        bool, typer.Option("--huge", help="Also pools of more than 2**31 elements: gigabytes of address space.")
    ] = False,
    minimise_time: MinimiseTime = MINIMISE_TIME,
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
    as_json: Json = False,
    sglang: Sglang = None,
) -> None:
    """Search for cases on which a target is wrong."""
    if (cases is None) == (time is None):
        raise Stop(Exit.USAGE, "fuzz: give one of --cases N and --time 10m")
    time_s = None if time is None else duration("--time", time)
    timeout_s, minimise_s = case_timeout(timeout), duration("--minimise-time", minimise_time, zero=True)
    if sglang is not None:
        from fuzz.sweep import sweep

        sweep(sglang, ("-m", "attn_oracle_cli"), context.obj, out, as_json)
    from fuzz.campaign.rounds import parse_shard
    from fuzz.commands import parse_engine, prepare, replay_options
    from fuzz.search_command import run_search

    part = parse_shard(shard)
    prepared = prepare(
        patterns or (),
        engine=parse_engine(engine),
        seed=seed,
        jobs=jobs,
        modules=tuple(modules or ()),
        use_ledger=not no_ledger,
        timeout_s=timeout_s,
    )
    campaign = prepared.campaign(cases, time_s, part, huge)
    run_search(campaign, prepared, out, resume, as_json, replay_options(engine, modules or ()), minimise_s)


stores = typer.Typer(help="What is done with the stores of searches.", no_args_is_help=True)
app.add_typer(stores, name="store")


@stores.command(name="merge")
def merge_stores(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that hold a store.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the joined store and its findings go.")],
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Join the stores of a search's shards into one, and say what they found together."""
    from fuzz.store_command import run_merge

    run_merge(folders, out, tuple(modules or ()), as_json)


@app.command(name="compile")
def compile_kernels(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[T]...", help="Globs over target names.")] = None,
    cases: Annotated[
        int, typer.Option(parser=CASES, metavar="N", help="Cases a target, whose launches are compiled.")
    ] = 40,
    arch: Annotated[str, typer.Option(metavar="A,B", help="GPUs to compile for.")] = "gfx942,gfx950,sm_90",
    seed: Seed = 0,
    jobs: Jobs = None,
    no_ledger: Annotated[bool, typer.Option("--no-ledger", help="Report known defects as new.")] = False,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Compile what the emulator runs with the installed Triton, for GPUs that need not be here."""
    from fuzz.compile_command import run_compile

    run_compile(
        patterns or (),
        archs=arch,
        cases=cases,
        seed=seed,
        jobs=jobs,
        modules=tuple(modules or ()),
        use_ledger=not no_ledger,
        as_json=as_json,
    )


@app.command()
def replay(
    finding: Annotated[Path, typer.Argument(metavar="FINDING|DIR", help="A finding's file, or a folder of them.")],
    engine: EngineOption = "auto",
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Run the case of a finding again, on its target. The ledger is ignored."""
    timeout_s = case_timeout(timeout)
    if not finding.exists():
        raise Stop(Exit.USAGE, f"{finding}: cannot be read: {os.strerror(errno.ENOENT)}")
    from fuzz.commands import parse_engine, replay_findings

    replay_findings(finding, parse_engine(engine), tuple(modules or ()), as_json, timeout_s)


@app.command()
def minimize(
    finding: Annotated[Path, typer.Argument(metavar="FINDING", help="A finding's file.")],
    time: Annotated[str, typer.Option(metavar="60s", help="Time for the search: 90s, 10m.")] = "60s",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to. Default: beside FINDING.")] = None,
    engine: EngineOption = "auto",
    jobs: Jobs = None,
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Find the smallest case that still shows a finding, by the same check and diagnosis."""
    time_s, timeout_s = duration("--time", time), case_timeout(timeout)
    from fuzz.commands import parse_engine
    from fuzz.minimise_command import run_minimise

    run_minimise(
        finding,
        parse_engine(engine),
        tuple(modules or ()),
        time_s=time_s,
        out=out,
        jobs=jobs,
        as_json=as_json,
        timeout_s=timeout_s,
    )


@app.command()
def reproducer(
    findings: Annotated[list[Path], typer.Argument(metavar="FINDING|DIR...", help="Findings' files, or folders.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to.")] = Path(".attn-oracle"),
    engine: EngineOption = "auto",
    jobs: Jobs = None,
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Write a folder for each finding: its case, a script that needs no attn-oracle, and a report for an issue."""
    timeout_s = case_timeout(timeout)
    from fuzz.commands import parse_engine
    from fuzz.minimise_command import run_reproducers

    run_reproducers(
        findings,
        parse_engine(engine),
        tuple(modules or ()),
        out=out,
        jobs=jobs,
        as_json=as_json,
        timeout_s=timeout_s,
    )


@app.command()
def diagnose(
    finding: Annotated[Path, typer.Argument(metavar="FINDING", help="A finding's file.")],
    engine: EngineOption = "auto",
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Run the case of a finding again and say which change of convention or input explains what comes back."""
    timeout_s = case_timeout(timeout)
    from fuzz.commands import diagnose_finding, parse_engine

    diagnose_finding(finding, parse_engine(engine), tuple(modules or ()), as_json, timeout_s)


@app.command()
def check(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="A file that oracle.record wrote.")],
    target: Annotated[str, typer.Option("--target", metavar="T", help="The target whose call it was.")],
    shrink: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the smallest part that fails.")] = None,
    engine: EngineOption = "auto",
    timeout: Timeout = CASE_TIMEOUT,
    modules: Modules = None,
    as_json: Json = False,
) -> None:
    """Judge a call captured in production: its output, and what the target makes of it here. The ledger is ignored."""
    timeout_s = case_timeout(timeout)
    if not record.exists():
        raise Stop(Exit.USAGE, f"{record}: cannot be read: {os.strerror(errno.ENOENT)}")
    from fuzz.check_command import check_record
    from fuzz.commands import parse_engine

    check_record(
        record,
        target,
        engine=parse_engine(engine),
        modules=tuple(modules or ()),
        smaller=shrink,
        as_json=as_json,
        timeout_s=timeout_s,
    )


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where findings were kept.")] = Path(".attn-oracle"),
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one self-contained HTML file.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write Markdown.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    run: Annotated[
        list[Path] | None, typer.Option("--run", metavar="FILE", help="A run's --json object; the newest last.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Stores of earlier nights, each in a folder below.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a run left: summary, findings, coverage, margins, throughput, past nights."""
    from fuzz.report_command import write_report

    write_report(folder, runs=run or (), history=history, page=html, markdown=markdown, xml=junit, as_json=as_json)


@app.command()
def bench(
    as_json: Json = False,
    engine: EngineOption = "auto",
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these figures. Repeatable.")] = None,
) -> None:
    """Measure the performance figures, each a ratio within one run."""
    from fuzz.bench import bench as measure
    from fuzz.commands import parse_engine

    report = measure(parse_engine(engine), only or ())
    if as_json:
        _print_json(report.to_dict())
    else:
        print("\n".join(report.lines()))


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def _stop_of(error: Expected) -> Stop:
    """An expected error as an exit code and one line."""
    return error if isinstance(error, Stop) else Stop(error.exit_code, str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded(app, arguments, "attn-oracle")


class _Output:
    """Standard output, whose failures are ``OutputError`` whoever writes: libraries would end the process their way."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return int(self._guarded(self._stream.write, text) or 0)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _guarded(self, do: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return do(*arguments)
        except (OSError, ValueError) as error:
            raise OutputError(f"standard output: {getattr(error, 'strerror', None) or error}") from None


class _Progress:
    """Standard error, without a word where it takes no more: there is nowhere to say so, and the run goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _drop_output(stream: TextIO) -> None:
    """Send what is still buffered nowhere: the interpreter would try to write it once more at its end."""
    with suppress(OSError, ValueError):
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def guarded(command: typer.Typer, arguments: Sequence[str] | None = None, name: str | None = None) -> int:
    """Run a command; returns the exit code. Every expected error is one line on stderr.

    ``name``: what the help calls it, whatever file was started; None: the file's name.
    """
    if sys.stderr is None:
        return _guarded(command, arguments, name)
    with redirect_stderr(cast(TextIO, _Progress(sys.stderr))):
        return _guarded(command, arguments, name)


def _guarded(command: typer.Typer, arguments: Sequence[str] | None, name: str | None) -> int:
    stdout = sys.stdout
    if stdout is None:
        return _told(OutputError("standard output: closed"))
    try:
        with redirect_stdout(cast(TextIO, _Output(stdout))):
            code = _run(command, arguments, name)
            sys.stdout.flush()
    except OutputError as error:
        _drop_output(stdout)
        return _told(error)
    return code


def _run(command: typer.Typer, arguments: Sequence[str] | None, name: str | None) -> int:
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        _refuse_empty(given)
        # A command that runs itself again, in another process, needs them as they were given.
        code = command(args=given, obj=given, prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else Exit.CLEAN
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else Exit.CLEAN
    except Refused as error:
        return _told(Stop(Exit.USAGE, line(error)))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OutputError:
        raise
    except Expected as error:
        return _told(_stop_of(error))
    except ModuleNotFoundError as error:
        if (said := said_of(error)) is None:
            raise
        return _told(Stop(Exit.NOTHING, said))


def _refuse_empty(given: Sequence[str]) -> None:
    """Raise ``Stop`` for an empty argument: as a path, it would be the current directory."""
    for before, argument in zip(["", *given], given, strict=False):
        option, equals, value = argument.partition("=")
        if not argument.strip() or (option.startswith("--") and equals and not value.strip()):
            shown = option if equals else before if before.startswith("-") else ""
            code = Exit.BISECT_ABORT if "--bisect" in given else Exit.USAGE
            raise Stop(code, f"{shown} ''".lstrip() + ": an empty text; no option or argument takes one")


def _told(stop: Stop) -> Exit:
    if str(stop):
        Console(stderr=True).print(Text(f"attn-oracle: {stop}"), soft_wrap=True)
    return stop.code


if __name__ == "__main__":
    sys.exit(main())
