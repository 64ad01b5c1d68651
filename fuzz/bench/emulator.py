"""What batching the programs of a grid gains, and how the emulator compares with Triton's interpreter."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from fuzz import registry
from fuzz.bench import fixed
from fuzz.bench.alone import Way, process
from fuzz.bench.report import BATCHED, INTERPRETER, Figure, NotMeasured
from fuzz.bench.timing import Times, ratio
from fuzz.check.agreement import Agreement, compare
from fuzz.tensor_data import from_data
from oracle.declare import Declaration
from oracle.kinds import Engine

TURNS = 3
MANY = 32  # programs from which on batching has to pay


@dataclass(frozen=True)
class Row:
    """One case run in two ways. `programs`: of its largest grid; `wrong`: why its outputs do not count, or None."""

    name: str
    times: dict[str, Times]
    programs: int
    wrong: str | None

    @property
    def gain(self) -> float:
        """Time of the first way over that of the second."""
        return ratio(self.times, *self.times)

    def __str__(self) -> str:
        milliseconds = ", ".join(f"{way} {1e3 * times.median:.3g} ms" for way, times in self.times.items())
        return f"{self.name} {self.gain:.3g} ({milliseconds}, {self.programs} programs)"


def measured(name: str, target: Declaration, ways: tuple[Way, Way]) -> Row:
    """Run a case in two ways by turns, in processes of its own, after one turn that does not count."""
    with ExitStack() as stack:
        shared = None if Way.INTERPRETED in ways else stack.enter_context(process(name))
        processes = {way: shared or stack.enter_context(process(name)) for way in ways}
        first = {way: one.once(way) for way, one in processes.items()}
        times: dict[str, Times] = {way.value: Times() for way in ways}
        for _ in range(TURNS):
            for way, one in processes.items():
                times[way.value].seconds.append(one.once(way)["seconds"])
    programs = max(answer["programs"] for answer in first.values())
    return Row(name, times, programs, _difference(name, target, *first.values()))


def _difference(name: str, target: Declaration, a: dict[str, Any], b: dict[str, Any]) -> str | None:
    try:
        found = compare(target, fixed.case_of(name), from_data(a["outputs"]), from_data(b["outputs"]))
    except ValueError as error:
        return str(error)
    far = "" if found.ratio is None else f", {found.ratio:.3g} times what is allowed"
    return f"other results{far}" if found.agreement is Agreement.BEYOND else None


def batched_vs_serial() -> Figure:
    """Time of targets emulated one program after the other, over that in batches: the least gain of a large grid."""
    known, rows, absent = registry.load(), [], {}
    for name in fixed.names():
        target = known[fixed.target_of(name)]
        reason = registry.why_not(target, Engine.EMULATOR)
        if reason is None:
            rows.append(measured(name, target, (Way.SERIAL, Way.BATCHED)))
        else:
            absent[name] = reason
    wrong = [f"{row.name}: {row.wrong}" for row in rows if row.wrong is not None]
    if wrong:
        raise NotMeasured(f"one by one and batched differ: {'; '.join(wrong)}")
    many = [row for row in rows if row.programs >= MANY]
    if not many:
        raise NotMeasured(_reasons(absent))
    few = [row for row in rows if row.programs < MANY]
    parts = [f"median {median(row.gain for row in many):.3g}", *map(str, many)]
    if few:
        parts.append(f"fewer programs, least {min(row.gain for row in few):.3g}: {'; '.join(map(str, few))}")
    if absent:
        parts.append(f"not here: {', '.join(absent)}")
    return Figure(
        BATCHED,
        min(row.gain for row in many),
        "times",
        f"one program after the other, the least of {len(many)} cases with {MANY} programs or more, 1 thread",
        True,
        "; ".join(parts),
    )


def vs_interpreter() -> Figure:
    """Time of Triton's interpreter over that of the emulator: the median over the targets that it runs right."""
    if importlib.util.find_spec("triton") is None:
        raise NotMeasured("triton is not installed, and its interpreter comes with it")
    known, rows, out = registry.load(), [], {}
    for name in fixed.names():
        if "+" in name:
            continue  # one case a target
        target = known[name]
        reason = _not_interpreted(target)
        if reason is not None:
            out[name] = reason
            continue
        try:
            row = measured(name, target, (Way.INTERPRETED, Way.BATCHED))
        except NotMeasured as failure:
            out[name] = f"fails: {failure}"
            continue
        if row.wrong is None:
            rows.append(row)
        else:
            out[name] = row.wrong
    if not rows:
        raise NotMeasured(_reasons(out))
    parts = [*map(str, rows), *(f"left out: {name} ({reason})" for name, reason in out.items())]
    return Figure(
        INTERPRETER,
        median(row.gain for row in rows),
        "times",
        f"TRITON_INTERPRET=1, the median of {len(rows)} targets that it runs right, 1 thread",
        True,
        "; ".join(parts),
    )


def _not_interpreted(target: Declaration) -> str | None:
    if Engine.CUDA not in target.engines or target.supports.compiler not in (None, "triton"):
        return "not a target of an engine whose kernels Triton interprets"
    return registry.why_not(target, Engine.EMULATOR)


def _reasons(reasons: dict[str, str]) -> str:
    return "; ".join(sorted(set(reasons.values())))
