"""A self-check, in seconds: is the oracle right here, and does the engine do what its verdicts rely on?"""

from __future__ import annotations

from collections.abc import Sequence

from fuzz import engine as engines
from fuzz.certify.compiled import emulated
from fuzz.certify.device import certify_device
from fuzz.certify.oracle import certify_oracle
from fuzz.certify.trial import Check, judge
from fuzz.engine.emulator.certify import certify as certify_emulator
from oracle.kinds import Engine

__all__ = ["Check", "certify", "rows"]


def certify(engine: Engine) -> list[Check]:
    """Check the oracle and an engine. Takes seconds; needs a plain installation only.

    Raises EngineError if the engine cannot run here.
    """
    reason = engines.unavailable(engine)
    if reason is not None:
        raise engines.EngineError(reason)
    return certify_oracle() + (_emulator() if engine is Engine.EMULATOR else certify_device(engine))


def rows(checks: Sequence[Check]) -> list[tuple[str, str, str, str]]:
    """Room, name, outcome and detail of each check, for a table."""
    return [(c.room, c.name, "pass" if c.passed else "FAIL", c.detail) for c in checks]


def _emulator() -> list[Check]:
    own = [Check(c.name, "engine", c.passed, c.detail) for c in certify_emulator()]
    return [*own, judge("kernels, emulated", "engine", emulated)]
