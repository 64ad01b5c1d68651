"""The search: hypotheses are tried on one failing row, then on some rows, then on all of them.

A hypothesis explains a result if every element of it, failing or not, is within the budget of what the hypothesis
says, or if that holds of the failing rows while the others are as they were asked to be. Of the hypotheses that
explain, those whose likelihood is nearly the best are equal, and the smallest change among them is named: one without
fitted numbers, else the first in the order of `Kind`. What explains as well is a runner-up. Where errors are only a few
times the budget and what explains them does so of some rows alone, and not well, a rounding that the precision does not
name goes first, if its budget allows all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oracle.budget.bound import CONFIDENCE
from oracle.convention import Convention
from oracle.diagnose import conventions, decoding, fitted, keys, narrow, parts, places, tables
from oracle.diagnose.hypothesis import Hypothesis
from oracle.diagnose.model import Diagnosis, Kind, Surroundings
from oracle.diagnose.rows import describe_rows, request_of
from oracle.diagnose.scene import Scene
from oracle.diagnose.subject import Answer, Fit, Subject
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.rounding import widen

PANEL = 8
"""Queries on which hypotheses are compared."""
VERIFIED = 64
"""Queries on which the diagnosis is verified: failing ones first."""
DECISIVE = 14.0
"""Difference of twice the log-likelihood above which one hypothesis is better than another by evidence."""
VERIFICATIONS = 8
"""Hypotheses that are solved with budgets of their own."""
RUNNERS_UP = 3
_WORK = 1 << 21


def diagnose(
    problem: Problem,
    out: Tensor,
    lse: Tensor | None,
    *,
    precision: Precision | None = None,
    input_dtype: str,
    convention: Convention | None = None,
    around: Surroundings | None = None,
    confidence: float = CONFIDENCE,
) -> Diagnosis:
    """Say which change of convention or input makes the oracle reproduce what a target returned for `problem`.

    out [Tq, Hq, D_v] in its dtype; lse [Tq, Hq], tokens first, in the convention's base, or None. confidence: of the
    probable budget, by which rows fail. Works on the CPU. The same arguments give the same diagnosis: what is looked at
    is limited by counts, never by time.
    """
    subject = Subject(
        problem=problem.to(torch.device("cpu")),
        out=out.to("cpu"),
        lse=None if lse is None else lse.to("cpu"),
        precision=precision or Precision(),
        input_dtype=input_dtype,
        convention=convention or Convention(source="the caller said nothing"),
        confidence=confidence,
    )
    return _Search.of(subject, around or Surroundings()).run()


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A hypothesis that may explain, and how well it fits the panel. everywhere: said of rows that pass as well."""

    hypothesis: Hypothesis
    everywhere: bool
    misfit: float

    @property
    def order(self) -> tuple[bool, int, bool, int]:
        """Where nothing is fitted goes first, then by kind, then what is said of all rows, then by rank."""
        h = self.hypothesis
        return (h.fitted > 0, h.kind.size, not self.everywhere, h.rank)


@dataclass(frozen=True, eq=False)
class _Search:
    scene: Scene
    screen: tuple[int, int]
    """token and kv head of the rows looked at first"""
    panel: tuple[int, ...]
    own: dict[tuple[tuple[int, ...], int | None], Fit] = field(default_factory=dict)
    """fits of some rows to what was asked for"""
    weak: list[Hypothesis] = field(default_factory=list)
    """those that agree with what failed, which is too little to tell"""

    @staticmethod
    def of(subject: Subject, around: Surroundings) -> _Search:
        base = subject.answer(subject.problem)
        fit = subject.fit(base)
        scene = Scene(subject, around, base, fit)
        failing = scene.failing
        if not bool(failing.any()):
            return _Search(scene, (0, 0), ())
        ratio = fit.ratio.masked_fill(~failing, -1.0)
        token, head = divmod(int(ratio.flatten().argmax()), failing.shape[1])
        most = _affordable(subject.problem, PANEL)
        return _Search(scene, (token, head // subject.problem.group), _panel(failing, token, most))

    def run(self) -> Diagnosis:
        fit = self.scene.fit
        worst = float(fit.ratio.max()) if fit.ratio.numel() else 0.0
        if not bool(self.scene.failing.any()):
            return Diagnosis(Kind.NONE, "none needed: every element is within its budget", ratio=worst)
        explained = self._explained(self._hypotheses()) or self._explained(decoding.hypotheses(self.scene, self.panel))
        if worst <= _FEW and (not explained or self._by_chance(explained[0])):
            explained = [*self._allowed(), *explained[:RUNNERS_UP]]
        if not explained:
            return Diagnosis(Kind.UNEXPLAINED, self._unexplained(), ratio=worst)
        return replace(explained[0], runners_up=tuple(explained[1:]))

    @staticmethod
    def _by_chance(found: Diagnosis) -> bool:
        """Whether what explains a fault of a few times the budget may do so by chance: to few rows something fits."""
        return not found.everywhere and (found.fitted > 0 or found.ratio > _NOISE)

    def _allowed(self) -> list[Diagnosis]:
        """The first narrower precision by whose budget every row is right, if errors are of the size that it allows."""
        subject = self.scene.subject
        for allowance in narrow.allowances(subject):
            wider = replace(subject, precision=allowance.precision)
            fit = wider.fit(wider.answer(subject.problem))
            ratio = float(fit.ratio.max())
            if bool(fit.passes.all()) and ratio > _IDLE:
                found = {"stage": allowance.stage, "dtype": allowance.dtype, "by": "budget"}
                return [Diagnosis(Kind.PRECISION, allowance.detail, found, ratio)]
        return []

    def _explained(self, hypotheses: Iterable[Hypothesis]) -> list[Diagnosis]:
        """What explains every row that is looked at, the best first."""
        near, far = self._sifted(hypotheses)
        return self._best(near) or self._best(far)

    def _sifted(self, hypotheses: Iterable[Hypothesis]) -> tuple[list[Hypothesis], list[Hypothesis]]:
        """Hypotheses that the rows looked at first leave possible: those that fit about as well as any, and others.

        The others are tried only if none of the first explains: they could not be named beside one that does.
        """
        near: list[Hypothesis] = []
        far: list[Hypothesis] = []
        token, kv_head = self.screen
        failing = self.scene.failing[token : token + 1, self.scene.heads(kv_head)]
        screened = []
        for h in hypotheses:
            if h.given or h.whole:
                near.append(h)
                continue
            fit = self._screened(h, (token,), kv_head)
            if fit is not None:
                screened.append((h, sum(fit.at(failing).misfit(self.scene.subject.problem.dim_v))))
        limit = min((m for _, m in screened), default=0.0) + _FAR
        for h, misfit in screened:
            (near if misfit <= limit else far).append(h)
        return near, far

    def _best(self, hypotheses: Iterable[Hypothesis]) -> list[Diagnosis]:
        ranked = _ranked(c for h in hypotheses if (c := self._try(h)) is not None)
        explained: list[Diagnosis] = []
        for candidate in ranked[:VERIFICATIONS]:
            if explained and candidate.misfit > explained[0].misfit + DECISIVE:
                continue
            found = self._verified(candidate)
            # One change proposed twice is one hypothesis.
            if found is not None and all(found.detail != other.detail for other in explained):
                explained.append(found)
            if len(explained) > RUNNERS_UP:
                break
        return explained

    def _hypotheses(self) -> Iterator[Hypothesis]:
        subject = self.scene.subject
        yield from conventions.hypotheses(subject.problem, subject.convention, self.scene.around)
        yield from places.hypotheses(self.scene, self.panel)
        yield from tables.hypotheses(self.scene)
        yield from parts.hypotheses(self.scene)
        yield from fitted.hypotheses(self.scene, self.screen, self.panel)
        yield from keys.hypotheses(self.scene, self.panel)
        yield from narrow.hypotheses(self.scene)

    def _try(self, hypothesis: Hypothesis) -> _Candidate | None:
        """Judge on the panel, without bounds of its own."""
        if hypothesis.given:
            return _Candidate(hypothesis, False, -math.inf)
        fit = self._screened(hypothesis, self.panel, None)
        if fit is None:
            return None
        failing = self.scene.failing[torch.tensor(self.panel)]
        own = self._own(self.panel, None)
        only_failing = fit.where(failing, own)
        # That a row is not a number, or may be any, says little: the others have to agree.
        if bool(fit.undefined[failing].all()):
            return None
        alone = not bool(fit.undefined[failing].any()) and self._may_be_partial(hypothesis)
        everywhere = (True, False) if alone else (True,)
        fits = {True: fit, False: only_failing}
        choices = [(scope, self._misfit(hypothesis, fits[scope], own, failing)) for scope in everywhere]
        possible = [(scope, m) for scope, m in choices if m is not None]
        if not possible:
            if not hypothesis.fitted and bool(fit.passes[failing].all()):
                self.weak.append(hypothesis)
            return None
        least = min(m for _, m in possible)
        scope, misfit = next((e, m) for e, m in possible if m <= least + DECISIVE)
        return _Candidate(hypothesis, scope, misfit)

    def _may_be_partial(self, hypothesis: Hypothesis) -> bool:
        """Whether it may be said of the failing rows alone: what kv heads share, if they fail as a whole."""
        if not hypothesis.uniform:
            return True
        heads = self.scene.failing.any(0).view(self.scene.subject.problem.kv_heads, -1)
        return bool((heads.any(1) == heads.all(1)).all())

    def _misfit(self, hypothesis: Hypothesis, fit: Fit, own: Fit, failing: Tensor) -> float | None:
        """How badly it fits; None if it is not clearly better than what was asked for (`own`).

        Each fitted number costs what Schwarz's criterion says, and has to explain several elements that were wrong. A
        log-sum-exp that is explained by construction is no evidence: then the outputs alone have to show it.
        """
        dims = self.scene.subject.problem.dim_v
        improved = failing | (own.out_square - fit.out_square > _IMPROVED)
        if hypothesis.fitted * _ELEMENTS > int(improved.sum()) * dims:
            return None
        # A whole value that was fitted can be so large that its own budget allows anything: noise has to be left.
        if hypothesis.fitted >= dims and float(fit.out_square[improved].mean()) > dims:
            return None
        (out, lse), (own_out, own_lse) = fit.misfit(dims), own.misfit(dims)
        price = hypothesis.fitted * math.log(max(2, fit.out_square.numel() * dims))
        gain = own_out - out + (0.0 if hypothesis.lse_fitted else own_lse - lse) - price
        return out + lse + price if gain > DECISIVE else None

    def _own(self, tokens: tuple[int, ...], kv_head: int | None) -> Fit:
        """How what was asked for fits some rows."""
        scene = self.scene
        if (tokens, kv_head) not in self.own:
            self.own[tokens, kv_head] = scene.subject.fit(scene.part(tokens, kv_head), tokens, scene.heads(kv_head))
        return self.own[tokens, kv_head]

    def _screened(self, hypothesis: Hypothesis, tokens: tuple[int, ...], kv_head: int | None) -> Fit | None:
        """The fit of some rows by the budget of the problem as posed; None if failing rows are far off or no better."""
        scene, heads = self.scene, self.scene.heads(kv_head)
        failing = scene.failing[torch.tensor(tokens)][:, heads]
        solution = hypothesis.quick(scene.subject, scene.quick, tokens, kv_head)
        bounds = scene.part(tokens, kv_head).bounds
        if hypothesis.bounded is not None and kv_head is None:
            bounds = hypothesis.bounded(bounds, describe_rows(scene.subject.problem, tokens))
        answer = Answer(solution, bounds)
        # Rows without a key as the problem is posed have no budget: if they are given keys, they need one of their own.
        if bool(((bounds.keys == 0).unsqueeze(-1) & (solution.lse > -math.inf) & failing).any()):
            answer = hypothesis.answer(scene.subject, tokens, kv_head, scene.part(tokens, kv_head))
        fit = scene.subject.fit(answer, tokens, heads)
        own = self._own(tokens, kv_head)
        # Errors that were very large may leave large ones, since budgets grow with what is summed.
        if bool((fit.ratio > (own.ratio * _REST).clamp(min=_SCREEN))[failing].any()):
            return None
        dims = scene.subject.problem.dim_v
        better = sum(fit.at(failing).misfit(dims)) < sum(own.at(failing).misfit(dims))
        return fit if better else None

    def _verified(self, candidate: _Candidate) -> Diagnosis | None:
        """The diagnosis, if the hypothesis holds within budgets of its own of every row that is looked at."""
        hypothesis, everywhere = candidate.hypothesis, candidate.everywhere
        if not hypothesis.given and not hypothesis.whole and not self._holds_of_screen(hypothesis):
            return None
        ratio = 0.0
        tokens = _panel(self.scene.failing, self.screen[0], _affordable(self.scene.subject.problem, VERIFIED))
        for chunk in () if hypothesis.given else _chunks(tokens, _affordable(self.scene.subject.problem, PANEL)):
            answer = hypothesis.answer(self.scene.subject, chunk, None, self.scene.part(chunk))
            fit = self.scene.subject.fit(answer, chunk)
            failing = self.scene.failing[torch.tensor(chunk)]
            if not bool(fit.passes[failing].all()):
                return None
            everywhere = everywhere and bool(fit.passes.all())
            if not everywhere and (bool(fit.undefined[failing].any()) or not self._may_be_partial(hypothesis)):
                return None
            # A chunk may have no row that passes: those that failed for another reason are not explained here.
            ratio = max([ratio, *fit.ratio[fit.passes].tolist()])
        where = "" if everywhere else self._where()
        detail = f"{hypothesis.detail}, {where}" if where.startswith("only") else hypothesis.detail
        return Diagnosis(
            hypothesis.kind,
            detail,
            hypothesis.parameters,
            ratio,
            candidate.misfit,
            everywhere=everywhere,
            fitted=hypothesis.fitted,
        )

    def _holds_of_screen(self, hypothesis: Hypothesis) -> bool:
        """Whether it holds within budgets of its own of the rows that were looked at first."""
        (token, kv_head), subject = self.screen, self.scene.subject
        heads = self.scene.heads(kv_head)
        answer = hypothesis.answer(subject, (token,), kv_head, self.scene.part((token,), kv_head))
        fit = subject.fit(answer, (token,), heads)
        return bool(fit.passes[self.scene.failing[token : token + 1, heads]].all())

    def _unexplained(self) -> str:
        """What is not explained and where, or what would explain it if more were wrong."""
        what, where = self._what(), self._where().removeprefix("only ")
        if not self.weak:
            return f"no hypothesis explains {what} {where}"
        first = min(self.weak, key=lambda h: (h.kind.size, h.rank))
        others = f", or {len(self.weak) - 1} others" if len(self.weak) > 1 else ""
        return f"too little is wrong to tell what explains {what} {where}; it could be {first.detail}{others}"

    def _what(self) -> str:
        """What the failing rows hold, in words."""
        out = widen(self.scene.subject.out)[self.scene.failing]
        return "what is" if bool(out.isfinite().all()) else "the NaN" if bool(out.isnan().any()) else "the infinities"

    def _where(self) -> str:
        """The failing rows in words."""
        problem, failing = self.scene.subject.problem, self.scene.failing
        tokens, heads = (failing.any(d).nonzero().flatten().tolist() for d in (1, 0))
        requests = sorted({request_of(problem, t) for t in tokens})
        words = []
        if len(requests) < problem.requests:
            words.append(_listed("request", requests))
        if len(tokens) < sum(problem.q_lens[r] for r in requests):
            words.append(_listed("token", tokens))
        if len(heads) < problem.q_heads:
            words.append(_listed("head", heads))
        if not words:
            return "in all rows" if bool(failing.all()) else "only in some rows"
        return f"only in {', '.join(words)}"


_FAR = 10 * DECISIVE
"""How much worse than the best a hypothesis may fit the rows that are looked at first, to be tried beside it."""
_SCREEN = 512.0
"""How far beyond the budget of the problem as posed a hypothesis may be before its own budget is worked out."""
_IMPROVED = 9.0
"""Decrease of a row's sum of squares, in variances, that counts as an improvement."""
_ELEMENTS = 3
"""Elements in rows that were wrong that it takes for each fitted number."""
_REST = 2.0**-4
"""Or how much of the error it may leave."""


_FEW = 4.0
"""Times the budget: what a rounding that the precision does not name may come to."""
_NOISE = 0.5
"""Of a budget: what an explanation that is true seldom leaves of it."""
_IDLE = 0.1
"""Of a budget: errors that reach no more than this of it are not those that it is for."""


def _listed(what: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{', ...' if len(numbers) > 4 else ''}"


def _panel(failing: Tensor, worst: int, most: int) -> tuple[int, ...]:
    """At most `most` queries, ascending: the worst, others that fail, and for a quarter of them some that pass."""
    fails = failing.any(1)
    bad, good = fails.nonzero().flatten().tolist(), (~fails).nonzero().flatten().tolist()
    good = _spread(good, max(most // 4, most - len(bad)))
    bad = _spread([t for t in bad if t != worst], most - 1 - len(good))
    return tuple(sorted({worst, *bad, *good}))


def _spread(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, evenly spaced, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[:most])
    return [values[i * (len(values) - 1) // (most - 1)] for i in range(most)]


def _affordable(problem: Problem, most: int) -> int:
    """How many queries to look at: fewer where each has very many keys."""
    return max(2, min(most, _WORK // max(1, max(problem.kv_lens, default=1) * problem.kv_heads)))


def _chunks(tokens: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    return (tuple(tokens[i : i + most]) for i in range(0, len(tokens), most))


def _ranked(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """Those that fit about as well as the best, the smallest change first; then the others, by how well they fit."""
    found = list(candidates)
    best = min((c.misfit for c in found), default=0.0)
    near = [c for c in found if c.misfit <= best + DECISIVE]
    rest = [c for c in found if c.misfit > best + DECISIVE]
    return sorted(near, key=lambda c: c.order) + sorted(rest, key=lambda c: c.misfit)
