"""What failed on a case, as the text that the command line, the pytest plugin and reports share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from fuzz.case import Case
from fuzz.check.result import CheckResult
from fuzz.describe import describe
from oracle.failure import Failed, render


def failure_text(target: str, case: Case, failures: Sequence[CheckResult], replay: str | None = None) -> str:
    """The text of the failed checks of one case, of which there is one at least."""
    failed = [Failed(check=f.check.value, message=f.message, evidence=f.evidence) for f in failures]
    return render(target, describe(case), failed, replay)


def replay_command(path: Path | str, options: Sequence[str] = ()) -> str:
    """The command that runs a finding's file again. ``options`` are those that a replay needs."""
    return shlex.join(["attn-oracle", "replay", str(path), *options])


def target_options(modules: Sequence[str]) -> list[str]:
    """The options that load a user's own target modules."""
    return [word for module in modules for word in ("--targets", module)]
