"""Hypothesis strategies over the case space, for property tests and shrinking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

from fuzz.case import Case
from fuzz.space import Space

T = TypeVar("T")


class _Drawing:
    """A chooser that asks Hypothesis; the first option and the lowest number are the simplest."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def choose(self, name: str, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))

    def integer(self, name: str, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


@st.composite
def cases(draw: st.DrawFn, space: Space) -> Case:
    """Cases inside the capabilities that ``space`` was made from."""
    return space.draw(_Drawing(draw))
