"""Cases as Hypothesis draws them: it chooses, our process builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pytest
from hypothesis import strategies as st

from attn_oracle import current
from attn_oracle.options import TIMEOUT_S
from attn_oracle.process import Unavailable, shared
from attn_oracle.target import Named, Target, named


@dataclass(frozen=True, repr=False)
class DrawnCase:
    """One case of a target: plain data, from which its tensors are built elsewhere."""

    target: str
    words: str
    data: Mapping[str, Any]
    named: Named

    def __repr__(self) -> str:
        return f"<case for {self.target}: {self.words}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print every field


@st.composite
def cases(draw: st.DrawFn, target: Target, modules: tuple[str, ...] | None = None) -> DrawnCase:
    """Cases inside what a target declares, the simplest first: one request, few keys, no feature.

    target: as of `check`, with `modules`. `draw` is Hypothesis's, and not given: `cases(mine)`. Raises UsageError for
    a target that is unknown; skips the test where it cannot run here.
    """
    current.check_out()
    try:
        own = opened(named(target, modules))
    except Unavailable as reason:
        skip(target, reason)
    return drawn(draw, own)


def skip(target: Target, reason: Unavailable) -> NoReturn:
    """Skip the test that runs."""
    name = target if isinstance(target, str) else getattr(target, "__name__", target)
    pytest.skip(f"{name}: {reason}")


def drawn(draw: st.DrawFn, own: Named) -> DrawnCase:
    """One case of a target that is open."""

    def pick(question: dict[str, Any]) -> int:
        if "choose" in question:
            return draw(st.sampled_from(range(question["choose"])))
        low, high = question["integer"]
        return draw(st.integers(low, high))

    said = shared().draw(own.name, pick)
    return DrawnCase(own.name, said["words"], said["case"], own)


def opened(own: Named, engine: str | None = None) -> Named:
    """The same target, known to our process and able to run here. engine: the one in force, where none is given.

    Raises UsageError, Unavailable.
    """
    engine = engine or current.engine()
    process = shared()
    known = process.opened.get(own.name)
    if known is None or known[:2] != (own.modules, engine):
        said = process.ask("open", target=own.name, modules=list(own.modules), engine=engine, timeout=TIMEOUT_S)
        known = process.opened[own.name] = own.modules, engine, said["engine"]
    return replace(own, runs_on=known[2])
