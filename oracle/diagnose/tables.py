"""Hypotheses about the page table: not used, an entry off, or the row of another request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import torch

from oracle.diagnose.hypothesis import Hypothesis
from oracle.diagnose.model import Kind
from oracle.diagnose.scene import Scene
from oracle.problem import Problem

Table = tuple[tuple[int, ...], ...]
"""Physical page of each page of each request."""


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """All of them whose pages lie in the pool; none depends on what was returned."""
    asked, pool = scene.around.pages, scene.around.pool_k
    if asked is None or pool is None or scene.around.pool_v is None or scene.subject.problem.kv_positions is not None:
        return
    if pool.dtype != scene.subject.problem.k.dtype:
        return
    for rank, (what, table) in enumerate(_tables(asked).items()):
        if table != asked and all(0 <= page < pool.shape[0] for own in table for page in own):
            yield Hypothesis(Kind.PAGE, f"page: {what}", {"table": what}, alter=_through(scene, table), rank=3 + rank)


def _tables(asked: Table) -> dict[str, Table]:
    others = {step: asked[step:] + asked[:step] for step in (1, -1)}
    tables = {
        "the table is not used, a request's page i is page i of the pool": tuple(tuple(range(len(x))) for x in asked)
    }
    for step, which in ((1, "next"), (-1, "previous")):
        moved = others[step]
        if all(len(own) <= len(other) for own, other in zip(asked, moved, strict=True)):
            tables[f"requests read the table's row of the {which} request"] = tuple(
                other[: len(own)] for own, other in zip(asked, moved, strict=True)
            )
    tables["the first page is skipped, page i is read from entry i + 1 of the table"] = tuple(
        (*own[1:], own[-1]) if own else own for own in asked
    )
    tables["the first page is read twice, page i is read from entry i - 1 of the table"] = tuple(
        (own[0], *own[:-1]) if own else own for own in asked
    )
    return tables


def _through(scene: Scene, table: Table) -> Callable[[Problem], Problem]:
    """The problem whose keys and values lie where another table says."""
    pools = {"k": scene.around.pool_k, "v": scene.around.pool_v}

    @cache
    def read(name: str) -> torch.Tensor:
        pool = pools[name]
        assert pool is not None
        parts = []
        for own, count in zip(table, scene.subject.problem.kv_lens, strict=True):
            parts.append(pool[torch.tensor(own, dtype=torch.int64)].flatten(0, 1)[:count])
        return torch.cat(parts)

    return lambda p: replace(p, k=read("k"), v=read("v"))
