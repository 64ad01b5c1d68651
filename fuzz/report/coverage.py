"""What a set of cases never reached of the kernels that it launched, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fuzz.campaign.run import Outcome
from fuzz.engine.emulator import Coverage


def covered(outcomes: Iterable[Outcome]) -> Coverage:
    """The coverage of all outcomes together."""
    total = Coverage()
    for outcome in outcomes:
        if outcome.result.coverage is not None:
            total.merge(Coverage.from_dict(outcome.result.coverage))
    return total


def coverage_dict(coverage: Coverage) -> dict[str, Any]:
    """By function ("file:name"): what was seen, and under ``missing`` what never was. Line numbers only."""
    missing = coverage.missing()
    return {name: {**entry, "missing": missing[name]} for name, entry in coverage.to_dict().items()}


def coverage_lines(coverage: Coverage) -> list[str]:
    """One line a function, and below it one for each thing that was never seen."""
    lines = []
    for name, missing in coverage.missing().items():
        function = coverage.functions[name]
        gaps = missing["lines"]
        text = f"{name}: {len(function.lines) - len(gaps)} of {len(function.lines)} statements reached"
        lines.append(text + (f"; never: lines {_ranges(gaps)}" if gaps else ""))
        lines += [f"    line {line}: condition never {' or '.join(o)}" for line, o in missing["conditions"].items()]
        lines += [f"    line {line}: loop never with {' or '.join(o)} trips" for line, o in missing["loops"].items()]
        for place, outcomes in missing["masks"].items():
            kind, _, line = place.partition(" ")
            lines.append(f"    line {line}: {kind} never with {' or '.join(outcomes)} of its lanes")
    return lines or ["no kernel of the emulator was launched"]


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, runs shortened: 3-5, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
