"""One trial of a kernel that is believed right: a case of a combination, its outputs, and how they were judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from hashlib import blake2b
from itertools import product
from typing import Any

from torch import Tensor

from fuzz import registry
from fuzz.buffers import DTYPE_NAMES, Poison
from fuzz.call import call
from fuzz.case import MAX_TOKENS, Case, CaseError, Prefix, Probe
from fuzz.commands import built_in_ledger
from fuzz.instance import Instance, build
from fuzz.ledger import Defect
from fuzz.plan import CounterChooser
from fuzz.probes import unfit
from fuzz.space import Space
from fuzz.versions import versions
from oracle.attention import Solution, lse_with_sink, solve
from oracle.budget import Bounds, Budgets, budgets, judge
from oracle.budget import Tally as Judged
from oracle.convention import (
    Convention,
    DefaultScale,
    Descales,
    Granularity,
    LseLayout,
    SinkUnits,
    Window,
    WindowMeaning,
)
from oracle.declare import Declaration, Supports
from oracle.kinds import Engine, LseBase, Operation
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.verdict import Verdict
from suites.tolerance import variants
from suites.tolerance.believed_right import CONTEXTS, FREE, NATIVE, VARIANTS, Native, Variant
from suites.tolerance.tallies import Combination, Tally

ELEMENTS = 10_240
"""Elements of out that a case is to have: one case fills a combination, where memory allows."""
_TOKENS = {"cpu": 1 << 18, "cuda": 1 << 19}
"""Keys that a case may have together."""
_CHAIN = 8192
"""Steps that an emulated kernel may take over one context: they run one after the other."""
_ATTEMPTS = 24
"""Draws before a combination counts as impossible."""
_LONG = 8192
"""Of classes that reach beyond, seven draws in eight are near the lower end: the time a case takes grows with it."""


class Impossible(Exception):
    """No case shows a combination. The message says why, of the last draw."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a kernel returned for a problem, and what it was allowed. wide: out before its rounding, or None."""

    problem: Problem
    precision: Precision
    dtype: str
    out: Tensor
    lse: Tensor | None
    wide: Tensor | None = None
    convention: Convention | None = None
    choices: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """What runs under one precision: a variant, or a target of the registry with one dtype over one kind of pool."""

    precision: str
    declaration: Declaration
    pins: Mapping[str, str]
    longest: int
    variant: Variant | None = None

    def run(self, case: Case, device: str) -> Outcome:
        """Outputs for a case. Whatever the kernel raises passes through."""
        instance = build(case, Poison.POSITIVE, device)
        if instance.problem is None:
            raise TypeError(f"{case.operation} poses no attention problem")
        return self._emulated(instance, instance.problem) if self.variant else self._native(instance, instance.problem)

    def _emulated(self, instance: Instance, problem: Problem) -> Outcome:
        choices = draw_choices(self.variant or VARIANTS[0], instance.case)
        result = variants.run(problem, choices)
        plain = {f.name: getattr(choices, f.name) for f in fields(choices)}
        precision = choices.precision()
        return Outcome(problem, precision, instance.case.dtype, result.out, result.lse, result.wide, None, plain)

    def _native(self, instance: Instance, problem: Problem) -> Outcome:
        convention, dtype = self.declaration.convention, instance.case.dtype
        outputs = call(self.declaration, instance)
        lse = outputs.get("lse")
        if lse is not None and convention.lse_layout is LseLayout.HEAD_TOKEN:
            lse = lse.transpose(0, 1)
        precision = self.declaration.precision_for(dtype, instance.case.kv_dtype)
        return Outcome(problem, precision, dtype, outputs["out"], lse, None, convention)


_EMULATED = Declaration(
    name="emulated",
    operation=Operation.VARLEN_EXTEND,
    function=variants.run,
    convention=Convention(
        source="suites/tolerance/variants.py solves the problem itself",
        window=Window(meaning=WindowMeaning.KEYS, off=(0,)),
        sink=SinkUnits.NATURAL,
        soft_cap=True,
        default_scale=DefaultScale.RSQRT_HEAD_DIM,
        descales=Descales(k=Granularity.HEAD, v=Granularity.HEAD),
    ),
    precision=None,
    supports=Supports(
        dtypes=("fp32", "bf16", "fp16"),
        kv_dtypes=("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"),
        head_dims=(64, 80, 128),
        v_head_dims=(128, 64),
        num_kv_heads=(1, 2, 3),
        group_sizes=(4, 1, 16),
        features=frozenset(
            {"window", "sinks", "soft_cap", "custom_scale", "non_causal", "chunked", "empty"},
        ),
    ),
    engines=tuple(Engine),
    unavailable=lambda _: None,
)
"""The cases that the emulated kernels take; only the space of cases reads it."""


def kernels(engine: Engine) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Kernels that can run here by their precision's name, and why the others cannot."""
    found: dict[str, Kernel] = {}
    for variant in VARIANTS:
        pins = {"dtype": variant.dtype, "kv_dtype": variant.kv_dtype or "same"}
        found[variant.name] = Kernel(variant.name, _EMULATED, pins, CONTEXTS["32k-128k"][1], variant)
    targets, skipped = registry.load(), {}
    for native in NATIVE:
        declaration, longest = targets.get(native.target), _longest(native, engine)
        if declaration is None:
            skipped[native.target] = "no such target"
        elif reason := registry.why_not(declaration, engine):
            skipped[native.target] = reason
        elif not longest:
            skipped[native.target] = f"not run on {engine}"
        else:
            for dtype, pool in product(declaration.supports.dtypes, ("same", *declaration.supports.kv_dtypes)):
                name = f"{native.target} {dtype}" + (f" over {pool}" if pool != "same" else "")
                found[name] = Kernel(name, declaration, {"dtype": dtype, "kv_dtype": pool}, longest)
    return found, skipped


def _longest(native: Native, engine: Engine) -> int:
    return native.emulator if engine is Engine.EMULATOR else native.cuda


def combinations(known: Mapping[str, Kernel], longest: int = CONTEXTS["32k-128k"][1]) -> list[Combination]:
    """Every combination that the kernels' declarations leave room for, of contexts that may reach `longest`."""
    found = []
    for kernel in known.values():
        empty = "empty" in kernel.declaration.supports.features
        probes = Space(kernel.declaration).dimensions["probe"]
        for context, (low, _) in CONTEXTS.items():
            if low <= min(longest, kernel.longest) and (low or empty):
                found += [Combination(kernel.precision, probe, context) for probe in map(str, probes)]
    return found


# --------------------------------------------------------------------- cases


def key_of(*parts: object) -> int:
    """A 64-bit key for everything that is drawn from these parts."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


def draw_case(kernel: Kernel, combination: Combination, key: int, device: str) -> Case | None:
    """A case of the combination, a function of `key`; None if none of a few draws is possible."""
    try:
        return possible_case(kernel, combination, key, device)
    except Impossible:
        return None


def possible_case(kernel: Kernel, combination: Combination, key: int, device: str) -> Case:
    """The same. Raises `Impossible` where `draw_case` gives None."""
    space, reason = Space(kernel.declaration), ""
    pins = {**kernel.pins, "probe": combination.probe, "requests": "one", "length": "any"}
    for attempt in range(_ATTEMPTS):
        chooser = CounterChooser(key, attempt, pins)
        try:
            case = sized(space.draw(chooser), kernel, combination, chooser, device)
        except CaseError as error:
            reason = str(error)
            continue
        stored = kernel.pins["dtype"] if kernel.pins["kv_dtype"] == "same" else kernel.pins["kv_dtype"]
        if case.kv_dtype != stored:
            reason = f"the target takes no cache of {stored} there"
        elif (why := unfit(case)) is not None:
            reason = why
        elif (defect := _known_defect(kernel.declaration.name, case)) is not None:
            reason = f"known defect {defect}"
        else:
            return case
    raise Impossible(reason)


@cache
def _ledger() -> tuple[Defect, ...]:
    """Entries of the versions installed, whatever the engine: what is wrong on one nobody believes on another."""
    present = versions()
    return tuple(d for d in built_in_ledger() if any(d.applies(engine, present) for engine in d.engines))


def _known_defect(target: str, case: Case) -> str | None:
    """The entry of the ledger that says that the target gets this wrong: then nobody believes that it is right."""
    for entry in _ledger():
        if any(entry.matches(target, check, entry.diagnosis, case) for check in entry.checks):
            return entry.id
    return None


def sized(case: Case, kernel: Kernel, combination: Combination, chooser: CounterChooser, device: str) -> Case:
    """The case with the combination's probe, requests of its context class, and about `ELEMENTS` elements of out."""
    supports, decode = kernel.declaration.supports, case.operation is Operation.PAGED_DECODE
    low, high = CONTEXTS[combination.context]
    high = min(high, kernel.longest)
    if kernel.variant and high > 2048:
        # Products with the query cost least with short heads, and wide values need few rows.
        case = replace(case, head_dim=min(supports.head_dims), v_head_dim=max(supports.v_head_dims))
    rows = -(-ELEMENTS // case.v_head_dim)
    kv_heads, group = case.num_kv_heads, case.group_size
    if high > 2048:
        # Rows that share their keys cost least.
        kv_heads, group = min(supports.num_kv_heads), max(supports.group_sizes)
    tokens = -(-rows // (kv_heads * group))
    queries = min(4 if decode else 16, supports.max_query_len or tokens, max(1, low // 2))
    requests = max(1, min(-(-tokens // queries), min(_TOKENS[device], MAX_TOKENS) // max(1, high), 64))
    if not decode:
        queries = min(-(-tokens // requests), max(1, low // 2))
    top = high
    if high > _LONG and chooser.integer("far", 0, 7):
        top = min(high, low + (high - low) // 8)
    contexts = tuple(chooser.integer("context", low, top) for _ in range(requests))
    window = case.window
    if window is not None and chooser.integer("window_far", 0, 2):
        window = chooser.integer("window", 1, max(1, high))
    if not kernel.variant and not {"chunked"} & supports.features and not decode:
        lengths = contexts
    else:
        lengths = (queries,) * requests
    return replace(
        case,
        probe=Probe(combination.probe),
        seed=chooser.integer("case_seed", 0, (1 << 31) - 1),
        context_lens=contexts,
        query_lens=lengths,
        num_kv_heads=kv_heads,
        group_size=group,
        window=window,
        prefix=case.prefix if kernel.declaration.convention.prefix_in_pool else Prefix.INLINE,
    )


def draw_choices(variant: Variant, case: Case) -> variants.Choices:
    """The arithmetic of an emulated kernel, a function of the variant and the case."""
    chooser = CounterChooser(key_of("choices", variant.name), case.seed)
    options = {**FREE, **variant.options}
    picked: dict[str, Any] = {name: chooser.choose(name, values) for name, values in options.items()}
    longest = max(case.context_lens, default=0)
    least = -(-longest // _CHAIN)
    tiles = [tile for tile in options["tile"] if tile >= least] or [max(options["tile"])]
    picked["tile"] = chooser.choose("long_tile", tiles)
    if picked.get("p_dtype") is None:
        picked |= {"p_truncated": False, "sum_rounded": False}
    return variants.Choices(**picked, seed=case.seed)


# ------------------------------------------------------------------ judging


def expected(outcome: Outcome) -> tuple[Solution, Budgets]:
    """The oracle's result, its log-sum-exp with the sink where the kernel's counts it, and both bounds as they are
    shipped: the confidence is the default."""
    problem, convention = outcome.problem, outcome.convention
    counts_sink = convention is not None and convention.lse_includes_sink
    solution = solve(problem)
    found = budgets(
        problem, outcome.precision, input_dtype=outcome.dtype, lse_includes_sink=counts_sink, solution=solution
    )
    if counts_sink and problem.sinks is not None:
        solution = Solution(solution.out, lse_with_sink(solution.lse, problem.sinks))
    return solution, found


def evaluate(outcome: Outcome) -> Tally:
    """Judge every element by both bounds."""
    (solution, found), convention = expected(outcome), outcome.convention
    judgement = judge(
        outcome.out,
        outcome.lse,
        solution,
        found,
        out_dtype=DTYPE_NAMES[outcome.out.dtype],
        precision=outcome.precision,
        expected_empty_out=convention.empty_out.number if convention else 0.0,
        expected_empty_lse=convention.empty_lse.number if convention else -math.inf,
        lse_base=convention.lse_base if convention else LseBase.NATURAL,
    )
    out, lse = judgement.out, judgement.lse
    tally = Tally(
        cases=1,
        vacuous_cases=int(judgement.verdict is Verdict.VACUOUS),
        suspect_cases=int(judgement.verdict is Verdict.SUSPECT),
        elements=out.elements,
        vacuous=out.vacuous,
        suspect=out.suspects,
        worst=[out.worst.ratio] if out.worst else [],
    )
    _count_alarms(tally, "out", out)
    if lse is not None:
        tally.lse_elements, tally.lse_vacuous = lse.elements, lse.vacuous
        tally.lse_worst = [lse.worst.ratio] if lse.worst else []
        _count_alarms(tally, "lse", lse)
    if outcome.wide is not None:
        _count_errors(tally, outcome.wide, solution, found.probable)
    return tally


def _count_alarms(tally: Tally, tensor: str, judged: Judged) -> None:
    for bound, count in (("probable", judged.failures + judged.suspects), ("worst_case", judged.failures)):
        if count:
            tally.alarms[f"{bound}.{tensor}"] = count


def _count_errors(tally: Tally, wide: Tensor, solution: Solution, bounds: Bounds) -> None:
    """Errors as they are before the output is rounded, which hides most of them: what the bound is about."""
    ratio = (wide.double() - solution.out).abs() / bounds.out
    said = (bounds.out > 0) & (bounds.out < bounds.reach) & ratio.isfinite()
    tally.count_ratios(ratio[said])
    tally.worst = [float(ratio[said].max())] if bool(said.any()) else []
