"""A run as one self-contained HTML file: no network, and nothing in it runs but our own script."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from fuzz.report import plots
from fuzz.report.failure import replay_command, target_options
from fuzz.report.model import FindingView, Report
from fuzz.report.svg import Markup, short
from oracle.failure.words import count

MOST_HOLES = 60
"""Pairs never tried that are listed by name."""


def render(report: Report) -> str:
    """The page. Whatever comes from findings is escaped; the page's policy forbids all scripts and styles but ours."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"short": short, "command": command}
    style, script = _part("report.css"), _part("report.js")
    run = report.run
    ran = run.ran if run else ()
    pictures = {
        "margins": plots.margins(ran),
        "throughput": plots.throughput(ran),
        "trend": plots.trend(report.nights),
    }
    page = environment.from_string(_part("report.html")).render(
        report=report,
        count=count,
        run=run,
        sections=_sections(report, pictures),
        choices=_choices(report),
        most_holes=MOST_HOLES,
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        **{name: getattr(plots, name) for name in ("grid", "keys", "said", "verdicts", "coverage")},
        **pictures,
    )
    # A text may hold half a surrogate pair, which no file can.
    return page.encode("utf-8", "replace").decode("utf-8")


def command(finding: FindingView) -> str:
    """What shows a finding again."""
    engine = ["--engine", finding.engine] if finding.engine else []
    return replay_command(finding.path or "", [*target_options(finding.modules), *engine])


def _part(name: str) -> str:
    return files("fuzz.report").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _sections(report: Report, pictures: dict[str, Markup | None]) -> list[tuple[str, str]]:
    run = report.run
    if run is None:
        return [("findings", "Findings")]
    there = {
        "findings": ("Findings", True),
        "targets": ("Targets", True),
        "margins": ("Margins", pictures["margins"]),
        "coverage": ("Coverage", True),
        "throughput": ("Throughput", pictures["throughput"]),
        "trend": ("Past nights", pictures["trend"]),
        "absent": ("Not run", run.absent),
    }
    return [(name, title) for name, (title, shown) in there.items() if shown]


def _choices(report: Report) -> list[tuple[str, str, list[str]]]:
    """What the filters offer: what there is."""
    kinds = (("target", "target"), ("verdict", "verdict"), ("check", "check"), ("state", "known or new"))
    return [(name, title, sorted({str(getattr(f, name)) for f in report.findings})) for name, title in kinds]
