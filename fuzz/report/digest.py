"""A run as Markdown, for a job's summary page or a message: what was found, what was tried, what did not run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fuzz.report.html import command
from fuzz.report.model import FindingView, Report, RunView
from fuzz.report.svg import short
from oracle.failure.words import count

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&@])")


def render(report: Report) -> str:
    """The Markdown text."""
    lines = [f"# attn-oracle: {report.title}", ""]
    if report.run is not None:
        lines += [*_facts(report.run), ""]
    lines += [f"- {plain(message)}" for message in report.bad]
    for heading, findings in (("New findings", report.new), ("Known findings", report.known)):
        if findings:
            lines += [f"## {heading}", "", *(line for finding in findings for line in _finding(finding)), ""]
    if report.run is not None:
        lines += [*_targets(report.run), *_absent(report.run)]
    if len(report.nights) > 1:
        lines += [*_nights(report)]
    text = "\n".join(lines).rstrip() + "\n"
    return text.encode("utf-8", "replace").decode("utf-8")


def plain(text: str) -> str:
    """Text of which Markdown makes nothing: one line, no markup, no mention of anybody."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("\\<", "&lt;").replace("\\@", "@\u200b")


def code(text: str) -> str:
    """Text as code in a line, whatever backticks it holds."""
    one = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", one)), default=0) + 1)
    pad = " " if one.startswith("`") or one.endswith("`") else ""
    return f"{fence}{pad}{one}{pad}{fence}"


def _facts(run: RunView) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions if version != "not installed")
    seed = "" if run.seed is None else f", seed {run.seed}"
    when = "" if run.ended is None else f", {plain(run.ended)}"
    yield (
        f"{count(run.cases, 'case')} on {count(len(run.ran), 'target')}, {short(run.elements)} elements compared; "
        f"{plain(run.engine)}{seed}{when}; {plain(versions)}"
    )
    for message in run.harness_errors:
        yield f"- **the harness failed**: {plain(message)}"


def _finding(finding: FindingView) -> Iterator[str]:
    known = "" if finding.known is None else f" (known: {plain(finding.known)})"
    yield f"- **{plain(finding.target)}**, {plain(finding.check)}{known}: {plain(finding.message)}"
    if finding.detail:
        yield f"  - diagnosis: {plain(finding.detail)}"
    if finding.others:
        yield f"  - or: {plain('; '.join(finding.others))}"
    if finding.path:
        yield f"  - {code(command(finding))}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _targets(run: RunView) -> Iterator[str]:
    if not run.ran:
        return
    yield from ("## Targets", "")
    yield _row("target", "cases", "verdicts", "new", "known", "worst error/budget", "feature pairs", "cases/s")
    yield _row("---", "---:", "---", "---:", "---:", "---:", "---:", "---:")
    for target in run.ran:
        new = sum(f.known is None for f in target.findings)
        yield _row(
            plain(target.name),
            str(target.cases),
            ", ".join(f"{plain(name)} {count}" for name, count in target.verdicts.items()),
            str(new),
            str(len(target.findings) - new),
            "" if target.worst_ratio is None else f"{target.worst_ratio:.2g}",
            f"{target.pairs}/{target.pairs_declared}",
            "" if target.rate is None else f"{target.rate:.2g}",
        )
    yield ""


def _absent(run: RunView) -> Iterator[str]:
    if run.absent:
        yield from ("## Not run", "")
        for target in run.absent:
            yield f"- {plain(target.name)}: {plain('; '.join(target.skipped))}"
        yield ""


def _nights(report: Report) -> Iterator[str]:
    yield from ("## Past nights", "", _row("run", "new", "known", "cases"), _row("---", "---:", "---:", "---:"))
    for index, night in enumerate(report.nights):
        name = night.ended or ("this run" if night is report.run else f"earlier run {index + 1}")
        yield _row(plain(name), str(night.findings("new")), str(night.findings("known")), str(night.cases))
    yield ""
