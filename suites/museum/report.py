"""A campaign as a page, as plain data, and what there is to complain of."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

from fuzz.check.diagnosis import detail_of
from fuzz.versions import installed
from suites.museum.campaign import Campaign, Kill, Trial
from suites.museum.entry import BugClass, Room

SCHEMA = 1

_HEAD = ("entry", "bug", "class", "place", "what was mutated", "target", "killed by", "case", "diagnosis")


def page(campaign: Campaign) -> str:
    """Markdown."""
    return "\n".join([*_head(campaign), "", *table(campaign), ""])


def _head(campaign: Campaign) -> Iterator[str]:
    trials, twins = campaign.trials, campaign.twins.values()
    kills = [trial.kill for trial in trials if trial.kill is not None]
    tried = sorted(trial.tried for trial in trials if trial.kill is not None) or [0]
    yield f"# The museum, first shelf, {datetime.datetime.now(datetime.UTC).date().isoformat()}"
    yield ""
    yield "Public bugs of attention and cache kernels, each made again as a small mutant of a kernel or a wrapper that"
    yield "a target runs. A case counts only if the target without the mutation, its twin, passes it. In the emulator,"
    drawn = f"the first {campaign.cases} cases a target of a campaign of seed {campaign.seed}, without feedback"
    yield f"with {drawn}, sglang {installed('sglang')}:"
    yield ""
    yield "```sh"
    yield f"python -m suites.museum --cases {campaign.cases} --seed {campaign.seed}"
    yield "```"
    yield ""
    ran = sum(trial.executed for trial in trials)
    yield f"- {len(kills)} of {len(trials)} mutants killed; the mutated lines of {ran} were seen to run."
    passing = sum(len(t.passing) for t in twins)
    yield f"- {sum(len(t.cases) for t in twins)} cases on {len(twins)} twins: {passing} pass,"
    yield f"  {sum(t.known for t in twins)} fail as the ledger of known defects says and are left out, false alarms"
    yield f"  {sum(len(t.false_alarms) for t in twins)}; {sum(t.silent for t in twins)} say nothing."
    yield f"- {sum(kill.alone for kill in kills)} of the killing cases fail in a process of their own too."
    yield f"- Cases until the kill: median {tried[len(tried) // 2]}, at most {tried[-1]}."
    yield f"- Classes: {_counted(BugClass, [trial.entry.kind for trial in trials])}."
    yield f"- Places: {_counted(Room, [trial.entry.room for trial in trials])}."
    first = Counter(killers(kill)[0].partition(" (")[0] for kill in kills)
    yield f"- First check that failed: {', '.join(f'{check} {n}' for check, n in first.most_common())}."


def _counted(kinds: type[StrEnum], shown: Sequence[str]) -> str:
    counts = Counter(shown)
    return ", ".join(f"{kind} {counts[kind]}" for kind in kinds if counts[kind])


def table(campaign: Campaign) -> Iterator[str]:
    """The lines of the table. ``case`` is the case's number in the campaign on its target."""
    yield _row(_HEAD)
    yield _row(["---"] * len(_HEAD))
    for trial in campaign.trials:
        entry, kill = trial.entry, trial.kill
        yield _row(
            [
                entry.id,
                f"[{entry.reference}]({entry.url}): {entry.sentence}",
                entry.kind,
                entry.room,
                entry.mutated,
                f"{entry.target}{' --huge' if entry.huge else ''}",
                "**survived**" if kill is None else ", ".join(killers(kill)),
                f"none of {trial.tried}" if kill is None else f"{kill.number}{'' if kill.alone else ', after others'}",
                "" if kill is None else said(kill),
            ]
        )


def killers(kill: Kill) -> list[str]:
    """The checks that failed; those that compare with the oracle name their probe."""
    return [f"{f.check} (probe {kill.case.probe})" if f.check == "values" else str(f.check) for f in kill.failures]


def said(kill: Kill) -> str:
    """The diagnosis, or what the first failed check says."""
    return next((d for f in kill.failures if (d := detail_of(f.evidence))), "none: " + kill.failures[0].message)


def _row(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def complaints(campaign: Campaign) -> Iterator[str]:
    """A line for each mutant that lives or did not run, and for each false alarm."""
    for trial in campaign.trials:
        if not trial.executed:
            yield f"{trial.entry.id}: the mutated lines never ran in {trial.tried} cases of {trial.entry.target}"
        elif trial.kill is None:
            yield f"{trial.entry.id}: survived {trial.tried} cases of {trial.entry.target}"
    for twin in campaign.twins.values():
        yield from (f"false alarm: {alarm}" for alarm in twin.false_alarms)


def to_dict(campaign: Campaign) -> dict[str, Any]:
    """Plain data."""
    return {
        "schema": SCHEMA,
        "seed": campaign.seed,
        "cases": campaign.cases,
        "complete": campaign.complete,
        "entries": [_entry(trial) for trial in campaign.trials],
        "twins": [
            {
                "target": twin.target,
                "cases": len(twin.cases),
                "passing": len(twin.passing),
                "known": twin.known,
                "silent": twin.silent,
                "false_alarms": list(twin.false_alarms),
            }
            for twin in campaign.twins.values()
        ],
    }


def _entry(trial: Trial) -> dict[str, Any]:
    entry, kill = trial.entry, trial.kill
    own: dict[str, Any] = {"id": entry.id, "reference": entry.reference, "class": entry.kind, "place": entry.room}
    own |= {"target": entry.target, "executed": trial.executed, "tried": trial.tried}
    if kill is None:
        return own | {"killed": None}
    killed = {"case_number": kill.number, "checks": [f.check for f in kill.failures], "probe": kill.case.probe}
    return own | {"killed": killed | {"alone": kill.alone, "said": said(kill), "case": kill.case.to_dict()}}
