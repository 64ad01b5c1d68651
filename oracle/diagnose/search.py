"""The search: hypotheses are tried on one failing row, then on some rows, then on all of them.

A hypothesis explains a result if every element of it, failing or not, is within the budget of what the hypothesis
says, or if that holds of the failing rows while the others are as they were asked to be. Of the hypotheses that
explain, those whose likelihood is nearly the best are equal, and the smallest change among them is named, in the order
of `Kind`. What is not better than another by evidence is a runner-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.convention import Convention
from oracle.diagnose import conventions, fitted, keys, parts, places
from oracle.diagnose.hypothesis import Hypothesis
from oracle.diagnose.model import Diagnosis, Kind, Surroundings
from oracle.diagnose.rows import request_of
from oracle.diagnose.scene import Scene
from oracle.diagnose.subject import Answer, Fit, Subject
from oracle.precision import Precision
from oracle.problem import Problem

PANEL = 8
"""Queries on which hypotheses are compared."""
VERIFIED = 256
"""Queries on which the diagnosis is verified: failing ones first."""
DECISIVE = 14.0
"""Difference of twice the log-likelihood above which one hypothesis is better than another by evidence."""
RUNNERS_UP = 5


def diagnose(
    problem: Problem,
    out: Tensor,
    lse: Tensor | None,
    *,
    precision: Precision | None = None,
    input_dtype: str,
    convention: Convention | None = None,
    around: Surroundings | None = None,
) -> Diagnosis:
    """Say which change of convention or input makes the oracle reproduce what a target returned for `problem`.

    out [Tq, Hq, D_v] in its dtype; lse [Tq, Hq], tokens first, in the convention's base, or None. Works on the CPU. The
    same arguments give the same diagnosis: nothing depends on time.
    """
    subject = Subject(
        problem=problem.to(torch.device("cpu")),
        out=out.to("cpu"),
        lse=None if lse is None else lse.to("cpu"),
        precision=precision or Precision(),
        input_dtype=input_dtype,
        convention=convention or Convention(source="the caller said nothing"),
    )
    return _Search.of(subject, around or Surroundings()).run()


@dataclass(frozen=True, eq=False)
class _Explained:
    """A hypothesis that explains some rows, and how well. everywhere: it also holds of the rows that pass."""

    hypothesis: Hypothesis
    everywhere: bool
    misfit: float
    ratio: float

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.hypothesis.kind.size, 0 if self.everywhere else 1, self.hypothesis.rank)


@dataclass(frozen=True, eq=False)
class _Search:
    scene: Scene
    screen: tuple[int, int]
    """token and kv head of the row looked at first"""
    panel: tuple[int, ...]

    @staticmethod
    def of(subject: Subject, around: Surroundings) -> _Search:
        base = subject.answer(subject.problem)
        fit = subject.fit(base)
        scene = Scene(subject, around, base, fit)
        failing = scene.failing
        if not bool(failing.any()):
            return _Search(scene, (0, 0), ())
        ratio = fit.ratio.masked_fill(~failing, -1.0)
        flat = int(ratio.flatten().argmax())
        token, head = divmod(flat, failing.shape[1])
        return _Search(scene, (token, head // subject.problem.group), _panel(failing, token, PANEL))

    def run(self) -> Diagnosis:
        fit = self.scene.fit
        worst = float(fit.ratio.max()) if fit.ratio.numel() else 0.0
        if not bool(self.scene.failing.any()):
            return Diagnosis(Kind.NONE, "none needed: every element is within its budget", ratio=worst)
        explained = [e for h in self._candidates() if (e := self._try(h)) is not None]
        ranked = _ranked(explained)
        for place, best in enumerate(ranked):
            if self._holds(best):
                others = tuple(self._diagnosis(e) for e in ranked[place + 1 : place + 1 + RUNNERS_UP])
                return replace(self._diagnosis(best), runners_up=others)
        return Diagnosis(Kind.UNEXPLAINED, "no hypothesis explains it", ratio=worst)

    def _candidates(self) -> Iterator[Hypothesis]:
        subject = self.scene.subject
        yield from conventions.hypotheses(subject.problem, subject.convention, self.scene.around)
        yield from places.hypotheses(self.scene, self.panel)
        yield from parts.hypotheses(self.scene)
        yield from fitted.hypotheses(self.scene, self.screen, self.panel)
        yield from keys.hypotheses(self.scene, self.panel)

    def _try(self, hypothesis: Hypothesis) -> _Explained | None:
        """Screen on one row, then judge on the panel."""
        token, kv_head = self.screen
        if hypothesis.given:
            return _Explained(hypothesis, False, -math.inf, math.nan)
        if not hypothesis.whole and not self._screened(hypothesis, token, kv_head):
            return None
        fit = self._fit(hypothesis, self.panel)
        index = torch.tensor(self.panel)
        failing = self.scene.failing[index]
        if not bool(fit.passes[failing].all()):
            return None
        everywhere = bool(fit.passes.all())
        if not everywhere:
            own = self.scene.subject.fit(self.scene.part(self.panel), self.panel)
            fit = fit.where(failing, own)
        misfit = self._misfit(hypothesis, fit)
        return None if misfit is None else _Explained(hypothesis, everywhere, misfit, float(fit.ratio.max()))

    def _misfit(self, hypothesis: Hypothesis, fit: Fit) -> float | None:
        """How badly it fits; None if it is not clearly better than what was asked for.

        Each fitted number costs what Schwarz's criterion says. A log-sum-exp that is explained by construction is no
        evidence: then the outputs alone have to show it.
        """
        dims = self.scene.subject.problem.dim_v
        out, lse = fit.misfit(dims)
        own = self.scene.subject.fit(self.scene.part(self.panel), self.panel)
        own_out, own_lse = own.misfit(dims)
        price = hypothesis.fitted * math.log(max(2, fit.out_square.numel() * dims))
        gain = own_out - out + (0.0 if hypothesis.lse_fitted else own_lse - lse) - price
        if not gain > DECISIVE:
            return None
        return out + lse + price

    def _fit(self, hypothesis: Hypothesis, tokens: Sequence[int]) -> Fit:
        subject = self.scene.subject
        return subject.fit(hypothesis.answer(subject, tokens), tokens)

    def _screened(self, hypothesis: Hypothesis, token: int, kv_head: int) -> bool:
        """Whether the failing rows of one query and kv head come within budget, at first within a wide one."""
        scene, subject = self.scene, self.scene.subject
        heads = scene.heads(kv_head)
        failing = scene.failing[token : token + 1, heads]
        posed = hypothesis.rows(subject.problem, (token,), kv_head)
        solution = hypothesis.solution(subject, posed, (token,), kv_head)
        base = scene.part((token,), kv_head)
        wide = subject.fit(Answer(solution, base.bounds), (token,), heads)
        if bool((wide.ratio[failing] > _SCREEN).any()):
            return False
        fit = subject.fit(Answer(solution, hypothesis.bounds(subject, posed, (token,))), (token,), heads)
        return bool(fit.passes[failing].all())

    def _holds(self, explained: _Explained) -> bool:
        """Whether the hypothesis explains every row, of which at most VERIFIED are looked at."""
        failing = self.scene.failing
        if explained.hypothesis.given:
            return True
        tokens = _panel(failing, self.screen[0], VERIFIED)
        if set(tokens) <= set(self.panel):
            return True
        fit = self._fit(explained.hypothesis, tokens)
        fails = failing[torch.tensor(tokens)]
        return bool(fit.passes.all() if explained.everywhere else fit.passes[fails].all())

    def _diagnosis(self, explained: _Explained) -> Diagnosis:
        h = explained.hypothesis
        detail = h.detail if explained.everywhere else f"{h.detail}, {self._where()}"
        return Diagnosis(h.kind, detail, h.parameters, explained.ratio, explained.misfit)

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
        return f"only in {', '.join(words)}" if words else "only in some rows"


_SCREEN = 64.0
"""How far beyond the budget of the problem as posed a hypothesis may be before its own budget is worked out."""


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


def _ranked(explained: Iterable[_Explained]) -> list[_Explained]:
    """Those that fit about as well as the best, the smallest change first; then the others, by how well they fit."""
    found = list(explained)
    if not found:
        return []
    best = min(e.misfit for e in found)
    near = [e for e in found if e.misfit <= best + DECISIVE or not math.isfinite(best)]
    rest = [e for e in found if e.misfit > best + DECISIVE and math.isfinite(best)]
    return sorted(near, key=lambda e: e.order) + sorted(rest, key=lambda e: e.misfit)
