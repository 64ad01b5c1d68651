"""``attn-oracle store``: what is done with the stores of searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuzz import registry
from fuzz.campaign.journal import Journal, outcome_of_row
from fuzz.campaign.merge import belong, merge
from fuzz.campaign.run import Campaign, Settings
from fuzz.campaign.store import Store, StoreError, reader, understood
from fuzz.case import case_from_dict
from fuzz.commands import built_in_ledger, replay_options
from fuzz.errors import Exit
from fuzz.explain import take_over
from fuzz.plain import Fields
from fuzz.report.summary import distinct
from fuzz.search_command import Ending, finish, keeper
from oracle.declare import Declaration
from oracle.kinds import Engine


def run_merge(folders: Sequence[Path], out: Path, modules: Sequence[str], as_json: bool) -> None:
    """Join stores and report as a search does. Ends with ``Stop`` unless all is clean."""
    belong(folders)
    for folder in folders:
        with reader(folder) as part:
            _loaded(part, modules)
    with merge(folders, out) as store:
        campaign, last = joined(store, modules), store.campaigns()[-1]
        kept, options = keeper(out), replay_options(campaign.settings.engine, modules)
        # Where a part did not end, neither has the whole.
        ending, journal = Ending(interrupted=not last.finished), Journal(store, last.id)
        found = [finding for summary in campaign.summaries.values() for finding in summary.findings]
        kept.resume(found)
        take_over(journal, distinct(found), kept)
        finish(campaign, {}, kept, as_json, options, ending, journal)


def _loaded(store: Store, modules: Sequence[str]) -> dict[str, Declaration]:
    """The known targets, those of a store's last campaign among them. Raises ``StoreError`` and ``RegistryError``."""
    known = registry.load(modules)
    for last in store.campaigns()[-1:]:
        with understood(store.path, "campaigns"):
            _settings(last.settings)
        unknown = next((name for name in last.settings["targets"] if name not in known), None)
        if unknown is not None:
            raise StoreError(Exit.USAGE, f"{store.path}: target {unknown!r} is unknown here; --targets loads it")
    return known


def joined(store: Store, modules: Sequence[str]) -> Campaign:
    """The last campaign of a store with everything counted, of all shards.

    Raises ``StoreError`` where one of its targets is not known here, and ``RegistryError``, ``LedgerError``.
    """
    last = store.campaigns()[-1]
    known, names = _loaded(store, modules), list(last.settings["targets"])
    settings = _settings(last.settings)
    campaign = Campaign([known[name] for name in names], settings, None, None)
    for row in store.results(last.id):
        with understood(store.path, row.key.said):
            declaration = known[row.key.target]
            outcome = outcome_of_row(row, case_from_dict(row.case))
        campaign.count(declaration, outcome)
    return campaign


def _settings(data: Mapping[str, Any]) -> Settings:
    """Those of a stored campaign. Raises ``PlainError``."""
    own = Fields(data, "settings")
    own.fields("targets")
    return Settings(
        engine=own.one_of("engine", Engine),
        seed=own.count("seed"),
        modules=own.texts("modules"),
        ledger=built_in_ledger(),
        excused=own.text("ledger", None) is not None,
        versions=own.fields("versions").data,
    )
