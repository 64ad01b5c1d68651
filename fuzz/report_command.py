"""What `attn-oracle report` does: read what a run left in a folder, write it for people and for other tools."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from fuzz.campaign import store
from fuzz.campaign.finding import Finding
from fuzz.campaign.journal import made_smaller
from fuzz.errors import Exit, Expected, Stop, exit_of
from fuzz.plain import Fields, read_json
from fuzz.report import digest, html, junit
from fuzz.report.model import Report, read_finding, read_run
from fuzz.whole import write_whole

DEFAULT = "report.html"
STANDARD_OUTPUT = Path("-")


def write_report(
    folder: Path,
    *,
    runs: Sequence[Path] = (),
    history: Path | None = None,
    page: Path | None = None,
    markdown: Path | None = None,
    xml: Path | None = None,
    as_json: bool = False,
) -> None:
    """Write the forms that are asked for, the HTML file beside the findings if none is.

    ``runs`` are files with ``--json`` objects, the oldest first; ``history`` is a folder with stores of earlier nights,
    each in a folder of its own. A file that is no finding is told on stderr and in the
    report and hides none of the others; the exit code is that of bad input.
    """
    if not folder.is_dir():
        raise Stop(Exit.USAGE, f"{folder}: no folder")
    if history is not None and not history.is_dir():
        raise Stop(Exit.USAGE, f"--history {history}: no folder")
    beside = page.parent if page is not None else folder
    _one_to_standard_output(page, markdown, xml, as_json)
    report = load(folder, [read_object(path, read_run) for path in runs], history, beside)
    if not (runs or report.plain["findings"] or report.bad or (folder / store.FILE).is_file()):
        raise Stop(
            Exit.USAGE, f"{folder}: nothing to report: no finding-*.json, no {store.FILE}, and no --run is given"
        )
    for line in report.bad:
        Console(stderr=True).print(Text(f"attn-oracle: {line}"), soft_wrap=True)
    if not (page or markdown or xml or as_json):
        page = folder / DEFAULT
    for path, render in ((page, html.render), (markdown, digest.render), (xml, junit.render)):
        if path == STANDARD_OUTPUT:
            print(render(report), end="")
        elif path is not None:
            with _writing(path):
                path.write_text(render(report), encoding="utf-8")
            if not as_json and STANDARD_OUTPUT not in (page, markdown, xml):
                print(f"{path}: {report.title}")
    if as_json:
        print(json.dumps(report.plain, indent=2))
    if report.bad:
        what = "1 file is no finding" if len(report.bad) == 1 else f"{len(report.bad)} files are no findings"
        raise Stop(Exit.USAGE, f"{folder}: {what}")


def _one_to_standard_output(page: Path | None, markdown: Path | None, xml: Path | None, as_json: bool) -> None:
    """Raise ``Stop`` where more than one form is asked for there."""
    named = {"--html": page, "--markdown": markdown, "--junit": xml}
    there = [name for name, path in named.items() if path == STANDARD_OUTPUT] + ["--json"] * as_json
    if len(there) > 1:
        raise Stop(Exit.USAGE, f"report: {', '.join(there)}: allowed: one form to standard output")


MARKDOWN = "report.md"


def write_run(folder: Path, run: Mapping[str, Any], findings: Sequence[Finding], paths: Mapping[str, str]) -> Path:
    """The report of a run that has just ended, as HTML and Markdown in ``folder``; returns the HTML file.

    Earlier runs that the folder's store knows are its history. Raises ``Stop``, also where one cannot be read.
    """
    nights = _stored(folder)[0] if (folder / store.FILE).is_file() else []
    if nights and all(nights[-1].get(name) == value for name, value in run.items()):
        run, nights = nights[-1], nights[:-1]
    shown = [finding.to_dict() for finding in findings]
    folders = _folders(folder, [finding.id for finding in findings], folder)
    try:
        report = Report.of(run, shown, nights, paths=paths, folders=folders)
    except Expected as error:
        raise Stop(error.exit_code, f"{folder}: no report: {error}") from None
    for path, text in ((folder / MARKDOWN, digest.render(report)), (folder / DEFAULT, html.render(report))):
        with _writing(path):
            write_whole(path, text)
    return folder / DEFAULT


def _folders(folder: Path, findings: Iterable[str], beside: Path) -> dict[str, str]:
    """The reproducers in ``folder`` by finding, as a page in the folder ``beside`` links to them."""
    there = {finding: folder / f"reproducer-{finding}" for finding in findings}
    return {
        finding: quote(f"{Path(os.path.relpath(path, beside)).as_posix()}/")
        for finding, path in there.items()
        if path.is_dir()
    }


def load(folder: Path, runs: Sequence[Any], history: Path | None = None, beside: Path | None = None) -> Report:
    """What a folder holds: finding files, and a store with its nights and findings if there is one.

    The last of ``runs``, or of the store's nights, is the run; those before it are history. ``beside``: the folder of
    the page. Raises ``StoreError``.
    """
    findings, paths, bad = {}, {}, []
    for path in sorted(folder.rglob("finding-*.json")):
        try:
            data = read_object(path, read_finding)
        except Expected as error:
            bad.append(str(error))
            continue
        findings[data["id"]] = data
        paths[data["id"]] = str(path)
    nights, unread = _earlier(history, folder) if history is not None else ([], [])
    bad += unread
    if (folder / store.FILE).is_file():
        own, kept = _stored(folder)
        findings |= kept
        nights += own
    superseded = {data.get("made_from") for data in findings.values()}
    findings = {name: data for name, data in findings.items() if name not in superseded}
    runs = [*nights, *runs]
    folders = _folders(folder, findings, beside or folder)
    return Report.of(runs[-1] if runs else None, findings.values(), runs[:-1], paths=paths, folders=folders, bad=bad)


def _earlier(history: Path, folder: Path) -> tuple[list[Any], list[str]]:
    """The nights of all stores below ``history`` but that of ``folder``, by when they ended; and what is no store."""
    nights, bad = [], []
    for path in sorted(history.rglob(store.FILE)):
        if path.parent.resolve() == folder.resolve():
            continue
        try:
            nights += _stored(path.parent)[0]
        except store.StoreError as error:
            bad.append(str(error))
    return sorted(nights, key=lambda night: str(night["ended"])), bad


def _stored(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Nights that came to their end, and findings by id: in their minimised form, with what a person said of them."""
    found = {}
    with store.reader(folder) as opened:
        nights = [{**night.report, "ended": night.ended} for night in opened.nights() if night.report is not None]
        with store.understood(opened.path, "nights"):
            for night in nights:
                read_run(night)
        for campaign in opened.campaigns():
            for row in opened.findings(campaign.id):
                told = {"cases": row.cases, "severity": row.severity, "reachability": row.reachability}
                with store.understood(opened.path, "findings"):
                    smaller = made_smaller(row)
                    data = row.data if smaller is None else smaller.to_dict()
                    read_finding(data)
                found[data["id"]] = {**data, **told}
    return nights, found


def read_object(path: Path, read: Callable[[Any], object]) -> Any:
    """The JSON object in a file, which ``read`` accepts. Raises ``Stop`` with the file's name in front."""

    def accepted(data: Any) -> Any:
        read(Fields(data, "file").data)
        return data

    return read_json(path, accepted)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """``OSError`` as ``Stop``."""
    try:
        yield
    except OSError as error:
        raise Stop(exit_of(error), f"{path}: cannot be written: {error.strerror}") from None
