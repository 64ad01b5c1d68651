"""What follows a search: each new fault on a smaller case, and a folder that shows it to whoever has none of us."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fuzz.campaign.finding import Finding
from fuzz.campaign.journal import Journal
from fuzz.campaign.minimise import Smaller, minimise_findings
from fuzz.campaign.pool import Pool
from fuzz.campaign.run import MOST_HARNESS_ERRORS, Campaign
from fuzz.report.keep import Keeper
from fuzz.report.reproducer import ISSUE_FILE, open_reproducers, reproducers, write_reproducer
from fuzz.report.summary import distinct, shown
from oracle.failure.words import count


def explain(campaign: Campaign, pool: Pool, kept: Keeper, time_s: float, journal: Journal | None = None) -> None:
    """Make each new fault's smallest case smaller, for ``time_s`` in all, and write its reproducer.

    Everything is kept as soon as it is there, what an earlier run did is taken as it is, and time is told on stderr.
    ``time_s`` 0: nothing is done but that. ``pool`` is the campaign's. Raises ``StoreError``.
    """
    found = [f for s in campaign.summaries.values() for f in distinct(s.findings) if f.known is None]
    earlier = {} if journal is None else take_over(journal, found, kept)
    if not found or not time_s or len(campaign.harness_errors) >= MOST_HARNESS_ERRORS:
        return
    if todo := [f for f in found if f.id not in earlier]:
        _minimise(todo, campaign, pool, kept, time_s, journal)
    _reproduce(shown(found, kept.smaller), campaign, kept)


def take_over(journal: Journal, findings: Sequence[Finding], kept: Keeper) -> dict[str, Finding]:
    """Keep what findings were made into before, as a journal has it; returned by their ids. Raises ``StoreError``."""
    earlier = journal.minimised()
    for finding in findings:
        if finding.id in earlier:
            kept.replace(finding, earlier[finding.id])
    return earlier


def _minimise(
    findings: Sequence[Finding], campaign: Campaign, pool: Pool, kept: Keeper, time_s: float, journal: Journal | None
) -> None:
    def done(smaller: Smaller) -> None:
        if journal is not None:
            journal.store.set_minimised(smaller.before.id, smaller.after.to_dict())
        kept.replace(smaller.before, smaller.after)

    began = time.monotonic()
    _say(f"making {count(len(findings), 'finding')} smaller, for at most {time_s:.0f} s")
    results = minimise_findings(findings, campaign.targets, pool, campaign.settings, time_s, done=done)
    whole = sum(result.complete for result in results)
    _say(f"{len(results)} made smaller in {time.monotonic() - began:.0f} s, {whole} of them as far as it goes")


def _reproduce(findings: Sequence[Finding], campaign: Campaign, kept: Keeper) -> None:
    folders = {f.id: kept.folder / f"reproducer-{f.id}" for f in findings}
    todo = [f for f in findings if not (folders[f.id] / ISSUE_FILE).is_file()]
    if not todo:
        return
    began = time.monotonic()
    scripts = 0
    _say(f"writing {count(len(todo), 'reproducer')}")
    with open_reproducers(campaign.settings) as pool:
        for finding, made in reproducers(pool, todo, campaign.settings):
            try:
                write_reproducer(folders[finding.id], finding, made)
            except OSError as error:
                kept.failure = kept.failure or error
                return
            scripts += made.script is not None
    _say(f"{count(len(todo), 'reproducer')} written in {time.monotonic() - began:.0f} s, {scripts} with a script")


def _say(line: str) -> None:
    Console(stderr=True).print(Text(line), soft_wrap=True)
