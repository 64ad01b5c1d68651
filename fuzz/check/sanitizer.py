"""What the emulator sees of a kernel's accesses, as checks. Other engines see nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from fuzz.check.result import Check, CheckResult
from fuzz.engine.emulator import FindingKind, Log, Options, session
from oracle.kinds import Engine
from oracle.verdict import Verdict

CHECK_OF = {
    FindingKind.OUT_OF_BOUNDS_LOAD: Check.BOUNDS,
    FindingKind.OUT_OF_BOUNDS_STORE: Check.BOUNDS,
    FindingKind.UNDEFINED_OUTPUT: Check.UNDEFINED,
    FindingKind.UNDEFINED_ADDRESS: Check.UNDEFINED,
    FindingKind.UNDEFINED_BRANCH: Check.UNDEFINED,
    FindingKind.INT32_WRAP_ADDRESS: Check.INT32_WRAP,
    FindingKind.INTEGER_DIVISION_BY_ZERO: Check.DIVISION,
    FindingKind.STORE_DTYPE: Check.STORE_DTYPE,
    FindingKind.SHARED_READ_BEFORE_STORE: Check.UNINITIALISED,
    FindingKind.UNINITIALISED_OUTPUT: Check.UNINITIALISED,
    FindingKind.UNINITIALISED_ADDRESS: Check.UNINITIALISED,
    FindingKind.UNINITIALISED_BRANCH: Check.UNINITIALISED,
    FindingKind.RACING_STORES: Check.RACE,
    FindingKind.RACING_LOAD: Check.RACE,
}


@contextmanager
def sanitized(engine: Engine, coverage: bool = False) -> Iterator[Log | None]:
    """Within the block the emulator logs its launches and findings; other engines have no log."""
    if engine is not Engine.EMULATOR:
        yield None
        return
    with session(Options(coverage=coverage)) as log:
        yield log


def sanitizer_results(log: Log | None) -> tuple[CheckResult, ...]:
    """One result a finding, and PASS for each check, if any kernel was launched at all. Root causes come before
    what follows from them, in order of appearance.
    """
    if log is None or not log.launches:
        return ()
    clean = [CheckResult(check, Verdict.PASS) for check in dict.fromkeys(CHECK_OF.values())]
    ordered = sorted(log.findings, key=lambda finding: finding.caused_by is not None)
    found = [CheckResult(CHECK_OF[f.kind], Verdict.FAIL, f.message, asdict(f)) for f in ordered]
    return (*clean, *found)
