"""The names of the figures, and what a run found out about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuzz.errors import Expected

SCHEMA = 1

ORACLE_CPU = "oracle.cpu.vs_sdpa"
ORACLE_CUDA = "oracle.cuda.vs_sdpa"
ORACLE_MATMUL = "oracle.cuda.vs_matmul"
ORACLE_MEMORY = "oracle.cuda.memory_vs_sdpa"
WORST_CASE = "budget.worst_case.cost"
WORST_CASE_CUDA = "budget.worst_case.cost.cuda"
PROBABLE = "budget.probable.cost"
PROBABLE_CUDA = "budget.probable.cost.cuda"
WORST_CASE_LAUNCHES = "budget.worst_case.launches"
PROBABLE_LAUNCHES = "budget.probable.launches"
TIGHTNESS = "budget.tightness"
DETECTED = "budget.detected"
INTERPRETER = "emulator.vs_interpreter"
BATCHED = "emulator.batched_vs_serial"
FUZZ_CPU = "fuzz.cpu.vs_naive"
FUZZ_CUDA = "fuzz.cuda.vs_naive"
OVERHEAD = "fuzz.overhead"
PLUGIN = "plugin.import_ms"

NAMES = (
    *(ORACLE_CPU, ORACLE_CUDA, ORACLE_MATMUL, ORACLE_MEMORY),
    *(WORST_CASE, WORST_CASE_CUDA, PROBABLE, PROBABLE_CUDA),
    *(WORST_CASE_LAUNCHES, PROBABLE_LAUNCHES, TIGHTNESS, DETECTED),
    *(INTERPRETER, BATCHED, FUZZ_CPU, FUZZ_CUDA, OVERHEAD, PLUGIN),
)
"""Every figure, in the order of reports."""


class NotMeasured(Exception):
    """A figure that cannot be had here. The message is the reason."""


class UnknownFigure(Expected, ValueError):
    """A glob that matches no figure. One line: which, and what there is."""


@dataclass(frozen=True)
class Figure:
    """One figure. ``against`` says what it is relative to; ``detail`` holds the measurements behind it, in words."""

    name: str
    value: float
    unit: str
    against: str
    higher_is_better: bool
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``detail`` is for readers and stays out."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "against": self.against,
            "higher_is_better": self.higher_is_better,
        }


@dataclass(frozen=True)
class BenchReport:
    """Each name of ``NAMES`` that was asked for is either among ``figures`` or in ``not_measured`` with a reason."""

    figures: tuple[Figure, ...]
    not_measured: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ``schema`` first."""
        return {
            "schema": SCHEMA,
            "figures": [figure.to_dict() for figure in self.figures],
            "not_measured": dict(self.not_measured),
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and what it means or why there is none, for a table."""
        shown = [(f.name, f"{f.value:.3g} {f.unit}".strip(), f"against {f.against}; {f.detail}") for f in self.figures]
        return shown + [(name, "-", reason) for name, reason in self.not_measured.items()]

    def lines(self) -> list[str]:
        """The table as text."""
        width = max((len(name) for name, _, _ in self.rows()), default=0)
        return [f"{name:<{width}}  {value:>11}  {meaning}" for name, value, meaning in self.rows()]
