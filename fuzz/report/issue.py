"""One finding as Markdown that can be pasted into an issue: what, on what, how to see it, and with what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from fuzz.campaign.finding import Finding
from fuzz.case import Case
from fuzz.check.diagnosis import KEY, detail_of, others_of
from fuzz.features import labels
from fuzz.report.failure import replay_command, target_options

_ALWAYS = ("operation", "context_lens", "query_lens", "num_kv_heads", "group_size", "head_dim", "v_head_dim", "dtype")
_PLAIN = (None, False, 0, (), "none", "normal", "full", "tight", "ascending", "inline")
"""Values of other fields that say nothing."""


def issue(finding: Finding, script: str | None, reason: str = "") -> str:
    """The report. ``script``: its file's name; None: there is none, for ``reason``."""
    return "\n".join(_lines(finding, script, reason)) + "\n"


def _lines(finding: Finding, script: str | None, reason: str) -> Iterator[str]:
    yield f"# {_inline(finding.target)}: {_inline(finding.check)} is wrong"
    yield from ("", "## What", "", _inline(finding.message), "")
    if (detail := detail_of(finding.evidence)) is not None:
        yield f"Diagnosis, by the smallest change with which a float64 oracle gives the same result: {_inline(detail)}."
        for other in others_of(finding.evidence):
            yield f"- explains it as well: {_inline(other)}"
        yield ""
    else:
        yield from ("Not diagnosed.", "")
    yield from ("## Smallest input" if finding.smallest else "## Input", "", "| field | value |", "|---|---|")
    for name, value in shown_fields(finding.case):
        yield f"| {name} | {_cell(value)} |"
    yield from (
        "",
        f"Values are drawn from a counter (Philox) by seed {finding.case.seed}: the case alone rebuilds them.",
        "",
    )
    yield from ("## How to see it", "")
    if script is not None:
        yield f"- `python3 {script}`: needs torch and the kernel's own package, and says so where it needs a GPU. It"
        yield "  ends with 1 if the fault shows, with 0 if it does not."
    else:
        yield f"- There is no script without attn-oracle: {_inline(reason)}."
    command = replay_command("finding.json", target_options(finding.modules))
    yield f"- `{command}`: on a CPU, too, where the kernel is emulated."
    yield from ("", "## Environment", "", "| | |", "|---|---|", f"| engine | {finding.engine} |")
    for name, version in finding.versions.items():
        yield f"| {name} | {_cell(version or 'none')} |"
    yield from ("", "## Evidence", "", "| | |", "|---|---|")
    for name, value in finding.evidence.items():
        if name != KEY and isinstance(value, str | int | float):
            yield f"| {_cell(name)} | {_cell(str(value))} |"
    yield f"| finding | {finding.id} |"
    yield f"| known defect | {_cell(finding.known or 'no')} |"
    yield from ("", "## For a person to fill in", "", "- severity:", "- reachability:")


def shown_fields(case: Case) -> list[tuple[str, str]]:
    """The fields of a case that say something, and their values."""
    found = []
    attends = ("group_size", "query_lens")
    for name, value in ((f.name, getattr(case, f.name)) for f in fields(Case)):
        if name == "seed" or (name in attends and not case.is_attention and value in ((), 1)):
            continue
        if name in _ALWAYS or (value not in _PLAIN and (name, str(value)) not in _SAYS_NOTHING):
            found.append((name, ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)))
    features = [f"{name}={label}" for name, label in sorted(labels(case)) if name in ("length", "query", "window")]
    return [*found, ("features", ", ".join(features) or "none")]


_SAYS_NOTHING = {("causal", "True"), ("parts", "1"), ("scale", "None")}


def _inline(text: str) -> str:
    """One line in which nothing is taken for markup."""
    line = " ".join(str(text).split())
    return "".join(f"\\{c}" if c in "\\`*_<>[]#|" else c for c in line)


def _cell(text: str) -> str:
    return _inline(text)
