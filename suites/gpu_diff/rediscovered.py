"""Which known defects a search found by itself: what a store holds, compared with the ledger entry by entry.

python -m attn_oracle_cli fuzz --engine emulator --time 10m --no-ledger --out DIR
python -m suites.gpu_diff.rediscovered DIR

An entry is found if a failure has its target, check, diagnosis and features. Entries that say nothing about the
store's engine or versions, or whose target was not in the search, are listed apart. Exit 1: one was not found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fuzz.campaign import store
from fuzz.campaign.finding import Finding, findings_of, saved_finding
from fuzz.campaign.minimise import MOST_REQUESTS, MOST_TOKENS, readable
from fuzz.campaign.run import Settings
from fuzz.campaign.store import CampaignRow, Store
from fuzz.case import case_from_dict
from fuzz.check.result import CaseResult
from fuzz.cli import guarded
from fuzz.commands import built_in_ledger
from fuzz.errors import Exit, Stop
from fuzz.ledger import Defect
from oracle.diagnose.model import Kind
from oracle.failure.words import count
from oracle.kinds import Engine

LARGER = {
    "sglang-decode-logits-in-the-input-dtype": "rounding errors that add up over hundreds of keys of large logits",
    "aiter-unified-attention-long-head-dim-80": "the kernel for contexts of more than 512 keys",
    "aiter-unified-attention-window-low-logits": "a query whose window lies beyond the first tile of 64 keys",
    "aiter-unified-attention-segments-low-logits": "a segment without a visible key, after the first of 64 keys",
    "aiter-pa-decode-page-1024-window-over-partitions": "a window over more than four partitions of 256 keys",
    "aiter-pa-decode-ps-split-on-a-partition": "splits of whole partitions of 256 keys",
    "aiter-pa-decode-non-ps-window-begins-a-partition": "a second partition of 256 keys",
    "aiter-pa-decode-non-ps-v4d-window-begins-a-partition": "a second partition of 256 keys",
    "tokenspeed-extend-empty-request": "a request of more than one page of 64 keys",
}
"""Entries whose smallest case has more than two requests or 64 tokens, and what of the fault asks for that."""


@dataclass(frozen=True)
class Row:
    """An entry. ``found``: its smallest case; ``cases``: how many showed it; ``absent``: why it cannot be there."""

    defect: Defect
    cases: int = 0
    found: Finding | None = None
    minimised: bool = False
    tried: int = 0
    absent: str = ""

    @property
    def line(self) -> str:
        """For a terminal."""
        if self.absent:
            return f"{self.defect.id}: cannot be there: {self.absent}"
        if self.found is None:
            return f"{self.defect.id}: NOT FOUND in {self.tried} cases of {', '.join(self.defect.targets)}"
        lengths = self.found.case.context_lens
        size = f"{count(len(lengths), 'request')}, {sum(lengths)} tokens"
        large = f" (large: {LARGER.get(self.defect.id, 'it could be smaller')})"
        how = f"{'minimised' if self.minimised else 'as found'}: {size}{'' if self.small else large}"
        return f"{self.defect.id}: {self.cases} cases; {self.found.check}, {self.found.diagnosis}; {how}"

    @property
    def small(self) -> bool:
        """Whether it was found on a case that can be read."""
        return self.found is not None and readable(self.found.case)

    @property
    def explained(self) -> bool:
        """Whether its case was diagnosed, or failed a check that says itself what is wrong."""
        return self.found is not None and self.found.diagnosis != Kind.UNEXPLAINED


def compare(opened: Store, ledger: Sequence[Defect]) -> list[Row]:
    """One row an entry, for the last campaign of a store."""
    campaign = opened.campaigns()[-1]
    settings = Settings(
        engine=Engine(campaign.settings["engine"]), ledger=tuple(ledger), versions=campaign.settings["versions"]
    )
    tried: dict[str, int] = {}
    shown: dict[str, list[Finding]] = {}
    for row in opened.results(campaign.id):
        tried[row.key.target] = tried.get(row.key.target, 0) + 1
        found = findings_of(row.key.target, case_from_dict(row.case), CaseResult.from_dict(row.result), settings)
        for finding in found:
            for entry in _entries(finding, settings):
                shown.setdefault(entry, []).append(finding)
    smaller: dict[str, list[Finding]] = {}
    for finding in _minimised(opened, campaign):
        for entry in _entries(finding, settings):
            smaller.setdefault(entry, []).append(finding)
    return [_row(d, settings, campaign, tried, shown.get(d.id, []), smaller.get(d.id, [])) for d in ledger]


def _entries(finding: Finding, settings: Settings) -> Iterator[str]:
    """Every entry that describes a failure: one case may show several."""
    for defect in settings.defects:
        if defect.matches(finding.target, finding.check, finding.diagnosis, finding.case):
            yield defect.id


def _minimised(opened: Store, campaign: CampaignRow) -> Iterator[Finding]:
    for row in opened.findings(campaign.id):
        if row.minimised is not None:
            yield saved_finding(row.minimised)


def _row(
    defect: Defect,
    settings: Settings,
    campaign: CampaignRow,
    tried: Mapping[str, int],
    found: Sequence[Finding],
    smaller: Sequence[Finding],
) -> Row:
    if not any(target in campaign.settings["targets"] for target in defect.targets):
        return Row(defect, absent=f"{', '.join(defect.targets)} was not in the search")
    if settings.engine not in defect.engines:
        return Row(defect, absent=f"the {settings.engine} does not show it")
    if not defect.applies(settings.engine, settings.versions):
        return Row(defect, absent="the entry is of other versions")
    cases = len({finding.case for finding in found})
    best = min([*smaller, *found], key=_place, default=None)
    return Row(defect, cases, best, best in smaller, sum(tried.get(target, 0) for target in defect.targets))


def _place(finding: Finding) -> tuple[bool, bool, tuple[int, ...]]:
    """What is shown of an entry: a case that can be read, diagnosed if there is such a one, the smallest of them."""
    return not readable(finding.case), finding.diagnosis in (None, Kind.UNEXPLAINED), finding.size


def rediscovered(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the search kept its store.")],
) -> None:
    """See the module's text."""
    with store.reader(folder) as opened:
        if not opened.campaigns():
            raise Stop(Exit.USAGE, f"{folder}: the store holds no search")
        rows = compare(opened, built_in_ledger())
    for row in sorted(rows, key=lambda row: (bool(row.absent), row.found is not None, row.defect.id)):
        print(row.line)
    there = [row for row in rows if not row.absent]
    found = [row for row in there if row.found is not None]
    print(f"{len(found)} of {len(there)} entries found, {len(rows) - len(there)} cannot be there")
    larger = sum(row.minimised and row.defect.id in LARGER and not row.small for row in found)
    print(
        f"of those {sum(row.small for row in found)} on at most {MOST_REQUESTS} requests and {MOST_TOKENS} tokens, "
        f"{larger} made smaller as far as the fault allows, {sum(row.explained for row in found)} explained"
    )
    if len(found) < len(there):
        raise Stop(Exit.FINDINGS)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=__doc__)(rediscovered)
    sys.exit(guarded(app))
