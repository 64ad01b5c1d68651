"""A campaign's place in a store: where it is recorded case by case, and from where it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fuzz.campaign.finding import Finding, saved_finding
from fuzz.campaign.rounds import WHOLE, Closed, Shard
from fuzz.campaign.run import Campaign, HarnessError, Outcome, Recorded
from fuzz.campaign.store import (
    CampaignRow,
    FindingRow,
    Found,
    Key,
    Result,
    Round,
    Store,
    StoreError,
    understood,
    writer,
)
from fuzz.case import Case, case_from_dict
from fuzz.check.result import CaseResult
from fuzz.errors import Exit
from fuzz.plain import Fields
from fuzz.target_sources import digest

_VERSIONS = ("versions", "sources")
"""Settings that say which version of everything is tested."""

_OF_VERSIONS = {*_VERSIONS, "targets", "ledger"}
"""Settings that may change with the versions of what is tested."""


class Journal:
    """Records a campaign in a store. Open one by ``start``; use it as the campaign's ``record``."""

    def __init__(self, store: Store, campaign: int, shard: Shard = WHOLE) -> None:
        self.store = store
        self._campaign, self._shard = campaign, shard
        self._night = store.begin_night(campaign)

    def __call__(self, recorded: Recorded) -> None:
        """Put a case on disk with all that came of it."""
        ask, outcome = recorded.ask, recorded.outcome
        row = Result(
            Key(ask.target, ask.round, ask.index),
            ask.origin,
            ask.case.to_dict(),
            None if outcome.harness is not None else outcome.result.verdict,
            outcome.result.worst_ratio,
            _plain(outcome.result),
            {phase: round(spent, 6) for phase, spent in outcome.seconds.items()},
            None if outcome.harness is None else outcome.harness.to_dict(),
            recorded.new,
        )
        found = [Found(finding.fault, finding.size, finding.to_dict()) for finding in recorded.found]
        self.store.add(self._campaign, row, found, self._round(recorded.closed))

    def minimised(self) -> dict[str, Finding]:
        """What the findings of the campaign, by their ids, were made into."""
        rows = self.store.findings(self._campaign)
        with understood(self.store.path, "findings"):
            return {row.id: smaller for row in rows if (smaller := made_smaller(row)) is not None}

    def _round(self, closed: Closed | None) -> Round | None:
        if closed is None:
            return None
        corpus = {entry.index: list(entry.reasons) for entry in closed.entries}
        return Round(closed.target, closed.round, self._shard.number, closed.cases, corpus)

    def end(self, report: Mapping[str, Any], interrupted: bool) -> None:
        """Note the night's end, and its report."""
        self.store.end_night(self._night, report, interrupted)


def made_smaller(row: FindingRow) -> Finding | None:
    """What a finding was minimised to; None where it was not, or was found on a smaller case since."""
    if row.minimised is None:
        return None
    smaller = saved_finding(row.minimised)
    return smaller if smaller.size <= saved_finding(row.data).size else None


def start(folder: Path, campaign: Campaign, resume: bool) -> tuple[Journal, str]:
    """Open the store of ``folder`` for a campaign; returns what to tell of it, a line or nothing, too.

    With ``resume`` the campaign goes on where the store's last one ended: its results are counted here. A store
    without any, or of other versions of what is tested, begins a new one. Raises ``StoreError``.
    """
    store = writer(folder)
    try:
        settings, rows = settings_of(campaign), store.campaigns()
        last = rows[-1] if rows else None
        if not resume or last is None:
            if last is not None and not last.finished:
                raise StoreError(Exit.USAGE, _unfinished(folder, last))
            told = f"{store.path}: nothing to resume, a new run begins" if resume else ""
            return _open(store, store.begin(settings), campaign), told
        changed = [name for name in settings if settings[name] != last.settings.get(name)]
        newer = next((name for name in _VERSIONS if name in changed), None)
        if newer is not None and set(changed) <= _OF_VERSIONS:
            told = f"{store.path}: {difference(last.settings, settings, newer)}: a new run begins"
            return _open(store, store.begin(settings), campaign), told
        if changed:
            what = difference(last.settings, settings, changed[0])
            raise StoreError(Exit.USAGE, f"--resume: {what}; give the same as before, or another --out")
        restored = restore(store, last.id, campaign)
        return _open(store, last.id, campaign), f"{store.path}: goes on after {restored} cases"
    except BaseException:
        store.close()
        raise


def _open(store: Store, campaign_id: int, campaign: Campaign) -> Journal:
    campaign.record = journal = Journal(store, campaign_id, campaign.shard)
    return journal


def settings_of(campaign: Campaign) -> dict[str, Any]:
    """All that a campaign's cases and verdicts depend on, up to its shard, as plain data."""
    settings = campaign.settings
    return {
        "seed": settings.seed,
        "engine": settings.engine.value,
        "targets": {name: _digest(search.space.dimensions) for name, search in campaign.searches.items()},
        "modules": list(settings.modules),
        "sources": {module: digest(module) for module in settings.modules},
        "timeout_s": settings.timeout_s,
        "most_tokens": campaign.most_tokens,
        "huge": campaign.huge,
        "shards": campaign.shard.of,
        "ledger": _digest([defect.id for defect in settings.defects]) if settings.ledger and settings.excused else None,
        "versions": dict(settings.versions),
    }


def restore(store: Store, campaign_id: int, campaign: Campaign) -> int:
    """Count what a store holds of a campaign, and bring its searches to where they were. Returns the number of cases.

    The searches are run again with the stored results in place of workers. Raises ``StoreError`` where they do not
    ask for the cases that are stored.
    """
    count, record, campaign.record = 0, campaign.record, lambda recorded: None
    for name, search in campaign.searches.items():
        for row in store.results(campaign_id, name):
            if not owns(campaign.shard, row.key):
                continue
            ask = search.next()
            with understood(store.path, row.key.said):
                case = case_from_dict(row.case)
                outcome = outcome_of_row(row, case)
            if (ask.round, ask.index, ask.case) != (row.key.round, row.key.index, case):
                reason = "this release draws another case there; give another --out"
                raise StoreError(Exit.USAGE, f"--resume: {store.path}: {row.key.said}: {reason}")
            campaign.take(ask, outcome, row.reached)
            count += 1
    campaign.record = record
    return count


def outcome_of_row(row: Result, case: Case) -> Outcome:
    """A stored result as it was judged. Raises ``PlainError`` and others for a damaged one: see ``understood``."""
    own = Fields(row.result, "result")
    for name in ("elements", "vacuous_elements"):
        own.count(name)
    own.number("worst_ratio", None)
    for one in own.each("checks"):
        one.text("message")
        one.fields("evidence")
    seconds = Fields({"seconds": row.seconds}, "result").numbers("seconds")
    harness = None
    if row.harness is not None:
        error = Fields(row.harness, "harness")
        harness = HarnessError(row.key.target, case, error.text("message"), error.text("traceback"))
    return Outcome(row.key.target, case, CaseResult.from_dict(row.result), seconds, harness)


def owns(shard: Shard, key: Key) -> bool:
    """Whether a result is one of the shard's: a merged store holds those of others too."""
    return key.index in shard.indices


def _plain(result: CaseResult) -> dict[str, Any]:
    plain = result.to_dict()
    plain.pop("coverage", None)
    return plain


def _digest(data: Any) -> str:
    return blake2b(repr(data).encode(), digest_size=6).hexdigest()


def _unfinished(folder: Path, last: CampaignRow) -> str:
    what = f"an unfinished run (seed {last.settings.get('seed')}, {last.results} cases)"
    return f"--out {folder}: holds {what}: --resume goes on with it, another --out begins anew"


def difference(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> str:
    """One line: what differs in an entry of the settings."""
    old, new = before.get(name), now[name]
    if name == "versions" and isinstance(old, Mapping):
        part = next(part for part in {**old, **new} if old.get(part) != new.get(part))
        return f"{part} was {old.get(part)} and is {new.get(part)}"
    if name == "sources":
        old = old or {}
        part = next((part for part in new if old.get(part) != new[part]), "")
        return f"--targets {part}: its source is not what it was" if part else "other targets of the user than before"
    if name == "targets" and isinstance(old, Mapping):
        added, gone = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
        if not added and not gone:
            part = next(part for part in new if old[part] != new[part])
            return f"{part} declares other cases than before"
        return f"other targets than before{_listed(' without', gone)}{_listed(' with', added)}"
    if name == "ledger":
        return "another ledger of known defects than before"
    return f"{name} was {old} and is {new}"


def _listed(word: str, names: list[str]) -> str:
    return f"{word} {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""
