"""Relations: two calls whose results must agree, whatever the right result is. None of them needs the oracle's.

- PAGES: a request's keys lie in other pages. Bit for bit, where the target is deterministic: addresses enter no
  arithmetic.
- BATCH: the first request alone. Bit for bit where the target declares ``batch_invariant``, else within the errors that
  both are allowed: a kernel may choose tiles and splits by the batch.
- FRESH: a backend is given a fresh prompt, whose keys are all new, alone and beside a request with a prefix, which may
  send both another way. Within the errors of both.
- CHUNKS: a backend is given the first request's new tokens in two steps. Within the errors that both are allowed;
  what the first step stores is what the second finds, as the check of the pool after a step says.
- SESSION: see ``fuzz.check.session``.
- SETTINGS: another value of a setting that the declaration names. Within the errors of both, each with its setting.
- RESCALED: the descale of fp8 keys is halved, and queries are doubled; that of values is doubled, and so is the result.
  What a model gives beside the cache is rescaled with it. Within the errors of both; powers of two are exact.
- AGREEMENT: another target that the declaration names takes the same arguments, or the queries of a decode as the last
  tokens of each request. Within the errors that both are allowed. A quantised pool has to be given what it holds
  exactly, as the cases of a backend are; an extend that is passed some keys in the model's dtype is not.

The values of a designed probe depend on the whole batch: BATCH, FRESH, CHUNKS, SESSION and RESCALED need a plain one. A
relation whose preconditions do not hold is left out: it neither passes nor fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fuzz import engine as engines
from fuzz.call import Unsupported
from fuzz.case import Case
from fuzz.check.alike import same_bits, within
from fuzz.check.execute import Execution, Progress, execute
from fuzz.check.result import Check, CheckResult
from fuzz.check.session import extender, in_session, serve
from fuzz.check.variations import (
    alone,
    as_extend,
    beside,
    chunks,
    elsewhere,
    out_factor,
    rescalable,
    rescale,
    turned,
    unsaturated,
)
from fuzz.instance import build
from fuzz.probes import PLAIN
from fuzz.support import unsupported
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict


def relations(
    declaration: Declaration, case: Case, engine: Engine, first: Execution, progress: Progress
) -> Iterator[CheckResult]:
    """Every relation whose preconditions hold for ``case``; ``first`` is its execution."""
    if not case.is_attention or not declaration.supports.deterministic:
        return

    def again(other: Case, **options: Any) -> Execution:
        return execute(declaration, other, first.poison, engine, progress, **options)

    def close(check: Check, words: str, second: Execution, rows: range, **options: Any) -> CheckResult:
        return within(check, words, (declaration, first), (declaration, second), rows, **options)

    moved = elsewhere(case)
    if moved is not None:
        yield same_bits(declaration, Check.PAGES, "depend on which pages hold the keys", first, again(moved))
    every, own = range(sum(case.query_lens)), range(case.query_lens[0] if case.query_lens else 0)
    if len(case.context_lens) > 1 and len(own) and case.probe in PLAIN:
        other = again(alone(case))
        if declaration.supports.batch_invariant:
            yield same_bits(declaration, Check.BATCH, "of the first request depend on the others", first, other)
        else:
            yield close(Check.BATCH, "the first request, alone: ", other, own)
    company = beside(case)
    if company is not None and unsupported(declaration, company) is None:
        words = "a fresh prompt, alone: " if len(company.query_lens) == 1 else "a fresh prompt, beside a prefix: "
        yield close(Check.FRESH, words, again(company), own)
    for chunk, rows in chunks(case):
        yield close(Check.CHUNKS, f"in two steps, tokens {rows}: ", again(chunk), rows)
    through = extender(declaration)
    if through is not None and in_session(case):
        yield _session(declaration, through, case, engine, first, progress)
    for knob in declaration.knobs:
        tuned, words = turned(declaration, knob, case)
        other = execute(tuned, case, first.poison, engine, progress)
        yield within(Check.SETTINGS, words, (declaration, first), (tuned, other), every)
    if rescalable(case) and unsaturated(first.instance):
        yield close(Check.RESCALED, "descales rescaled: ", again(case, change=rescale), every, factor=out_factor(case))
    if declaration.agrees_with is not None:
        yield from _agreement(declaration, declaration.agrees_with, case, engine, first, progress)


def _session(
    declaration: Declaration, through: Declaration, case: Case, engine: Engine, first: Execution, progress: Progress
) -> CheckResult:
    """Both requests of the session against the first of the case."""
    device = engines.device(engine)
    outs = serve(declaration, through, case, first.poison, device, progress)
    engines.synchronize(engine)
    single = build(alone(case), first.poison, device)
    rows = range(case.query_lens[0])
    for out, words in zip(outs, ("after two chunks: ", "with a prefix in shared pages: "), strict=True):
        last = replace(first, instance=single, outputs={"out": out})
        found = within(Check.SESSION, words, (declaration, first), (declaration, last), rows)
        if found.verdict is not Verdict.PASS:
            return found
    return CheckResult(Check.SESSION, Verdict.PASS)


def _agreement(
    declaration: Declaration, partner: Declaration, case: Case, engine: Engine, first: Execution, progress: Progress
) -> Iterator[CheckResult]:
    same = case if partner.operation is case.operation else as_extend(case, partner)
    if same is None or unsupported(partner, same) is not None:
        return
    try:
        other = execute(partner, same, first.poison, engine, progress)
    except Unsupported:
        return
    rows = range(sum(case.query_lens))
    yield within(Check.AGREEMENT, f"unlike {partner.name}: ", (declaration, first), (partner, other), rows)
