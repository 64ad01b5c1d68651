"""How near to the probable budget correct kernels come, on cases that never change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from fuzz.bench.report import TIGHTNESS, Figure
from fuzz.buffers import Poison
from fuzz.case import Case, case_from_dict
from fuzz.instance import build
from suites.tolerance.tallies import Tally
from suites.tolerance.trials import Outcome, evaluate
from suites.tolerance.variants import Choices, run

CASES = Path(__file__).with_name("tightness.json")
"""Cases of every probe that makes weights round, at three classes of contexts, each with the choices of a kernel that
casts its weights to bf16. Drawn once, as the soundness campaign draws them."""


def cases() -> Iterator[tuple[Case, Choices]]:
    """Each case and its kernel."""
    data: list[dict[str, Any]] = json.loads(CASES.read_text(encoding="utf-8"))
    for entry in data:
        yield case_from_dict(entry["case"]), Choices(**entry["choices"])


def measured(case: Case, choices: Choices) -> Tally:
    """One case, judged as the campaign judges it."""
    problem = build(case, Poison.POSITIVE).problem
    if problem is None:
        raise TypeError(f"{case.operation} poses no attention problem")
    result = run(problem, choices)
    return evaluate(Outcome(problem, choices.precision(), case.dtype, result.out, result.lse, result.wide))


def tightness() -> Figure:
    """Median over the cases of a case's largest error over its probable bound, before the output is rounded."""
    ratios = sorted(ratio for case, choices in cases() for ratio in measured(case, choices).worst)
    return Figure(
        TIGHTNESS,
        median(ratios),
        "share",
        f"the probable bound: the worst element of each of {len(ratios)} cases, weights in bf16, median over cases",
        True,
        f"least {ratios[0]:.3g}, largest {ratios[-1]:.3g}",
    )
