"""Which faults are noticed: each one, on each probe, at each context, by our budgets and by the rules of the peers.

A unit is one problem: its oracle, budgets and baseline are shared by all faults. A fault that changed nothing in a
unit was not executed there, and being missed there says nothing.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from typing import Any

import torch

from fuzz.bench.report import DETECTED, Figure
from fuzz.buffers import Poison
from fuzz.case import Case, Placement, Pool, Prefix, Probe, Sink, Skip, SlotMap, States
from fuzz.instance import Instance, build
from fuzz.instance.pool import geometry, slots_of, unused_slots
from fuzz.probes import DESIGNS, RECOMMENDED
from oracle import philox
from oracle.attention import Solution, lse_with_sink, solve
from oracle.budget import Bounds, Judgement, Tally, budgets, judge
from oracle.convention import Granularity
from oracle.kinds import IndexForm, IndexTask, KVLayout, Operation, Role, VLayout
from oracle.layout import write_slots
from oracle.precision import Precision
from oracle.rounding import round_to
from oracle.verdict import Verdict
from suites.tolerance.faults import CONTROLS, COUNTED, FAULTS, Fault
from suites.tolerance.kernel import FAULT_STREAM, Operands, Recipe, Result, attend, read
from suites.tolerance.peers import PEERS, baseline_error

SEEDS = {123: 8, 8187: 6, 32763: 2}
"""Seeds at each context of the full table."""

SUITE = tuple(probe.value for probe in RECOMMENDED)
"""The six probes that are recommended together."""

UNCAPPED = tuple(probe.value for probe in RECOMMENDED if "on" not in DESIGNS[probe].needs.get("soft_cap", ("on",)))
"""Those that need a case without a soft cap."""
SOFT_CAP = 30.0
WINDOW_SHORT_OF_CONTEXT = 41

PROBABLE, WORST, DEFAULT = "probable", "worst case", "default precision"
OURS = tuple(f"{budget} {of}" for budget in (PROBABLE, WORST, DEFAULT) for of in ("out", "lse"))
SHIPPED = (f"{PROBABLE} out", f"{PROBABLE} lse")
"""The rules that decide: a result fails if one of them fires."""
RULES = (*OURS, *(rule.name for rule in PEERS))


@dataclass(frozen=True, order=True)
class Unit:
    """One problem."""

    context: int
    probe: str
    seed: int

    def case(self) -> Case:
        """Four query rows, 8 heads over 2 kv heads, a window, sinks and a soft cap, where the probe lets them."""
        return Case(
            operation=Operation.PAGED_DECODE,
            seed=self.seed,
            context_lens=(self.context,),
            query_lens=(4,),
            num_kv_heads=2,
            group_size=4,
            head_dim=64,
            v_head_dim=64,
            dtype="bf16",
            kv_dtype="bf16",
            kv_layout=KVLayout.NHD,
            v_layout=VLayout.V5D,
            page_size=16,
            placement=Placement.SHUFFLED,
            pool=Pool.SPARE,
            index_dtype="int32",
            strided=False,
            causal=True,
            window=max(8, self.context - WINDOW_SHORT_OF_CONTEXT),
            sinks=Sink.NORMAL,
            soft_cap=None if self.probe in UNCAPPED else SOFT_CAP,
            # 64 ** -0.5 is a power of two, which hides a scale in bf16.
            scale=128**-0.5,
            q_descale=Granularity.NONE,
            k_descale=Granularity.NONE,
            v_descale=Granularity.NONE,
            index_form=IndexForm.PAGE_TABLE,
            prefix=Prefix.INLINE,
            skip=Skip.NONE,
            slot_map=SlotMap.NONE,
            parts=1,
            rank=0,
            states=States.FULL,
            index_task=IndexTask.NONE,
            earlier_calls=0,
            probe=Probe(self.probe),
        )


def fill_unused(instance: Instance) -> None:
    """Normal numbers in the slots that hold no key, as a cache has them that was in use before.

    The harness' own poison is louder, and would make any rule see what ordinary tests do not.
    """
    case = instance.case
    unused = unused_slots(case, slots_of(case))
    for stream, role in enumerate(Role):
        g = geometry(case, role)
        drawn = philox.normal(case.seed, FAULT_STREAM + 200 + stream, (len(unused), g.heads, g.dim)).double()
        write_slots(instance.buffers[f"{role.value}_cache"].view, unused, round_to(drawn, g.dtype), g)


@dataclass(frozen=True, eq=False)
class Subject:
    """A unit with what all faults share. bounds: of each of our budgets."""

    unit: Unit
    instance: Instance
    recipe: Recipe
    operands: list[Operands]
    truth: Solution
    bounds: Mapping[str, Bounds]
    baseline: float

    @staticmethod
    def of(unit: Unit, device: str = "cpu") -> "Subject":
        instance = build(unit.case(), Poison.POSITIVE, device)
        if instance.case.probe is Probe.NORMAL:
            fill_unused(instance)
        problem, recipe, operands = instance.problem, Recipe.at(unit.context), read(instance)
        assert problem is not None
        assert problem.sinks is not None
        solution = solve(problem)
        truth = Solution(solution.out, lse_with_sink(solution.lse, problem.sinks))
        bound = partial(budgets, problem, input_dtype=instance.case.dtype, lse_includes_sink=True)
        own, loosest = bound(recipe.precision()), bound(Precision())
        bounds = {PROBABLE: own.probable, WORST: own.worst_case, DEFAULT: loosest.probable}
        return Subject(
            unit, instance, recipe, operands, truth, bounds, baseline_error(operands, instance.case.dtype, truth)
        )

    def run(self, fault: Fault) -> Result:
        return attend(self.operands, self.recipe, fault.changes)

    def judged(self, result: Result, budget: str) -> Judgement:
        return judge(
            result.out,
            result.lse,
            self.truth,
            self.bounds[budget],
            out_dtype=self.recipe.out_dtype,
            precision=self.recipe.precision(),
        )


@dataclass(frozen=True)
class Record:
    """What became of one fault in one unit. fired: rules that rejected the result. ratios: error over budget."""

    unit: Unit
    fault: str
    executed: bool
    fired: frozenset[str]
    ratios: Mapping[str, float]


def examine(subject: Subject, faults: Iterable[Fault]) -> Iterator[Record]:
    """Run each fault and put the result before each rule."""
    for fault in faults:
        result = subject.run(fault)
        tallies: dict[str, Tally] = {}
        for budget in subject.bounds:
            judgement = subject.judged(result, budget)
            assert judgement.lse is not None
            tallies |= {f"{budget} out": judgement.out, f"{budget} lse": judgement.lse}
        fired = {name for name, tally in tallies.items() if tally.verdict is Verdict.FAIL}
        fired |= {rule.name for rule in PEERS if rule.rejects(result, subject.truth, subject.baseline)}
        ratios = {name: tally.worst.ratio for name, tally in tallies.items() if tally.worst is not None}
        yield Record(subject.unit, fault.name, result.executed, frozenset(fired), ratios)


def examine_unit(unit: Unit, device: str = "cpu", faults: Sequence[str] = tuple(FAULTS)) -> list[Record]:
    """`examine` of a unit that is built here."""
    torch.set_num_threads(1)
    return list(examine(Subject.of(unit, device), (FAULTS[name] for name in faults)))


def units(context: int, probes: Sequence[str] = SUITE, seeds: int | None = None) -> list[Unit]:
    """Every unit of the table at one context. seeds: how many, where not those of the full table."""
    count = SEEDS.get(context, 2) if seeds is None else seeds
    return [Unit(context, probe, seed) for probe in probes for seed in range(1, 1 + count)]


def examine_all(wanted: Sequence[Unit], device: str = "cpu", jobs: int = 1) -> Iterator[list[Record]]:
    """The records of each unit, in the order of the units, whatever the number of processes."""
    if jobs == 1:
        yield from (examine_unit(unit, device) for unit in wanted)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(partial(examine_unit, device=device), wanted)


@dataclass(frozen=True)
class Table:
    """The records at one context, and what can be asked of them."""

    context: int
    records: tuple[Record, ...]

    @cached_property
    def probes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(record.unit.probe for record in self.records))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({record.unit.seed for record in self.records}))

    @cached_property
    def _by_fault(self) -> Mapping[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.fault, []).append(record)
        return found

    def of(self, fault: str, probes: Sequence[str]) -> dict[int, list[Record]]:
        """The records of a fault, by seed."""
        found: dict[int, list[Record]] = {}
        for record in self._by_fault.get(fault, []):
            if record.unit.probe in probes:
                found.setdefault(record.unit.seed, []).append(record)
        return found

    def rate(self, fault: str, probes: Sequence[str], rules: Sequence[str]) -> float | None:
        """Share of the seeds in which one of the rules fires on one of the probes; None if it never executed there."""
        seeds = [found for found in self.of(fault, probes).values() if any(r.executed for r in found)]
        hits = [any(r.executed and not r.fired.isdisjoint(rules) for r in found) for found in seeds]
        return sum(hits) / len(hits) if hits else None

    def rates(self, probes: Sequence[str], rules: Sequence[str]) -> dict[str, float]:
        """`rate` of each fault that counts and was executed."""
        found = {fault.name: self.rate(fault.name, probes, rules) for fault in COUNTED}
        return {name: rate for name, rate in found.items() if rate is not None}

    def caught(self, probes: Sequence[str], rules: Sequence[str]) -> int:
        """How many faults are caught in every seed."""
        return sum(rate == 1 for rate in self.rates(probes, rules).values())

    def alarms(self, probes: Sequence[str], rules: Sequence[str]) -> tuple[int, int]:
        """On kernels without a fault that counts: units in which one of the rules fires, and all of them."""
        found = [r for fault in CONTROLS for rs in self.of(fault.name, probes).values() for r in rs]
        return sum(not r.fired.isdisjoint(rules) for r in found), len(found)

    def largest_ratio(self, fault: str, probes: Sequence[str], rule: str) -> float:
        """The largest error over budget of any seed; NaN if the rule was not applied."""
        found = [r.ratios[rule] for rs in self.of(fault, probes).values() for r in rs if rule in r.ratios]
        return max(found, default=math.nan)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: for each probe and fault, which seeds executed it and which rules fired, as one digit a seed.

        Ratios are kept of the kernels without a fault that counts, in three digits.
        """
        controls = {fault.name for fault in CONTROLS}
        cells: list[dict[str, Any]] = []
        for fault in self._by_fault:
            for probe in self.probes:
                records = [rs[0] for _, rs in sorted(self.of(fault, (probe,)).items())]
                fired = {rule: _digits(rule in r.fired for r in records) for rule in RULES}
                cells.append(
                    {
                        "probe": probe,
                        "fault": fault,
                        "executed": _digits(r.executed for r in records),
                        "fired": {rule: digits for rule, digits in fired.items() if "1" in digits},
                        "ratios": {rule: [_shown(r.ratios[rule]) for r in records] for rule in records[0].ratios}
                        if fault in controls
                        else {},
                    }
                )
        return {"context": self.context, "seeds": list(self.seeds), "cells": cells}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Table":
        """The inverse of `to_dict`."""
        return Table(
            data["context"],
            tuple(
                Record(
                    Unit(data["context"], cell["probe"], seed),
                    cell["fault"],
                    cell["executed"][i] == "1",
                    frozenset(rule for rule, digits in cell["fired"].items() if digits[i] == "1"),
                    {rule: float(values[i]) for rule, values in cell["ratios"].items()},
                )
                for cell in data["cells"]
                for i, seed in enumerate(data["seeds"])
            ),
        )


def _digits(flags: Iterable[bool]) -> str:
    return "".join("01"[flag] for flag in flags)


def _shown(ratio: float) -> float | str:
    """Three digits; JSON has no infinity."""
    return float(f"{ratio:.3g}") if math.isfinite(ratio) else repr(ratio)


def share_detected(context: int = 8187) -> Figure:
    """The figure budget.detected: one seed, the six probes, out and log-sum-exp."""
    subjects = (Subject.of(unit) for unit in units(context, seeds=1))
    table = Table(context, tuple(record for subject in subjects for record in examine(subject, COUNTED)))
    executed, caught = len(table.rates(SUITE, SHIPPED)), table.caught(SUITE, SHIPPED)
    peers = ", ".join(f"{rule.name} {table.caught(SUITE, (rule.name,))}" for rule in PEERS)
    return Figure(
        DETECTED,
        caught / executed,
        "share",
        f"the executed ones of {len(COUNTED)} emulated faults, {context} keys, {len(SUITE)} probes, one seed",
        True,
        f"{caught} of {executed}; by the rules of others: {peers}",
    )
