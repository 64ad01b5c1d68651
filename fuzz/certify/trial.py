"""Checks that have to prove that they can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One line of a self-check. ``room`` is ``oracle`` or ``engine``; ``detail`` what was compared, or the fault."""

    name: str
    room: str
    passed: bool
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Trial(Generic[T]):
    """A comparison with the answers that it has to accept and those that it has to reject, by label.

    ``fault`` says in a few words how an answer differs from the truth, or None. A rejected answer is as close to a
    right one as a real mistake would be: a window off by one, a value rounded twice.
    """

    fault: Callable[[T], str | None]
    right: Mapping[str, T]
    wrong: Mapping[str, T]


def judge(name: str, room: str, trial: Callable[[], Trial[Any]]) -> Check:
    """Run a trial. It passes if every right answer is accepted and every wrong one rejected."""
    try:
        passed, detail = _outcome(trial())
    except Exception as error:  # noqa: BLE001 - what is checked may be broken in any way; the others must still run
        passed, detail = False, f"raised {type(error).__name__}: {error}".splitlines()[0]
    return Check(name, room, passed, detail)


def _outcome(trial: Trial[Any]) -> tuple[bool, str]:
    for label, answer in trial.right.items():
        fault = trial.fault(answer)
        if fault is not None:
            return False, f"{label}: {fault}"
    for label, answer in trial.wrong.items():
        if trial.fault(answer) is None:
            return False, f"this check cannot fail: it accepts {label}"
    if not trial.right or not trial.wrong:
        return False, "this check cannot fail: it has nothing to accept, or nothing to reject"
    return True, f"accepts {', '.join(trial.right)}; rejects {', '.join(trial.wrong)}"
