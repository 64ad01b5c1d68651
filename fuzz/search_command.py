"""What ``attn-oracle fuzz`` and gpu_diff do once targets are chosen: search, keep, report."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from fuzz.campaign.finding import Finding
from fuzz.campaign.journal import Journal, start
from fuzz.campaign.pool import Pool
from fuzz.campaign.run import Campaign, Outcome
from fuzz.campaign.store import StoreError
from fuzz.commands import Prepared, stop_unless_clean, wide_console
from fuzz.errors import Stop, exit_of
from fuzz.explain import explain
from fuzz.progress import progress
from fuzz.report import summary as summaries
from fuzz.report.keep import Keeper
from fuzz.report_command import write_run


def run_search(
    campaign: Campaign,
    prepared: Prepared,
    out: Path,
    resume: bool,
    as_json: bool,
    options: Sequence[str],
    minimise_s: float,
) -> None:
    """Search, recorded in the store of ``out``, explain what was found, and report.

    ``options`` are those of a replay.
    """
    kept = keeper(out)
    journal, told = start(out, campaign, resume)
    with journal.store:
        if told:
            Console(stderr=True).print(Text(told), soft_wrap=True)
        kept.resume(f for s in campaign.summaries.values() for f in s.findings)
        with prepared.pool() as pool:
            ending = search(campaign, pool, kept)
            if not ending.interrupted:
                ending = explained(campaign, pool, kept, minimise_s, journal)
        finish(campaign, prepared.skipped, kept, as_json, options, ending, journal)


@dataclass(frozen=True)
class Ending:
    """How a search ended before its time, if it did: by Ctrl-C or SIGTERM, or as its store took no more."""

    interrupted: bool = False
    failure: StoreError | None = None


def search(campaign: Campaign, pool: Pool, kept: Keeper) -> Ending:
    """Run a campaign with progress on stderr; each finding is kept at once. Ctrl-C or SIGTERM ends it.

    Whoever listened to its outcomes goes on listening.
    """
    earlier = campaign.on_outcome
    with progress(campaign) as step:

        def note(outcome: Outcome, found: list[Finding]) -> None:
            earlier(outcome, found)
            kept.keep(found)
            if outcome.harness is not None:
                kept.keep_error(outcome.harness)
            step(outcome, found)

        campaign.on_outcome = note
        try:
            with terminable():
                campaign.run(pool)
        except KeyboardInterrupt:
            if not campaign.harness_errors and not any(summary.cases for summary in campaign.summaries.values()):
                raise  # there is nothing to show, and no exit code that it asks for
            Console(stderr=True).print("interrupted: what was found so far follows")
            return Ending(interrupted=True)
        except StoreError as failure:
            return Ending(interrupted=True, failure=failure)
    return Ending()


def explained(campaign: Campaign, pool: Pool, kept: Keeper, time_s: float, journal: Journal | None = None) -> Ending:
    """See ``explain``. Ctrl-C or SIGTERM ends it, as a store does that takes no more; what there is is kept."""
    try:
        with terminable():
            explain(campaign, pool, kept, time_s, journal)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted: what was explained so far is kept")
    except StoreError as failure:
        return Ending(interrupted=True, failure=failure)
    return Ending()


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt``, as Ctrl-C does. Without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def finish(
    campaign: Campaign,
    skipped: Mapping[str, str],
    kept: Keeper,
    as_json: bool,
    options: Sequence[str] = (),
    ending: Ending | None = None,
    journal: Journal | None = None,
) -> None:
    """Print the result and note it in the journal; end with ``Stop`` unless all is clean and kept.

    ``options`` are those of a replay.
    """
    ending = ending or Ending()
    found = [f for s in campaign.summaries.values() for f in s.findings]
    kept.keep(found)  # an interrupt may have come between a finding and its file
    shown = summaries.shown(found, kept.smaller)
    report = summaries.to_dict(campaign, skipped, kept.paths, kept.smaller)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        console = wide_console()
        summaries.print_findings(shown, kept.paths, console, options)
        summaries.print_table(campaign, skipped, console)
    if ending.failure is not None:
        raise ending.failure
    if journal is not None:
        journal.end(report, ending.interrupted)
    if kept.failure is not None and not campaign.harness_errors:
        raise _cannot_write(kept.folder, kept.failure)
    page = write_run(kept.folder, report, shown, kept.paths)
    Console(stderr=as_json).print(Text(f"report: {page}"), soft_wrap=True)
    stop_unless_clean(campaign)


def keeper(out: Path) -> Keeper:
    """Where findings are kept, ready before the first case. Raises ``Stop`` where the folder cannot be written."""
    kept = Keeper(out)
    try:
        kept.open()
    except OSError as error:
        raise _cannot_write(out, error) from None
    return kept


def _cannot_write(out: Path, error: OSError) -> Stop:
    return Stop(exit_of(error), f"--out {out}: cannot be written: {error.strerror}")
