"""Solve in float64, budget, judge; where the result is wrong, say how and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oracle.assertion.arguments import ArgumentsError, Lengths, one_of, tensor, wrong
from oracle.assertion.keys import Cache, Keys, given_keys
from oracle.assertion.queries import Queries, TensorLayout, layout_of, queries
from oracle.attention import Solution, lse_with_sink, solve
from oracle.budget import Budgets, Judgement, Tally, budgets, confidence_for, judge
from oracle.budget.formats import FORMAT_OF_DTYPE, format_named
from oracle.convention import CausalAlignment, Convention, DefaultScale, SinkUnits
from oracle.diagnose import Kind, Surroundings, diagnose
from oracle.diagnose.rows import request_of
from oracle.failure import (
    BudgetSaysNothing,
    Failed,
    describe_problem,
    evidence,
    explanation,
    mismatch_type,
    render,
)
from oracle.kinds import KVLayout, VLayout
from oracle.precision import UNDECLARED, Precision
from oracle.problem import Descale, Problem, ProblemError
from oracle.verdict import Verdict

CONFIDENCE = confidence_for(elements=10**9, risk=1e-3)
"""Of the probable budget: a suite that judges a thousand million elements has a false alarm once in a thousand runs."""

_UNSAID = Convention(source="the caller said nothing")


def assert_attention_close(
    out: Tensor,
    lse: Tensor | None = None,
    *,
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    layout: str | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    kv_layout: str = "nhd",
    v_layout: str = "5d",
    page_table: Tensor | None = None,
    slots: Tensor | None = None,
    page_size: int | None = None,
    q_lens: Lengths = None,
    lengths: Lengths = None,
    causal: bool | None = None,
    window: int | tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    precision: Precision | None = None,
    convention: Convention | None = None,
    nan: str = "refuse",
    name: str = "attention",
) -> Judgement:
    """Assert that `out`, and `lse` if given, are the attention of q over the keys, within what roundings explain.

    Queries: q [B, H, S, D] with layout="bhsd" (torch), [B, S, H, D] with "bshd" (flash-attention), or [T, H, D], the
    tokens of all requests, with q_lens. `out` has the axes of q and the dims of v; lse [B, H, S] or [T, H] in float32,
    natural, without the sink, unless `convention` says otherwise.
    Keys: k and v in the layout of q (of [T, Hkv, D]: lengths [B] keys each); or k_cache and v_cache in `kv_layout`
    nhd [pages, page size, Hkv, D], hnd [pages, Hkv, page size, D], linear [slots, Hkv, D] (with page_size, if there is
    a page table) or shuffle_5d (`oracle.layout`; v_layout 5d or 4d), with page_table [B, pages] or slots [keys], and
    lengths [B], the queries' own keys counted. A 3-D q over a cache has one query a request unless q_lens is given.
    q_lens and lengths of 4-D tensors: how much of each request is no padding; the rest is neither read nor judged.
    causal: the last query sees the last key (the convention may say top left); may be left out where requests have one
    query. window: keys that a query sees, its own counted, or what `convention` means by it. sinks [Hq] natural logits.
    scale: default 1 / sqrt(D). Descales: a number, one element, [H], or [tokens, H].
    precision: what the kernel may round; default: the loosest honest assumption. nan: NaN or infinity that a query
    sees is "refuse"d, since no number is right there, or is "propagate"d: such rows are asked not to be finite. In what
    no query sees it has no influence on what is right. A NaN in a result that should be finite always fails.
    name: how the failure's text calls the kernel.

    Returns the judgement, with the worst ratio of error to budget. Raises a subclass of
    `oracle.failure.AttentionMismatch` for each class of failure, `BudgetSaysNothing` where nothing could be shown, and
    `ArgumentsError` where an argument is not allowed.
    """
    __tracebackhide__ = True
    said, precision = convention or _UNSAID, precision or UNDECLARED
    order = layout_of(q, layout)
    keys = _keys(k, v, k_cache, v_cache, order, kv_layout, v_layout, page_table, slots, page_size, lengths)
    asked = queries(q, order, q_lens, requests=len(keys.lens))
    problem, keys = _problem(
        asked,
        keys,
        said,
        causal=causal,
        window=window if convention is None else _window(said, window),
        sinks=sinks,
        scale=scale,
        soft_cap=soft_cap,
        descales=(q_descale, k_descale, v_descale),
    )
    got = _result("out", asked.taken("out", out, problem.dim_v), list(FORMAT_OF_DTYPE))
    got_lse = None if lse is None else _result("lse", asked.lse(lse, said.lse_layout), [_lse_dtype(precision)])
    solution = _solved(problem, said, nan)
    input_dtype = FORMAT_OF_DTYPE[problem.q.dtype].name
    bounds = budgets(
        problem,
        precision,
        input_dtype=input_dtype,
        lse_includes_sink=said.lse_includes_sink,
        confidence=CONFIDENCE,
        solution=solution,
    )
    judgement = judge(
        got,
        got_lse,
        solution,
        bounds,
        out_dtype=FORMAT_OF_DTYPE[got.dtype].name,
        precision=precision,
        expected_empty_out=said.empty_out.number,
        expected_empty_lse=said.empty_lse.number,
        lse_base=said.lse_base,
    )
    if judgement.verdict.is_finding:
        around = keys.around()
        failed = _failures(problem, got, got_lse, judgement, bounds, said, precision, input_dtype, around)
        text = render(name, ", ".join(filter(None, (describe_problem(problem), keys.words))), failed)
        kind = failed[0].evidence.get("diagnosis", {}).get("kind")
        raise mismatch_type(failed[0].check, kind)(text, failed[0].evidence)
    if judgement.verdict is Verdict.VACUOUS and judgement.out.elements:
        raise BudgetSaysNothing(_nothing_shown(name, judgement, precision))
    return judgement


def _keys(
    k: object,
    v: object,
    k_cache: object,
    v_cache: object,
    order: TensorLayout,
    kv_layout: str,
    v_layout: str,
    page_table: object,
    slots: object,
    page_size: object,
    lengths: Lengths,
) -> Keys:
    if (k is None) == (k_cache is None):
        given = "neither" if k is None else "both"
        raise wrong("k", None, f"one of k (with v) and k_cache (with v_cache), {given} is given")
    if k_cache is not None:
        return Cache(
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=page_table,
            slots=slots,
            lengths=lengths,
            layout=one_of("kv_layout", kv_layout, KVLayout),
            v_layout=one_of("v_layout", v_layout, VLayout),
            page_size=page_size,
        ).keys()
    for name, value in (("page_table", page_table), ("slots", slots), ("v_cache", v_cache)):
        if value is not None:
            raise wrong(name, value, "nothing, unless k_cache is given")
    return given_keys(k, v, order, lengths)


def _window(said: Convention, window: int | tuple[int, int] | None) -> int | None:
    if window is None:
        return None
    try:
        return said.window.keys(window)
    except ValueError as error:
        raise ArgumentsError(f"assert_attention_close: {error}") from None


def _problem(
    asked: Queries,
    keys: Keys,
    said: Convention,
    *,
    causal: bool | None,
    window: object,
    sinks: Tensor | None,
    scale: float | None,
    soft_cap: float | None,
    descales: tuple[Descale, Descale, Descale],
) -> tuple[Problem, Keys]:
    """The problem, and its keys: where the causal diagonal begins top left, those beyond it are seen by nobody."""
    if causal is None:
        if any(n > 1 for n in asked.q_lens):
            raise wrong("causal", None, "True or False, where a request has several queries")
        causal = True
    if asked.q.dtype not in FORMAT_OF_DTYPE:
        raise wrong("q", asked.q, f"one of {', '.join(fmt.name for fmt in FORMAT_OF_DTYPE.values())}")
    if scale is None and said.default_scale is DefaultScale.ONE:
        scale = 1.0
    scale = asked.q.shape[2] ** -0.5 if scale is None else scale
    if sinks is not None:
        sinks = tensor("sinks", sinks, "Hq", asked.q.shape[1])
        sinks = sinks.double() * scale if said.sink is SinkUnits.SCALED else sinks
    contexts = keys.lens
    if causal and said.causal_alignment is CausalAlignment.TOP_LEFT:
        kept = tuple(min(n, q) for n, q in zip(keys.lens, asked.q_lens, strict=True))
        rows = torch.cat([torch.arange(own) < n for own, n in zip(keys.lens, kept, strict=True)]).to(keys.k.device)
        keys = replace(keys, k=keys.k[rows], v=keys.v[rows], lens=kept, around=Surroundings)
        contexts = asked.q_lens
    q_descale, k_descale, v_descale = (_per_head(d) for d in descales)
    try:
        return (
            Problem(
                q=asked.q,
                k=keys.k.to(asked.q.device),
                v=keys.v.to(asked.q.device),
                q_lens=asked.q_lens,
                kv_lens=keys.lens,
                context_lens=contexts,
                scale=scale,
                causal=causal,
                window=window,  # type: ignore[arg-type]
                sinks=sinks,
                soft_cap=soft_cap,
                q_descale=q_descale,
                k_descale=k_descale,
                v_descale=v_descale,
            ),
            keys,
        )
    except ProblemError as error:
        raise ArgumentsError(f"assert_attention_close: {error}") from None


def _per_head(descale: Descale) -> Descale:
    """[H] as [1, H]."""
    return descale.unsqueeze(0) if isinstance(descale, Tensor) and descale.ndim == 1 else descale


def _lse_dtype(precision: Precision) -> torch.dtype:
    return format_named(precision.lse_dtype).dtype


def _result(name: str, value: Tensor, allowed: Sequence[torch.dtype]) -> Tensor:
    if value.dtype not in allowed:
        names = ", ".join(FORMAT_OF_DTYPE[dtype].name for dtype in allowed)
        hint = ", which precision.lse_dtype says" if name == "lse" else ""
        raise wrong(name, value, f"{names}{hint}")
    return value.detach()


def _solved(problem: Problem, said: Convention, nan: str) -> Solution:
    if nan not in ("refuse", "propagate"):
        raise wrong("nan", nan, "refuse, propagate")
    solution = solve(problem)
    flawed = (~solution.out.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if flawed and nan == "refuse":
        request = request_of(problem, flawed[0])
        row = flawed[0] - problem.q_starts[request]
        raise ArgumentsError(
            f"assert_attention_close: q, k, v: row {row} of request {request} sees NaN or infinity; allowed: finite "
            "values, or nan='propagate' to ask for a result that is not finite there"
        )
    if said.lse_includes_sink and problem.sinks is not None:
        return Solution(solution.out, lse_with_sink(solution.lse, problem.sinks))
    return solution


def _failures(
    problem: Problem,
    out: Tensor,
    lse: Tensor | None,
    judgement: Judgement,
    bounds: Budgets,
    said: Convention,
    precision: Precision,
    input_dtype: str,
    around: Surroundings,
) -> list[Failed]:
    """The failed checks, values before log-sum-exp, with everything that explains them."""
    problem = problem.to(torch.device("cpu"))
    diagnosis = diagnose(
        problem,
        out,
        lse,
        precision=precision,
        input_dtype=input_dtype,
        convention=said,
        around=around,
        confidence=bounds.confidence,
    )
    found = []
    tallies: list[tuple[str, Tally | None, Tensor | None]] = [
        ("values", judgement.out, out),
        ("lse", judgement.lse, lse),
    ]
    for check, tally, actual in tallies:
        if tally is None or actual is None or not tally.verdict.is_finding:
            continue
        own = evidence(tally, actual, precision, problem.q_lens)
        own |= explanation(
            problem,
            out,
            own,
            precision=precision,
            input_dtype=input_dtype,
            confidence=bounds.confidence,
            around=around,
        )
        if diagnosis.kind is not Kind.NONE:
            own["diagnosis"] = diagnosis.to_dict()
        beyond = tally.failures + tally.suspects
        message = f"{beyond} of {tally.elements} elements in {tally.failing_rows} rows beyond their budget"
        found.append(Failed(check=check, message=message, evidence=own))
    return found


def _nothing_shown(name: str, judgement: Judgement, precision: Precision) -> str:
    tally = judgement.out if judgement.out.verdict is Verdict.VACUOUS else judgement.lse
    assert tally is not None
    loosest = precision.loosest()
    assumed = f"; the loosest is assumed of {', '.join(loosest)}: state the kernel's precision" if loosest else ""
    return (
        f"{name}: {tally.vacuous} of {tally.elements} elements have a budget so wide that it says nothing{assumed}, "
        "or give inputs of which few keys have most of the weight"
    )
