"""What the emulator sees of a kernel's accesses, as checks. Other engines see nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fuzz.check.result import Check, CheckResult
from oracle.kinds import Engine
from oracle.verdict import Verdict


@contextmanager
def sanitized(engine: Engine) -> Iterator[list[CheckResult]]:
    """Collect the sanitizer's findings within the block. The list is complete when the block has ended."""
    found: list[CheckResult] = []
    if engine is not Engine.EMULATOR:
        yield found
        return
    from fuzz.engine.emulator import Kind, session

    checks = {
        Kind.OUT_OF_BOUNDS_LOAD: Check.BOUNDS,
        Kind.OUT_OF_BOUNDS_STORE: Check.BOUNDS,
        Kind.UNDEFINED_OUTPUT: Check.UNDEFINED,
        Kind.UNDEFINED_ADDRESS: Check.UNDEFINED,
        Kind.INT32_WRAP_ADDRESS: Check.INT32_WRAP,
        Kind.INTEGER_DIVISION_BY_ZERO: Check.DIVISION,
    }
    with session() as log:
        yield found
    ran = bool(log.launches)
    reported = {checks[finding.kind] for finding in log.findings}
    if ran:
        clean = dict.fromkeys(check for check in checks.values() if check not in reported)
        found += [CheckResult(check, Verdict.PASS) for check in clean]
    found += [
        CheckResult(checks[finding.kind], Verdict.FAIL, finding.message, finding.to_dict()) for finding in log.findings
    ]
