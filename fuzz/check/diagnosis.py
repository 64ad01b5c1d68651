"""Why the values of a case are wrong: what is known of the call beside its problem, and what the oracle makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuzz.case import Case, Pool
from fuzz.check.attention import CONFIDENCE
from fuzz.check.execute import Execution
from fuzz.check.result import Check, CheckResult
from fuzz.instance.pool import geometry, own_pages
from oracle.convention import LseLayout
from oracle.declare import Declaration
from oracle.diagnose import Diagnosis, Kind, Surroundings, diagnose, diagnose_merge
from oracle.diagnose.search import RUNNERS_UP
from oracle.failure import explanation
from oracle.kinds import IndexForm, Operation, Role
from oracle.layout import read_slots, unpack

DIAGNOSED = (Check.VALUES, Check.LSE)
"""Checks whose failures are diagnosed."""
SHARED = (*DIAGNOSED, Check.POISON, Check.NAN, Check.DETERMINISM)
"""Checks that compare outputs: a failure of one of them has the diagnosis of the case's values."""
KEY = "diagnosis"


def diagnosed(
    declaration: Declaration, run: Execution, results: Iterable[CheckResult], around: Surroundings | None = None
) -> tuple[CheckResult, ...]:
    """Results of the values of one execution; the evidence of those that failed carries what explains them.

    around: what lies around the operands, where the case does not say.
    """
    found = tuple(results)
    if not any(r.check in DIAGNOSED and r.verdict.is_finding for r in found):
        return found
    diagnosis = _diagnosis(declaration, run, around)
    carried = {} if diagnosis is None or diagnosis.kind is Kind.NONE else {KEY: diagnosis.to_dict()}
    return tuple(
        replace(r, evidence={**r.evidence, **_explained(declaration, run, r, around), **carried})
        if r.check in DIAGNOSED and r.verdict.is_finding
        else r
        for r in found
    )


def _explained(
    declaration: Declaration, run: Execution, failed: CheckResult, around: Surroundings | None
) -> dict[str, Any]:
    """What a failure's text says beside the diagnosis, where there is a problem that the result answers."""
    problem, case = run.instance.problem, run.instance.case
    if problem is None or "request" not in failed.evidence:
        return {}
    return explanation(
        problem,
        run.outputs["out"],
        failed.evidence,
        precision=declaration.precision_for(case.dtype, case.kv_dtype),
        input_dtype=case.dtype,
        confidence=CONFIDENCE,
        around=surroundings(run) if around is None else around,
    )


def class_of(results: Iterable[CheckResult], check: Check) -> str | None:
    """The class of a failed check's diagnosis: its own, or that of the case's values if it compares outputs too."""
    own = {r.check: kind_of(r.evidence) for r in results if r.verdict.is_finding}
    if own.get(check) is not None or check not in SHARED:
        return own.get(check)
    return next((own[c] for c in DIAGNOSED if own.get(c) is not None), None)


def kind_of(evidence: Mapping[str, Any]) -> str | None:
    """The class in a result's evidence, None if there is no diagnosis."""
    diagnosis = evidence.get(KEY)
    return diagnosis["kind"] if isinstance(diagnosis, Mapping) else None


def detail_of(evidence: Mapping[str, Any]) -> str | None:
    """The diagnosis in a result's evidence as one line."""
    diagnosis = evidence.get(KEY)
    return diagnosis["detail"] if isinstance(diagnosis, Mapping) else None


def others_of(evidence: Mapping[str, Any]) -> tuple[str, ...]:
    """What explains a result as well as its diagnosis does, as lines, at most ``RUNNERS_UP``."""
    diagnosis = evidence.get(KEY)
    others = diagnosis.get("runners_up") if isinstance(diagnosis, Mapping) else None
    if not isinstance(others, list | tuple):
        return ()
    return tuple(str(one["detail"]) for one in others if isinstance(one, Mapping) and "detail" in one)[:RUNNERS_UP]


def told_of(evidence: Mapping[str, Any]) -> Iterator[str]:
    """The diagnosis in a result's evidence, and below it what explains the result as well: nothing, a line or two."""
    if (detail := detail_of(evidence)) is not None:
        yield f"diagnosis: {detail}"
    if others := others_of(evidence):
        yield f"or: {'; '.join(others)}"


def _diagnosis(declaration: Declaration, run: Execution, around: Surroundings | None) -> Diagnosis | None:
    case, convention = run.instance.case, declaration.convention
    if not case.is_attention and case.operation is not Operation.LSE_MERGE:
        return None  # copies and lists of indices: nothing is computed
    out, lse = run.outputs["out"], run.outputs.get("lse")
    if lse is not None and convention.lse_layout is LseLayout.HEAD_TOKEN:
        lse = lse.transpose(0, 1)
    precision = declaration.precision_for(case.dtype, case.kv_dtype)
    if case.operation is Operation.LSE_MERGE:
        buffers = run.instance.buffers
        if lse is None:
            return None
        outs, lses = buffers["outs"].view, buffers["lses"].view
        return diagnose_merge(outs, lses, out, lse, precision=precision, base=convention.lse_base)
    if run.instance.problem is None:
        return None
    return diagnose(
        run.instance.problem,
        out,
        lse,
        precision=precision,
        input_dtype=case.dtype,
        convention=convention,
        around=surroundings(run) if around is None else around,
        confidence=CONFIDENCE,
    )


def surroundings(run: Execution) -> Surroundings:
    """What lies around the operands: the pool, its pages, and what their last slots hold behind the keys."""
    case = run.instance.case
    if case.operation is not Operation.PAGED_DECODE or case.index_form is not IndexForm.PAGE_TABLE:
        return Surroundings()
    pages = tuple(tuple(own) for own in own_pages(case))
    if case.pool is Pool.HUGE:
        return Surroundings(page_size=case.page_size, pages=pages)  # slots of so large a pool are not read here
    slots = _past_the_end(case)
    read = {role: _read(run, role, torch.cat(slots)) for role in Role}
    counts = [len(own) for own in slots]
    k, v = (read[role].split(counts) for role in (Role.K, Role.V))
    return Surroundings(
        page_size=case.page_size,
        stale=tuple(zip(k, v, strict=True)),
        pages=pages,
        pool_k=_pool(run, Role.K),
        pool_v=_pool(run, Role.V),
    )


def _past_the_end(case: Case) -> list[Tensor]:
    """For each request, the slots of its last page behind its last key."""
    found = []
    for pages, length in zip(own_pages(case), case.context_lens, strict=True):
        filled = length - (len(pages) - 1) * case.page_size
        first = pages[-1] * case.page_size if pages else 0
        found.append(torch.arange(first + filled, first + case.page_size) if pages else torch.arange(0))
    return found


def _read(run: Execution, role: Role, slots: Tensor) -> Tensor:
    case = run.instance.case
    cache = run.instance.buffers[f"{role.value}_cache"].view
    return read_slots(cache, slots, geometry(case, role)).cpu()


def _pool(run: Execution, role: Role) -> Tensor:
    """All pages [P, g, Hkv, D] of a cache."""
    case = run.instance.case
    rows = unpack(run.instance.buffers[f"{role.value}_cache"].view, geometry(case, role)).cpu()
    return rows.view(-1, case.page_size, *rows.shape[1:])
