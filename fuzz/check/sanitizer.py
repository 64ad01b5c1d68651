"""What the emulator sees of a kernel's accesses, as checks. Other engines see nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from fuzz.check.result import Check, CheckResult
from fuzz.engine.emulator import FindingKind, Log, session
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
}


@contextmanager
def sanitized(engine: Engine) -> Iterator[Log | None]:
    """Within the block the emulator logs its launches and findings; other engines have no log."""
    if engine is not Engine.EMULATOR:
        yield None
        return
    with session() as log:
        yield log


def sanitizer_results(log: Log | None) -> tuple[CheckResult, ...]:
    """One result a finding, and PASS for each check, if any kernel was launched at all."""
    if log is None or not log.launches:
        return ()
    clean = [CheckResult(check, Verdict.PASS) for check in dict.fromkeys(CHECK_OF.values())]
    found = [CheckResult(CHECK_OF[f.kind], Verdict.FAIL, f.message, asdict(f)) for f in log.findings]
    return (*clean, *found)
