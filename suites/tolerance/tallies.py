"""What a soundness campaign counts, for each combination of precision, probe and context class; sums and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

_STEPS = 2
"""Bins of ratios in each factor of two."""
_LEAST = 2.0**-14
"""Smaller ratios share a bin."""


class Combination(NamedTuple):
    """One cell of the table that a campaign fills."""

    precision: str
    probe: str
    context: str


@dataclass(eq=False)
class Tally:
    """Counts that add up over cases, runs and machines.

    errors: cases that raised. elements: of out, and of those the vacuous ones. suspect: elements beyond the probable
    bound and within the worst case. alarms: elements beyond a bound, by bound (probable, worst_case) and tensor (out,
    lse): all of them false if the kernel is right. worst: of each case, its largest error over the probable bound.
    ratios: elements by their error over it, in bins of a factor of sqrt(2); elements with an error of 0 are in none.
    """

    cases: int = 0
    vacuous_cases: int = 0
    suspect_cases: int = 0
    errors: int = 0
    elements: int = 0
    vacuous: int = 0
    suspect: int = 0
    lse_elements: int = 0
    lse_vacuous: int = 0
    alarms: dict[str, int] = field(default_factory=dict)
    worst: list[float] = field(default_factory=list)
    lse_worst: list[float] = field(default_factory=list)
    exact: int = 0
    ratios: dict[int, int] = field(default_factory=dict)

    @property
    def evidence(self) -> int:
        """Elements that are not vacuous."""
        return self.elements - self.vacuous

    @property
    def false_alarms(self) -> int:
        """Elements of out and lse beyond the probable bound, which is the tighter one."""
        return sum(count for name, count in self.alarms.items() if name.startswith("probable"))

    def count_ratios(self, ratio: Tensor) -> None:
        """Add elements by their error over the bound, any shape."""
        positive = ratio[ratio > 0]
        self.exact += ratio.numel() - positive.numel()
        bins = (positive.clamp(_LEAST, 1 / _LEAST).log2() * _STEPS).floor().to(torch.int64)
        for index, count in zip(*(x.tolist() for x in bins.unique(return_counts=True)), strict=True):
            self.ratios[index] = self.ratios.get(index, 0) + count

    def median_ratio(self) -> float | None:
        """Median error over bound of the elements, at the upper edge of its bin."""
        total = self.exact + sum(self.ratios.values())
        if not total:
            return None
        below = self.exact
        for index in sorted(self.ratios):
            if 2 * below >= total:
                break
            below += self.ratios[index]
            edge = 2.0 ** ((index + 1) / _STEPS)
        return 0.0 if 2 * self.exact >= total else edge

    def add(self, other: Tally) -> None:
        """Count `other` too."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.alarms, other.alarms), (self.ratios, other.ratios)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        self.worst += other.worst
        self.lse_worst += other.lse_worst

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what is 0 or empty: there are thousands of tallies in a file."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in _SUMMED}
        plain["alarms"] = dict(sorted(self.alarms.items()))
        plain["ratios"] = {str(index): count for index, count in sorted(self.ratios.items())}
        for name in _LISTED:
            plain[name] = [float(f"{x:.3g}") if math.isfinite(x) else "inf" for x in getattr(self, name)]
        return {name: value for name, value in plain.items() if value}

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> Tally:
        """The inverse of `to_dict`, but for digits. Raises TypeError or ValueError for other data."""
        if unknown := set(plain) - {*_SUMMED, *_LISTED, "alarms", "ratios"}:
            raise ValueError(f"unknown field {min(unknown)}")
        tally = Tally(**{name: int(plain.get(name, 0)) for name in _SUMMED})
        tally.alarms = {str(name): int(count) for name, count in dict(plain.get("alarms", {})).items()}
        tally.ratios = {int(index): int(count) for index, count in dict(plain.get("ratios", {})).items()}
        tally.worst, tally.lse_worst = ([float(x) for x in plain.get(name, [])] for name in _LISTED)
        return tally


_LISTED = ("worst", "lse_worst")
_SUMMED = (
    "cases",
    "vacuous_cases",
    "suspect_cases",
    "errors",
    "elements",
    "vacuous",
    "suspect",
    "lse_elements",
    "lse_vacuous",
    "exact",
)


def total(tallies: Iterable[Tally]) -> Tally:
    """Their sum."""
    found = Tally()
    for tally in tallies:
        found.add(tally)
    return found


def row(tally: Tally) -> dict[str, Any]:
    """A line of a report."""
    return {
        "cases": tally.cases,
        "elements": tally.elements,
        "not_vacuous": tally.evidence,
        "vacuous_share": _share(tally.vacuous, tally.elements),
        "suspect_share": _share(tally.suspect_cases, tally.cases),
        "lse_elements": tally.lse_elements,
        "alarms": dict(sorted(tally.alarms.items())),
        "median_ratio": _shown(tally.median_ratio()),
        "median_of_worst": _shown(median(tally.worst) if tally.worst else None),
        "worst": _shown(max(tally.worst, default=None)),
        "lse_worst": _shown(max(tally.lse_worst, default=None)),
    }


def _share(part: int, whole: int) -> float | None:
    return float(f"{part / whole:.4g}") if whole else None


def _shown(x: float | None) -> float | str | None:
    return x if x is None else float(f"{x:.3g}") if math.isfinite(x) else "inf"
