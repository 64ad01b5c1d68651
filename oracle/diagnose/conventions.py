"""Hypotheses about what a call's numbers mean: window, causality, sinks, scale, soft cap, descales, fp8, dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle.attention import Solution, lse_with_sink
from oracle.budget import Bounds
from oracle.convention import Convention
from oracle.diagnose.hypothesis import Hypothesis
from oracle.diagnose.model import Kind, Surroundings
from oracle.diagnose.quick import View
from oracle.diagnose.rows import Keys, Row
from oracle.fp8 import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, Fp8Format
from oracle.kinds import LseBase
from oracle.problem import Descale, Problem
from oracle.rounding import round_to, widen

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)


def hypotheses(problem: Problem, convention: Convention, around: Surroundings) -> Iterator[Hypothesis]:
    """All of them, the ones that cost nothing first."""
    yield from _lse(problem, convention)
    yield Hypothesis(
        Kind.NO_KEY,
        "no_key: what a row without a visible key holds, as if it saw none or were not worked out",
        {"keys": 0},
        keys=lambda row: torch.arange(0),
    )
    yield from _window(problem)
    yield from _causal(problem)
    if problem.sinks is not None:
        yield from _sinks(problem, around, convention.lse_includes_sink)
    yield from _scale(problem)
    if problem.soft_cap is not None:
        yield from _soft_cap(problem)
    yield from _descales(problem, around)
    yield from _flavours(problem)
    yield from _dims(problem)


def _lse(problem: Problem, convention: Convention) -> Iterator[Hypothesis]:
    def times(factor: float) -> Callable[..., Solution]:
        return lambda view, solution, rows: Solution(solution.out, solution.lse * factor)

    natural = convention.lse_base is LseBase.NATURAL
    asked, other = ("natural", "2") if natural else ("2", "natural")
    factor = LOG2E if natural else LN2
    yield Hypothesis(
        Kind.LSE_BASE, f"lse_base: {other} where {asked} is asked for", {"base": other}, after=times(factor)
    )
    yield Hypothesis(
        Kind.LSE_BASE, "lse_base: the base is changed the wrong way", {"factor": 1 / factor}, after=times(1 / factor)
    )
    if problem.sinks is None:
        return

    def without_sink(view: View, solution: Solution, rows: object) -> Solution:
        assert view.sinks is not None
        # log(exp(lse) - exp(sink)); the bound of the row covers what cancels.
        share = (view.sinks.double() - solution.lse).clamp(max=-(2.0**-52))
        return Solution(solution.out, solution.lse + torch.log1p(-share.exp()))

    def with_sink(view: View, solution: Solution, rows: object) -> Solution:
        assert view.sinks is not None
        return Solution(solution.out, lse_with_sink(solution.lse, view.sinks))

    if convention.lse_includes_sink:
        yield Hypothesis(
            Kind.SINK, "sink: not counted in the log-sum-exp", {"lse": "without"}, after=without_sink, rank=1
        )
    else:
        yield Hypothesis(Kind.SINK, "sink: counted in the log-sum-exp", {"lse": "with"}, after=with_sink, rank=1)


def _range(low: Callable[[Row], int], high: Callable[[Row], int]) -> Keys:
    """Keys low .. high - 1 of a row, as far as the request has them."""
    return lambda row: torch.arange(max(0, low(row)), max(0, low(row), min(row.count, high(row))))


def _shifted(low: int, high: int) -> Keys:
    """The range of a row with its ends moved; a low end at the first key stays there."""
    return _range(lambda r: r.lo + low if r.lo else 0, lambda r: r.hi + high)


def _window(problem: Problem) -> Iterator[Hypothesis]:
    asked = problem.window
    if asked is None:
        return
    queries = max(problem.q_lens, default=0)
    yield Hypothesis(
        Kind.WINDOW,
        f"window: no window where {_counted(asked)} asked for",
        {"keys": None, "asked": asked},
        alter=lambda p: replace(p, window=None),
        rank=3,  # a key or two more are the smaller change, though over a few keys both see the same
    )
    offsets = {step: step for step in (1, -1, 2, -2)}
    for step in (queries, -queries, queries - 1, 1 - queries):
        offsets.setdefault(step, abs(step) + 2)
    for step, rank in offsets.items():
        if step and asked + step > 0:
            yield window_of(asked, asked + step, rank=abs(rank))
    if queries > 1:
        yield Hypothesis(
            Kind.WINDOW,
            "window: counted from the request's last query for all its queries",
            {"from": "last"},
            keys=_range(lambda r: r.position + r.queries - r.index - asked, lambda r: r.hi),
            rank=5,
        )
        yield Hypothesis(
            Kind.WINDOW,
            "window: counted from the request's first query for all its queries",
            {"from": "first"},
            keys=_range(lambda r: r.position - r.index - asked + 1, lambda r: r.hi),
            rank=5,
        )


def _counted(keys: int | None) -> str:
    """`1 key is`, `2 keys are`."""
    if keys is None:
        return "none is"
    return f"{keys} {'key is' if keys == 1 else 'keys are'}"


def window_of(asked: int | None, keys: int, rank: int = 9) -> Hypothesis:
    """A window of another number of keys."""
    return Hypothesis(
        Kind.WINDOW,
        f"window: {_counted(keys).rpartition(' ')[0]} where {_counted(asked)} asked for",
        {"keys": keys, "asked": asked},
        alter=lambda p: replace(p, window=keys),
        rank=rank,
    )


def _causal(problem: Problem) -> Iterator[Hypothesis]:
    if not problem.causal:
        yield Hypothesis(
            Kind.CAUSAL, "causal: applied where it is off", {"causal": True}, alter=lambda p: replace(p, causal=True)
        )
        return
    yield Hypothesis(
        Kind.CAUSAL,
        "causal: off where it is asked for",
        {"causal": False},
        alter=lambda p: replace(p, causal=False),
        rank=3,
    )
    for step, what in ((1, "one key after its own is seen"), (-1, "its own key is not seen")):
        yield Hypothesis(
            Kind.CAUSAL,
            f"causal: of each query, {what}",
            {"shift": step},
            keys=_shifted(0, step),
        )
        yield Hypothesis(
            Kind.CAUSAL,
            f"causal: queries stand one position {'after' if step > 0 else 'before'} their own",
            {"position": step},
            keys=_shifted(step, step),
            rank=1,
        )
    yield Hypothesis(
        Kind.CAUSAL,
        "causal: aligned to the top left, query i sees keys 0 to i",
        {"alignment": "top_left"},
        keys=_range(lambda r: 0 if problem.window is None else r.index - problem.window + 1, lambda r: r.index + 1),
        rank=2,
    )


def _with_sinks(change: Callable[[Problem, Tensor], Tensor | None]) -> Callable[[Problem], Problem]:
    def alter(p: Problem) -> Problem:
        assert p.sinks is not None
        return replace(p, sinks=change(p, p.sinks.double()))

    return alter


def _plus(term: float) -> Callable[[Problem, Tensor], Tensor]:
    return lambda p, sinks: sinks + term


def _rolled(step: int) -> Callable[[Problem, Tensor], Tensor]:
    return lambda p, sinks: sinks.roll(step)


def _sinks(problem: Problem, around: Surroundings, includes: bool) -> Iterator[Hypothesis]:
    def sink(detail: str, change: Callable[[Problem, Tensor], Tensor | None], rank: int, **found: Any) -> Hypothesis:
        return Hypothesis(Kind.SINK, f"sink: {detail}", found, alter=_with_sinks(change), rank=rank)

    yield sink("left out of the softmax", lambda p, s: None, 0, sink="missing")
    known = {len(splits) for splits in around.splits or ()} | {2}
    counts = sorted({*known, *range(2, 9), 16, 32, 64} - {0, 1})
    for count in counts:
        rank = 2 if count in known else 3
        yield sink(f"counted {count} times, as if in every part", _plus(math.log(count)), rank, times=count)
    yield sink("multiplied by the softmax scale", lambda p, s: s * p.scale, 1, factor="scale")
    yield sink("read as an exponent of 2", lambda p, s: s * LN2, 1, base=2)
    yield sink("changed to base 2 and read as natural", lambda p, s: s * LOG2E, 1, base=2)
    yield sink("divided by the softmax scale", lambda p, s: s / p.scale if p.scale else s, 3, factor="1/scale")
    yield sink("negated", lambda p, s: -s, 3, factor=-1)
    yield sink("taken for 0", lambda p, s: torch.zeros_like(s), 3, sink=0)
    if problem.soft_cap is not None:
        yield sink(
            "capped as logits are", lambda p, s: (s / (p.soft_cap or 1)).tanh() * (p.soft_cap or 1), 2, capped=True
        )
    group, heads = problem.group, problem.q_heads
    if group > 1:
        yield sink(
            "that of the first head of the group for all of it",
            lambda p, s: s[torch.arange(heads) // group * group],
            2,
            heads="first of group",
        )
    for step in (1, -1):
        yield sink(f"that of the head {'after' if step < 0 else 'before'}", _rolled(step), 3, heads=-step)
    if not includes:
        yield from _sinks_by_query(problem)


def _sinks_by_query(problem: Problem) -> Iterator[Hypothesis]:
    """Sinks read as if each query of a request had its own, at head * queries + query; past their end, anything."""

    def read(rows: Sequence[Row]) -> Tensor:
        head = torch.arange(problem.q_heads)
        return torch.stack([head * row.queries + row.index for row in rows])

    def after(view: View, solution: Solution, rows: Sequence[Row]) -> Solution:
        assert view.sinks is not None
        sinks, index = view.sinks.double(), read(rows)
        bare = solution.out / torch.sigmoid(solution.lse - sinks).unsqueeze(-1)
        other = sinks[index.clamp(max=len(sinks) - 1)]
        return Solution(bare * torch.sigmoid(solution.lse - other).unsqueeze(-1), solution.lse)

    def bounded(own: Bounds, rows: Sequence[Row]) -> Bounds:
        assert problem.sinks is not None
        sinks, index = problem.sinks.double().to("cpu"), read(rows)
        # A sink that is smaller by d makes outputs and their errors larger by at most exp(d).
        larger = (sinks - sinks[index.clamp(max=len(sinks) - 1)]).clamp(min=0.0, max=8.0).exp()
        beyond = (index >= len(sinks)) & (own.keys > 0).unsqueeze(-1)
        return replace(own, out=(own.out * larger.unsqueeze(-1)).masked_fill(beyond.unsqueeze(-1), math.inf))

    if max(problem.q_lens, default=0) > 1:
        yield Hypothesis(
            Kind.SINK,
            "sink: that at head * queries + query, as if every query had its own",
            {"index": "head * queries + query"},
            after=after,
            bounded=bounded,
            whole=True,
            rank=2,
        )


def _scale(problem: Problem) -> Iterator[Hypothesis]:
    given = problem.scale
    exact = torch.tensor(given, dtype=torch.float64)
    candidates = [
        ("1/sqrt(D) of the keys", problem.dim_qk**-0.5),
        ("1/sqrt(D) of the values", problem.dim_v**-0.5),
        ("1, as if none were given", 1.0),
        ("1/D", 1.0 / problem.dim_qk),
        ("rounded to bf16", float(widen(round_to(exact, torch.bfloat16)))),
        ("rounded to fp16", float(widen(round_to(exact, torch.float16)))),
        ("applied twice", given * given),
        ("times ln 2, exponents of 2 read as natural ones", given * LN2),
        ("times log2(e), changed to base 2 once too often", given * LOG2E),
        ("negated", -given),
        ("its square root", math.sqrt(abs(given))),
    ]
    seen = {given}
    for rank, (what, value) in enumerate(candidates):
        if value not in seen:
            seen.add(value)
            yield scale_of(given, value, f"scale: {what}, {value:.6g} where {given:.6g} is asked for", rank)


def scale_of(
    given: float, value: float, detail: str, rank: int, fitted: int = 0, kind: Kind = Kind.SCALE
) -> Hypothesis:
    """Another softmax scale."""
    return Hypothesis(
        kind,
        detail,
        {"scale": value, "asked": given},
        alter=lambda p: replace(p, scale=value),
        rank=rank,
        fitted=fitted,
    )


def _soft_cap(problem: Problem) -> Iterator[Hypothesis]:
    cap = problem.soft_cap
    assert cap is not None

    def capped(detail: str, value: float | None, rank: int) -> Hypothesis:
        return Hypothesis(
            Kind.SOFT_CAP,
            f"soft_cap: {detail}",
            {"cap": value, "asked": cap},
            alter=lambda p: replace(p, soft_cap=value),
            rank=rank,
        )

    yield capped(f"none where {cap:g} is asked for", None, 0)
    if 0 < problem.scale != 1:
        yield capped("applied before the scale", problem.scale * cap, 1)
    yield capped("applied to exponents of 2", cap * LN2, 2)
    yield capped("multiplied by log2(e)", cap * LOG2E, 2)
    yield capped(f"{2 * cap:g} where {cap:g} is asked for", 2 * cap, 3)
    yield capped(f"{cap / 2:g} where {cap:g} is asked for", cap / 2, 3)


_DESCALES = (("q", Kind.Q_DESCALE), ("k", Kind.K_DESCALE), ("v", Kind.V_DESCALE))


def _descales(problem: Problem, around: Surroundings) -> Iterator[Hypothesis]:
    for name, kind in _DESCALES:
        given: Descale = getattr(problem, f"{name}_descale")
        if given is not None:
            factor = torch.as_tensor(given, dtype=torch.float64)
            yield from _descale(name, kind, factor)
            if name != "q" and around.page_size is not None and factor.numel() > 1 and len(factor) > 1:
                yield from _page_descale(problem, name, kind, factor, around.page_size)
    if problem.k_descale is not None and problem.v_descale is not None:
        yield Hypothesis(
            Kind.K_DESCALE,
            "k_descale: swapped with v_descale",
            {"swapped": True},
            alter=lambda p: replace(p, k_descale=p.v_descale, v_descale=p.k_descale),
            rank=2,
        )


def _descale(name: str, kind: Kind, given: Tensor) -> Iterator[Hypothesis]:
    field = f"{name}_descale"

    def other(detail: str, value: Tensor | None, rank: int) -> Hypothesis:
        return Hypothesis(
            kind,
            f"{field}: {detail}",
            {"change": detail},
            alter=lambda p: replace(p, **{field: value}),  # type: ignore[arg-type]
            rank=rank,
        )

    yield other("left out", None, 0)
    yield other("applied twice", given * given, 1)
    yield other("divided by instead of multiplied", 1 / given, 2)
    heads = given.shape[1] if given.ndim == 2 else 1
    if heads > 1:
        yield other("that of the first head for all", given[:, :1].expand(given.shape).contiguous(), 3)
        yield other("that of the next head", given.roll(-1, 1), 4)
        yield other("that of the head before", given.roll(1, 1), 4)
        yield other("the product over the heads", given.prod(1, keepdim=True).expand(given.shape).contiguous(), 5)
    if given.ndim == 2 and given.shape[0] > 1:
        yield other("that of the first token for all", given[:1].expand(given.shape).contiguous(), 3)
        yield other("that of the next token", given.roll(-1, 0), 4)
        yield other("that of the token before", given.roll(1, 0), 4)


def _page_descale(problem: Problem, name: str, kind: Kind, given: Tensor, size: int) -> Iterator[Hypothesis]:
    """Descales of keys [Tk, Hkv or 1], as pages have them: those of other pages of the request."""
    own = given.split(problem.kv_lens)
    other = {
        "the first page for all": [x[torch.arange(len(x)) % min(size, len(x))] if len(x) else x for x in own],
        "the next page": [x.roll(-size, 0) for x in own],
        "the page before": [x.roll(size, 0) for x in own],
    }
    for what, factors in other.items():
        detail, value = f"that of {what}", torch.cat(factors)
        yield Hypothesis(
            kind,
            f"{name}_descale: {detail}",
            {"change": detail},
            alter=lambda p, value=value: replace(p, **{f"{name}_descale": value}),  # type: ignore[misc]
            rank=6,
        )


_TWIN = {fmt.dtype: twin for fmt, twin in ((E4M3FN, E4M3FNUZ), (E4M3FNUZ, E4M3FN), (E5M2, E5M2FNUZ), (E5M2FNUZ, E5M2))}


def _read_as(twins: dict[str, Fp8Format]) -> Callable[[Problem], Problem]:
    def alter(p: Problem) -> Problem:
        read = {name: getattr(p, name).contiguous().view(twin.dtype) for name, twin in twins.items()}
        return replace(p, **read)

    return alter


def _flavours(problem: Problem) -> Iterator[Hypothesis]:
    choices = {"k and v": ("k", "v"), "k": ("k",), "v": ("v",), "q, k and v": ("q", "k", "v"), "q": ("q",)}
    for rank, (what, names) in enumerate(choices.items()):
        operands = {name: getattr(problem, name) for name in names}
        if not all(x.dtype in _TWIN for x in operands.values()):
            continue
        twins: dict[str, Fp8Format] = {name: _TWIN[x.dtype] for name, x in operands.items()}
        read = next(iter(twins.values())).name
        yield Hypothesis(
            Kind.FP8_FLAVOUR,
            f"fp8_flavour: the bytes of {what} are read as {read}",
            {"operands": list(names), "read_as": read},
            alter=_read_as(twins),
            rank=rank,
        )


def _dims(problem: Problem) -> Iterator[Hypothesis]:
    dim = problem.dim_qk

    def dropped(keep: Tensor) -> Callable[[Problem], Problem]:
        return lambda p: replace(p, q=round_to(widen(p.q) * keep, p.q.dtype))

    for count in sorted({1, 2, 4, 8, 16, 32, 64, dim // 2, dim % 16, dim % 32} - {0}):
        if count >= dim:
            continue
        for end, keep in (("last", torch.arange(dim) < dim - count), ("first", torch.arange(dim) >= count)):
            noun = "dim" if count == 1 else f"{count} dims"
            yield Hypothesis(
                Kind.DIMS,
                f"dims: the {end} {noun} of q and k left out of their product",
                {"dims": count, "end": end},
                alter=dropped(keep),
                rank=0 if end == "last" else 1,
            )
    yield Hypothesis(
        Kind.DIMS,
        "dims: all of q and k left out of their product, every logit is 0",
        {"dims": dim, "end": "all"},
        alter=dropped(torch.zeros(dim, dtype=torch.bool)),
        rank=1,
    )
    yield from _value_dims(problem)


def _value_dims(problem: Problem) -> Iterator[Hypothesis]:
    dim = problem.dim_v

    def moved(index: Tensor) -> Callable[..., Solution]:
        return lambda view, solution, rows: Solution(solution.out[..., index], solution.lse)

    def kept(keep: Tensor) -> Callable[..., Solution]:
        return lambda view, solution, rows: Solution(solution.out * keep, solution.lse)

    order = torch.arange(dim)
    steps = [n for n in (1, 2, 4, 8, 16) if 2 * n < dim]
    choices = {f"dims: values come out {n} dims late": order.roll(n) for n in steps}
    choices |= {f"dims: values come out {n} dims early": order.roll(-n) for n in steps}
    for detail, index in choices.items():
        yield Hypothesis(Kind.DIMS, detail, {"order": detail}, after=moved(index), rank=2)
    for count in sorted({1, 8, 16, 32, 64, dim // 2} - {0}):
        if count < dim:
            yield Hypothesis(
                Kind.DIMS,
                f"dims: the last {count} dims of the output are 0",
                {"dims": count},
                after=kept((order < dim - count).double()),
                rank=3,
            )
