"""Cases of an ordinary campaign against each mutant, and against the same code without the mutation."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import registry
from fuzz.campaign.corpus import Seen
from fuzz.campaign.finding import findings_of
from fuzz.campaign.pool import Pool
from fuzz.campaign.reply import Reply
from fuzz.campaign.rounds import Search
from fuzz.campaign.run import Settings
from fuzz.campaign.server import Server
from fuzz.campaign.worker import Job, Limits, fair_memory_bytes
from fuzz.case import Case
from fuzz.check.result import CaseResult, CheckResult
from fuzz.errors import Exit, Stop
from fuzz.ledger import Defect
from fuzz.space import Space
from fuzz.versions import versions
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.museum import overlay
from suites.museum.apply import apply
from suites.museum.entry import Entry

TIMEOUT_S = 600.0
"""All cases of one target."""

Key = tuple[str, bool]
"""A target and whether its cases may be huge: what its cases are drawn from, beside the seed."""


@dataclass(frozen=True)
class Twin:
    """A target as it is, on the cases that its mutants get. ``passing``: indices of cases that pass.

    ``known`` counts cases that fail as the ledger says, ``silent`` those whose budget says nothing or that are outside
    what is declared; ``false_alarms`` are the failures that the ledger does not know.
    """

    target: str
    cases: tuple[Case, ...]
    passing: tuple[int, ...]
    known: int
    silent: int
    false_alarms: tuple[str, ...]


@dataclass(frozen=True)
class Kill:
    """A case that the twin passes and the mutant fails. ``number`` counts the campaign's cases from 1.

    ``alone``: the case fails in a new process that ran no other.
    """

    number: int
    case: Case
    failures: tuple[CheckResult, ...]
    alone: bool


@dataclass(frozen=True)
class Trial:
    """What became of an entry: ``executed`` says whether the mutated lines ran, ``tried`` how many cases they got."""

    entry: Entry
    executed: bool
    tried: int
    kill: Kill | None


@dataclass(frozen=True)
class Campaign:
    """Its trials in the order of the entries, its twins by what their cases are drawn from."""

    seed: int
    cases: int
    trials: tuple[Trial, ...]
    twins: Mapping[Key, Twin]

    @property
    def complete(self) -> bool:
        """Every mutant ran and was killed, and no twin failed where the ledger knows nothing."""
        clean = not any(twin.false_alarms for twin in self.twins.values())
        return clean and all(trial.executed and trial.kill is not None for trial in self.trials)


def run(entries: Sequence[Entry], cases: int, seed: int, jobs: int, ledger: tuple[Defect, ...]) -> Campaign:
    """Try the entries. Raises ``Stop`` where a mutation does not fit its file, or our own code fails."""
    settings = Settings(engine=Engine.EMULATOR, seed=seed, jobs=jobs, ledger=ledger, versions=versions())
    declared = registry.load()
    keys = dict.fromkeys((entry.target, entry.huge) for entry in entries)
    drawn = {key: _drawn(Search(Space(declared[key[0]], huge=key[1]), seed), cases) for key in keys}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attn-oracle-museum-")))
        mutants = [_mutant(entry, folder / entry.id) for entry in entries]
        server = stack.enter_context(Server(("torch", "fuzz.campaign.job")))
        limits = Limits(memory_bytes=fair_memory_bytes(jobs))
        pool = stack.enter_context(Pool(Job("suites.museum.worker:run"), jobs, server, limits))
        asked = [_request(key[0], drawn[key], None) for key in keys]
        replies = [_results(reply) for _, reply in pool.map(iter(asked), TIMEOUT_S)]
        twins = {key: _twin(key[0], drawn[key], got, settings) for key, (got, _) in zip(keys, replies, strict=True)}
        trials = tuple(_trials(pool, entries, mutants, twins))
    return Campaign(seed, cases, trials, twins)


def _drawn(search: Search, count: int) -> tuple[Case, ...]:
    """The first cases of a campaign in which all run and none comes near its budget or shows what it reaches."""
    cases = []
    for _ in range(count):
        ask = search.next()
        search.note(ask, Seen(ran=True, failed=False, margin=0))
        cases.append(ask.case)
    return tuple(cases)


def _trials(
    pool: Pool, entries: Sequence[Entry], mutants: Sequence[dict[str, Any]], twins: Mapping[Key, Twin]
) -> Iterator[Trial]:
    given = [twins[entry.target, entry.huge] for entry in entries]
    asked = [
        _request(entry.target, [twin.cases[i] for i in twin.passing], mutant)
        for entry, twin, mutant in zip(entries, given, mutants, strict=True)
    ]
    first = [_results(reply) for _, reply in pool.map(iter(asked), TIMEOUT_S)]
    killed = [i for i, (results, _) in enumerate(first) if results and results[-1].failures]
    again = [{**asked[i], "cases": [asked[i]["cases"][len(first[i][0]) - 1]]} for i in killed]
    alone = {i: _results(reply)[0][0] for i, (_, reply) in zip(killed, pool.map(iter(again), TIMEOUT_S), strict=True)}
    for i, (entry, twin, (results, executed)) in enumerate(zip(entries, given, first, strict=True)):
        kill = None
        if i in alone:
            index = twin.passing[len(results) - 1]
            kill = Kill(index + 1, twin.cases[index], results[-1].failures, bool(alone[i].failures))
        yield Trial(entry, executed, len(results), kill)


def _request(target: str, cases: Sequence[Case], mutant: dict[str, Any] | None) -> dict[str, Any]:
    return {"target": target, "cases": [case.to_dict() for case in cases], "mutant": mutant}


def _mutant(entry: Entry, folder: Path) -> dict[str, Any]:
    file = entry.mutation.place.file
    mutant = apply(entry.mutation, overlay.original(file).read_text(encoding="utf-8"))
    path = overlay.build(file, mutant.text, folder)
    return {"folder": str(folder), "path": str(path), "lines": sorted(mutant.lines)}


def _results(reply: Reply) -> tuple[list[CaseResult], bool]:
    if not reply.ok or reply.value is None:
        trace = reply.raised.traceback if reply.raised else reply.output
        raise Stop(Exit.HARNESS, f"museum: a worker gave no results: {reply.status.value}: {reply.detail}\n{trace}")
    return [CaseResult.from_dict(data) for data in reply.value["results"]], reply.value["executed"]


def _twin(target: str, cases: Sequence[Case], results: Sequence[CaseResult], settings: Settings) -> Twin:
    passing, known, silent, alarms = [], 0, 0, []
    for i, (case, result) in enumerate(zip(cases, results, strict=True)):
        found = findings_of(target, case, result, settings)
        alarms += [f"{target}, case {i + 1}: {f.check}: {f.message}" for f in found if f.known is None]
        known += bool(found) and all(f.known is not None for f in found)
        if result.verdict is Verdict.PASS:
            passing.append(i)
        silent += result.verdict is not Verdict.PASS and not found
    return Twin(target, tuple(cases), tuple(passing), known, silent, tuple(alarms))
