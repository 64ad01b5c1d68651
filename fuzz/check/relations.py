"""Relations: two calls whose results must agree, whatever the right result is. None of them needs the oracle's.

- PAGES: a request's keys lie in other pages. Bit for bit, where the target is deterministic: addresses enter no
  arithmetic.
- BATCH: the first request alone. Bit for bit, and only where the target declares ``batch_invariant``: a kernel may
  choose tiles and splits by the batch.
- CHUNKS: a backend is given the first request's new tokens in two steps. Within the errors that both are allowed; what
  the first step stores is what the second finds, as the check of the pool after a step says.
- AGREEMENT: another target that the declaration names takes the same arguments. Within the errors that both are
  allowed; a quantised pool has to be given what it holds exactly, as the cases of a backend are.

The values of a designed probe depend on the whole batch: BATCH and CHUNKS need a plain one. A relation whose
preconditions do not hold is left out: it neither passes nor fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fuzz.call import Unsupported
from fuzz.case import Case, Placement, Pool, Prefix
from fuzz.check.attention import judge_within
from fuzz.check.execute import Execution, Progress, execute
from fuzz.check.result import Check, CheckResult
from fuzz.instance.pool import pages
from fuzz.probes import PLAIN
from fuzz.support import unsupported
from oracle.attention import Solution
from oracle.bits import bits
from oracle.budget import Bounds, worst_case
from oracle.convention import LseLayout
from oracle.declare import Declaration
from oracle.kinds import Engine, Operation
from oracle.verdict import Verdict


def relations(
    declaration: Declaration, case: Case, engine: Engine, first: Execution, progress: Progress
) -> Iterator[CheckResult]:
    """Every relation whose preconditions hold for ``case``; ``first`` is its execution."""
    if not case.is_attention or not declaration.supports.deterministic:
        return
    moved = elsewhere(case)
    if moved is not None:
        other = execute(declaration, moved, first.poison, engine, progress)
        yield _same_bits(declaration, Check.PAGES, "depend on which pages hold the keys", first, other)
    several = len(case.context_lens) > 1 and case.query_lens[0] and case.probe in PLAIN
    if declaration.supports.batch_invariant and several:
        other = execute(declaration, alone(case), first.poison, engine, progress)
        yield _same_bits(declaration, Check.BATCH, "of the first request depend on the others", first, other)
    for chunk, rows in chunks(case):
        other = execute(declaration, chunk, first.poison, engine, progress)
        yield _within(declaration, declaration, Check.CHUNKS, f"in two steps, tokens {rows}: ", first, other, rows)
    if declaration.agrees_with is not None and unsupported(declaration.agrees_with, case) is None:
        yield from _agreement(declaration, declaration.agrees_with, case, engine, first, progress)


def elsewhere(case: Case) -> Case | None:
    """The same values with every page in another place, or None where there are no pages, or no other place."""
    in_pool = case.operation in (Operation.PAGED_DECODE, Operation.BACKEND) or case.prefix is Prefix.POOL
    if not in_pool or case.pool is Pool.HUGE:
        return None
    other = Placement.ASCENDING if case.placement is Placement.SHUFFLED else Placement.SHUFFLED
    moved = replace(case, placement=other)
    return moved if pages(moved) != pages(case) else None


def alone(case: Case) -> Case:
    """The first request by itself. Its values are the first that are drawn, so that they stay what they are."""
    return replace(case, context_lens=case.context_lens[:1], query_lens=case.query_lens[:1])


def chunks(case: Case) -> list[tuple[Case, range]]:
    """The first request's new tokens as two steps of a backend, and which of its rows each has; none of one token."""
    queries, length = case.query_lens[:1], case.context_lens[:1]
    if case.operation is not Operation.BACKEND or queries[0] < 2 or case.probe not in PLAIN:
        return []
    late = queries[0] // 2
    early = queries[0] - late
    return [
        (replace(case, context_lens=(length[0] - late,), query_lens=(early,)), range(early)),
        (replace(case, context_lens=length, query_lens=(late,)), range(early, early + late)),
    ]


def _same_bits(declaration: Declaration, check: Check, words: str, first: Execution, second: Execution) -> CheckResult:
    """The rows that both have are the same bit for bit: those of ``second``, the shorter one or as long."""
    for name in second.outputs:
        a, b = (_by_token(declaration, name, run.outputs[name]) for run in (first, second))
        differ = bits(a[: len(b)].contiguous()) != bits(b.contiguous())
        count = int(differ.sum())
        if count:
            where = differ.nonzero()[0].tolist()
            message = f"{count} of {differ.numel()} elements of {name} {words}, the first at {where}"
            return CheckResult(check, Verdict.FAIL, message, {"output": name, "count": count, "first": where})
    return CheckResult(check, Verdict.PASS)


def _by_token(declaration: Declaration, name: str, output: Tensor) -> Tensor:
    turned = name == "lse" and declaration.convention.lse_layout is LseLayout.HEAD_TOKEN
    return output.transpose(0, 1) if turned else output


def _agreement(
    declaration: Declaration, partner: Declaration, case: Case, engine: Engine, first: Execution, progress: Progress
) -> Iterator[CheckResult]:
    try:
        other = execute(partner, case, first.poison, engine, progress)
    except Unsupported:
        return
    rows = range(sum(case.query_lens))
    yield _within(declaration, partner, Check.AGREEMENT, f"unlike {partner.name}: ", first, other, rows)


def _within(
    declaration: Declaration,
    partner: Declaration,
    check: Check,
    words: str,
    first: Execution,
    second: Execution,
    rows: range,
) -> CheckResult:
    """``rows`` of ``first``'s output are ``second``'s: within what each may err by, and the latter's output rounding.

    The second is of ``partner``, and its problem is those rows' own.
    """
    problem, dtype = second.instance.problem, second.instance.case.dtype
    if problem is None:
        raise TypeError(f"{second.instance.case.operation} poses no attention problem")
    expected = second.outputs["out"].to(problem.device)
    bounds = [worst_case(problem, d.precision_for(dtype), input_dtype=dtype) for d in (declaration, partner)]
    error = bounds[0].out + bounds[1].out + _half_spacing(expected)
    allowed = Bounds(error, bounds[0].lse, bounds[0].reach, bounds[0].keys)
    part = replace(first, outputs={"out": first.outputs["out"][rows.start : rows.stop]})
    found = judge_within(declaration, part, Solution(expected.double(), bounds[0].lse), allowed)
    if found.verdict is not Verdict.FAIL:
        return CheckResult(check, Verdict.PASS)
    return CheckResult(check, Verdict.FAIL, words + found.message, found.evidence)


def _half_spacing(values: Tensor) -> Tensor:
    """An upper bound on the rounding error that is in each of ``values``, float64."""
    info = torch.finfo(values.dtype)
    return values.double().abs().clamp_min(info.smallest_normal) * info.eps / 2
