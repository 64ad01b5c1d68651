"""What a set of launches reached: lines, outcomes of conditions, trip counts, and masks of loads and stores.

Data of line numbers and outcomes, without source text: it can be merged, sent and kept. Lines, conditions and
loops are seen through Python's tracing of the kernel's frames, so that nothing is paid where it is off; masks
are told by loads and stores.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

import torch

from fuzz.engine.emulator.errors import SOURCE_MARK

CONDITION = ("true", "false")
TRIPS = ("0", "1", "many")
MASK = ("all", "some", "none")

Outcomes = dict[str, set[str]]


@dataclass(eq=False)
class FunctionCoverage:
    """One jitted function. `lines`: first lines of its statements; `reached`: those that ran.

    `conditions` and `loops`: by line, outcomes seen of CONDITION and TRIPS, no entry lacking. `accesses`: by
    "load LINE" and "store LINE", lanes that a program's mask let through, of MASK; `possible`: those of MASK
    that this access can show (without a mask only "all"; "some" needs several lanes).
    """

    lines: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    conditions: Outcomes = field(default_factory=dict)
    loops: Outcomes = field(default_factory=dict)
    accesses: Outcomes = field(default_factory=dict)
    possible: Outcomes = field(default_factory=dict)

    def merge(self, other: FunctionCoverage) -> None:
        """Take over what another run saw."""
        self.lines |= other.lines
        self.reached |= other.reached
        for name in _OUTCOMES:
            mine = getattr(self, name)
            for place, outcomes in getattr(other, name).items():
                mine.setdefault(place, set()).update(outcomes)

    def missing(self) -> dict[str, Any]:
        """What was never seen, of what could have been; conditions and loops on lines that ran. Plain data."""

        def never(seen: Outcomes, all_of: tuple[str, ...]) -> dict[str, list[str]]:
            gaps = {place: [o for o in all_of if o not in outcomes] for place, outcomes in seen.items()}
            return {place: gaps[place] for place in sorted(gaps, key=int) if gaps[place] and int(place) in self.reached}

        masks = {
            place: [o for o in MASK if o in possible and o not in self.accesses.get(place, ())]
            for place, possible in self.possible.items()
        }
        return {
            "lines": sorted(self.lines - self.reached),
            "conditions": never(self.conditions, CONDITION),
            "loops": never(self.loops, TRIPS),
            "masks": {place: masks[place] for place in sorted(masks, key=_by_line) if masks[place]},
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        tables = {
            name: {place: sorted(outcomes) for place, outcomes in getattr(self, name).items()} for name in _OUTCOMES
        }
        return {"lines": sorted(self.lines), "reached": sorted(self.reached), **tables}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FunctionCoverage:
        """Inverse of `to_dict`."""
        tables = {name: {place: set(seen) for place, seen in data[name].items()} for name in _OUTCOMES}
        return cls(set(data["lines"]), set(data["reached"]), **tables)


_OUTCOMES = ("conditions", "loops", "accesses", "possible")


def _by_line(place: str) -> tuple[int, str]:
    kind, _, line = place.partition(" ")
    return int(line), kind


@dataclass(eq=False)
class Coverage:
    """By function, as "file:name": the kernels that were launched, and the jitted functions that they called."""

    functions: dict[str, FunctionCoverage] = field(default_factory=dict)

    def merge(self, other: Coverage) -> None:
        """Take over what another run saw."""
        for name, function in other.functions.items():
            self.functions.setdefault(name, FunctionCoverage()).merge(function)

    def clear(self) -> None:
        """Forget everything."""
        self.functions.clear()

    def missing(self) -> dict[str, dict[str, Any]]:
        """By function, what was never seen."""
        return {name: self.functions[name].missing() for name in sorted(self.functions)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: self.functions[name].to_dict() for name in sorted(self.functions)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Coverage:
        """Inverse of `to_dict`."""
        return cls({name: FunctionCoverage.from_dict(function) for name, function in data.items()})

    def access(self, kind: str, mask: torch.Tensor | None, lanes: int) -> None:
        """A "load" or "store" of `lanes` lanes a program happened; `mask`: bool [P or 1, ...]."""
        frame = _user_frame()
        plan = None if frame is None else plan_of(frame.f_code)
        if frame is None or plan is None:
            return
        place = f"{kind} {plan.statement.get(frame.f_lineno, frame.f_lineno)}"
        function = self.function(plan)
        seen, possible = function.accesses.setdefault(place, set()), function.possible.setdefault(place, {"all"})
        if mask is None:
            seen.add("all")
            return
        possible.update(("all", "some", "none") if lanes > 1 else ("all", "none"))
        flat = mask.reshape(len(mask), -1)
        every, some = flat.all(1), flat.any(1)
        for outcome, programs in zip(MASK, (every, some & ~every, ~some), strict=True):
            if bool(programs.any()):
                seen.add(outcome)

    def function(self, plan: Plan) -> FunctionCoverage:
        """The entry of a function, with everything that it could show."""
        entry = self.functions.get(plan.name)
        if entry is None:
            entry = self.functions[plan.name] = FunctionCoverage(lines=set(plan.statement.values()))
            entry.conditions = {str(line): set() for line in plan.conditions}
            entry.loops = {str(line): set() for line in plan.loops}
        return entry


# ---------------------------------------------------------------- what a function could show


@dataclass(frozen=True, eq=False)
class Plan:
    """A function's statements. `statement`: first line of the statement that a line belongs to, the header alone
    if it has a body. `conditions` and `loops`: first and last line of the body, by first line.
    """

    name: str
    first: int
    last: int
    statement: dict[int, int]
    conditions: dict[int, tuple[int, int]]
    loops: dict[int, tuple[int, int]]


_NO_CODE = (ast.FunctionDef, ast.Global, ast.Nonlocal, ast.Assert, ast.Pass)


def plan_of(code: CodeType) -> Plan | None:
    """The plan of the function that code stands in; None if its source is not at hand."""
    for plan in _plans("".join(linecache.getlines(code.co_filename)), PurePath(code.co_filename).name):
        if plan.first <= code.co_firstlineno <= plan.last:
            return plan
    return None


@lru_cache(maxsize=64)
def _plans(source: str, file: str) -> tuple[Plan, ...]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return tuple(_plan(node, file) for node in functions)


def _plan(function: ast.FunctionDef, file: str) -> Plan:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    plan = Plan(f"{file}:{function.name}", first, function.end_lineno or first, {}, {}, {})
    for node in ast.walk(function):
        if not isinstance(node, ast.stmt) or isinstance(node, _NO_CODE) or _is_silent(node):
            continue
        last = node.end_lineno or node.lineno
        body = getattr(node, "body", None)
        if body:
            span = body[0].lineno, body[-1].end_lineno or body[-1].lineno
            last = max(node.lineno, span[0] - 1)
            if span[0] > node.lineno:  # a body on the line of its header leaves no trace of its own
                if isinstance(node, ast.If):
                    plan.conditions[node.lineno] = span
                elif isinstance(node, (ast.For, ast.While)):
                    plan.loops[node.lineno] = span
        plan.statement.update(dict.fromkeys(range(node.lineno, last + 1), node.lineno))
    return plan


def _is_silent(node: ast.stmt) -> bool:
    """Docstrings and bare declarations, for which no code is made."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.AnnAssign) and node.value is None


# ---------------------------------------------------------------- seeing it


@contextmanager
def traced_lines(coverage: Coverage) -> Iterator[None]:
    """Within the block, frames of loaded source tell which lines they run. Another tracer pauses meanwhile."""
    known: dict[CodeType, Plan | None] = {}

    def entered(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if SOURCE_MARK not in frame.f_globals:
            return None
        code = frame.f_code
        if code not in known:
            plan = plan_of(code)
            # Lambdas and comprehensions have frames of their own, within a statement.
            known[code] = plan if plan is not None and plan.name.endswith(f":{code.co_name}") else None
        plan = known[code]
        return None if plan is None else _FrameTracer(plan, coverage.function(plan))

    previous = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(previous)


class _FrameTracer:
    """Follows one call of a function from statement to statement."""

    def __init__(self, plan: Plan, entry: FunctionCoverage) -> None:
        self.plan, self.entry = plan, entry
        self.at = 0  # the statement that runs
        self.trips: dict[int, int] = {}  # of the loops that are under way
        self.raised = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> _FrameTracer:
        if event == "line":
            self.raised = False
            self._go_to(frame.f_lineno)
        elif event == "exception":
            # The end of an iterator is no failure; what a failed batch counted, its parts count anew.
            self.raised = argument[0] is not StopIteration
        elif event == "return" and not self.raised:
            self._go_to(0)
        return self

    def _go_to(self, line: int) -> None:
        plan, entry, before = self.plan, self.entry, self.at
        statement = plan.statement.get(line, 0)
        if line and (not statement or statement == before):
            return  # within a statement of several lines, or nothing of ours
        if before in plan.conditions:
            entry.conditions[str(before)].add("true" if _within(line, plan.conditions[before]) else "false")
        if before in plan.loops:
            self.trips.setdefault(before, 0)
            if _within(line, plan.loops[before]):
                self.trips[before] += 1
        for loop in list(self.trips):
            inside = line != 0 and (statement == loop or _within(line, plan.loops[loop]))
            if not inside:
                entry.loops[str(loop)].add(TRIPS[min(self.trips.pop(loop), 2)])
        self.at = statement
        if statement:
            entry.reached.add(statement)


def _within(line: int, span: tuple[int, int]) -> bool:
    return span[0] <= line <= span[1]


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and SOURCE_MARK not in frame.f_globals:
        frame = frame.f_back
    return frame
