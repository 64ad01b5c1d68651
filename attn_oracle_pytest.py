"""The pytest plugin of attn-oracle.

pytest loads this module in every run of every environment that has attn-oracle installed, so it imports
pytest and nothing of ours, and does nothing until an option, a marker or a test asks for it. It never imports
`fuzz` or `suites`: a repository may have top-level packages of those names, and in its test process they are the
repository's; searches run in a process of ours.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attn_oracle.options import Options

MARKER = "attn_oracle"
PROPERTY = "attn_oracle"
"""Name of the user property, JSON, of a test that searched; it goes into reports, through xdist too."""

_OPTIONS = {
    "cases": ("N", "cases of each search (default: what the test says, or 50)"),
    "time": ("TIME", "search for this long, as 90s or 10m, instead of a number of cases"),
    "seed": ("N", "the same seed draws the same cases (default: 0)"),
    "engine": ("NAME", "where kernels run: auto (the GPU, if torch sees one), emulator, cuda, hip"),
    "out": ("DIR", "folder of findings (default: .attn-oracle)"),
    "replay": ("PATH", "judge only the case of this finding, or those of this folder"),
}

_state = SimpleNamespace(command=None, configured=None, item=None, judged=False, no_engine=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attn-oracle", "attn-oracle: correctness of attention kernels")
    for name, (metavar, text) in _OPTIONS.items():
        group.addoption(f"--attn-{name}", metavar=metavar, default=None, help=text)
        parser.addini(f"attn_{name}", f"attn-oracle: {text}", default=None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(*, target, cases, time, seed, engine, modules): what attn_oracle.check searches, and how, where "
        "neither its call nor the command line says so.",
    )
    _state.command, _state.configured, _state.item = _given(config, "--attn-"), _given(config, "attn_"), None
    _state.judged = _state.no_engine = False
    _check_engine((_state.command or {}).get("engine"))
    _check_out((_state.command or {}).get("out"))


def _check_engine(asked: str | None) -> None:
    """An engine that the command line names has to run here: skipped tests would pass for a run on it.

    One that the configuration file names has to as soon as a test searches, and not before: other tests run anywhere.
    """
    if asked is None:
        return
    reason = importlib.import_module("attn_oracle.options").missing_device(asked)
    if reason is not None:
        raise pytest.UsageError(f"--attn-engine: {asked!r} cannot run here: {reason}; allowed: auto, emulator")


def _check_out(asked: str | None) -> None:
    """As for an engine: what the configuration file names is looked at when a test searches."""
    reason = None if asked is None else importlib.import_module("attn_oracle.options").unwritable(asked)
    if reason is not None:
        raise pytest.UsageError(f"--attn-out {reason}")


def _given(config: pytest.Config, prefix: str) -> dict[str, Any] | None:
    """What the command line, or the configuration file, says; parsed. None if nothing."""
    if prefix[0] == "-":
        values = {name: config.getoption(f"--attn-{name}") for name in _OPTIONS}
    else:
        values = {name: config.getini(f"attn_{name}") for name in _OPTIONS}
    said = {name: value for name, value in values.items() if value is not None}
    if not said:
        return None
    return _parsed(prefix, said)


def _parsed(prefix: str, said: dict[str, Any]) -> dict[str, Any]:
    options = importlib.import_module("attn_oracle.options")
    try:
        return {name: options.parse(f"{prefix}{name}", name, value) for name, value in said.items()}
    except options.OptionError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str | None:
    said = {**(_state.configured or {}), **(_state.command or {})}
    return "attn-oracle: " + ", ".join(f"{name} {value}" for name, value in said.items()) if said else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers(MARKER):
            _check_marker(item, mark)


def _check_marker(item: pytest.Item, mark: pytest.Mark) -> None:
    allowed = importlib.import_module("attn_oracle.options").MARKER
    where = f"{item.nodeid}: mark.{MARKER}"
    if mark.args:
        raise pytest.UsageError(f"{where}: {mark.args[0]!r}; allowed: keywords only, {', '.join(allowed)}")
    unknown = next((name for name in mark.kwargs if name not in allowed), None)
    if unknown is not None:
        raise pytest.UsageError(f"{where}: {unknown}: unknown keyword; allowed: {', '.join(allowed)}")
    _parsed(f"{where}: ", dict(mark.kwargs))


def layers() -> tuple[Options, Options, Options]:
    """What the command line, the marker of the test that runs, and the configuration file say."""
    make = importlib.import_module("attn_oracle.options").Options
    marked: dict[str, Any] = {}
    if _state.item is not None:
        for mark in reversed(list(_state.item.iter_markers(MARKER))):  # the closest one last
            if {"cases", "time"} & mark.kwargs.keys():
                marked = {name: value for name, value in marked.items() if name not in ("cases", "time")}
            marked |= _parsed("", dict(mark.kwargs))
    command, marker, configured = (make(**(said or {})) for said in (_state.command, marked, _state.configured))
    return command, marker, configured


@pytest.fixture(scope="session")
def attn_oracle() -> Any:
    """attn-oracle, imported by the first test that asks for it: attn_oracle.check(kernel) searches for a case on which
    a declared kernel is wrong, attn_oracle.assert_attention_close(out, ...) judges one result.
    """
    return importlib.import_module("attn_oracle")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _state.item = item
    try:
        return (yield)
    finally:
        _state.item = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    current = sys.modules.get("attn_oracle.current")
    found = [r for r in current.take() if r.cases] if current is not None and call.when == "call" else []
    if found:
        item.user_properties.append((PROPERTY, [record.to_dict() for record in found]))
        item.add_report_section("call", "attn-oracle", "\n".join(_said(record.to_dict()) for record in found))
    report = yield
    if current is not None and call.excinfo is not None and call.excinfo.errisinstance(current.EngineUnavailable):
        report.attn_oracle_no_engine = True  # type: ignore[attr-defined]  # goes through xdist with the rest
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _state.no_engine |= getattr(report, "attn_oracle_no_engine", False)
    _state.judged |= report.when == "call" and any(name == PROPERTY for name, _ in report.user_properties)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # of xdist: its controller decides
        return
    if _state.no_engine:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
    elif session.exitstatus == pytest.ExitCode.OK and _nothing_replayed(session.config):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def _nothing_replayed(config: pytest.Config) -> bool:
    """Whether a finding was to be judged and no test judged any case: that is no pass."""
    asked = {**(_state.configured or {}), **(_state.command or {})}.get("replay")
    return asked is not None and not _state.judged and not config.option.collectonly


def _said(record: dict[str, Any]) -> str:
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in record["verdicts"].items())
    number = "1 case" if record["cases"] == 1 else f"{record['cases']} cases"
    line = f"{record['target']}: {number} ({verdicts or 'none'}) on {record['engine']}, {record['elements']} elements"
    ratio = "" if record["worst_ratio"] is None else f", worst error/budget {record['worst_ratio']:.2g}"
    return (
        line
        + ratio
        + "".join(f"\n  {finding['unwritten'] or finding['path']}: {finding['case']}" for finding in record["findings"])
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    replays: dict[str, None] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for record in (r for name, value in report.user_properties if name == PROPERTY for r in value):
                _add(found.setdefault((record["target"], record["engine"]), {}), record)
                for finding in record["findings"]:
                    lost = finding["unwritten"]
                    replays[f"replay: {finding['replay']}" if lost is None else f"not kept: {lost}"] = None
    lines = [_said({"target": target, "engine": engine, **total}) for (target, engine), total in found.items()]
    lines += replays
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and _nothing_replayed(config):
        lines.append("nothing was replayed: no test that ran searches the target of these findings")
    if lines:
        terminalreporter.section("attn-oracle")
    for line in lines:
        terminalreporter.line(line)


def _add(total: dict[str, Any], record: dict[str, Any]) -> None:
    """Add a search to the sum of a target's."""
    for name in ("cases", "elements"):
        total[name] = total.get(name, 0) + record[name]
    verdicts = total.setdefault("verdicts", {})
    for verdict, count in record["verdicts"].items():
        verdicts[verdict] = verdicts.get(verdict, 0) + count
    ratios = [x for x in (total.get("worst_ratio"), record["worst_ratio"]) if x is not None]
    total["worst_ratio"] = max(ratios, default=None)
    total["findings"] = []
