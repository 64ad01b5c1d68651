"""Each neighbour of a convention or input that diagnosis knows is planted once, and named first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.diagnose import Kind, Surroundings
from oracle.problem import Problem
from suites.oracle.diagnose.calls import normal, problem, returned, said, solved_instead

SINKS = torch.tensor([1.5, 0.5, 2.0, -1.0])
HEADS = torch.tensor([[0.5, 1.75]])
TOKENS = torch.tensor([0.5, 1.75, 1.0]).repeat(20).unsqueeze(1).double()
"""A descale of each of 60 keys."""
PAGES = torch.tensor([0.5, 1.75, 1.0, 3.0, 0.25, 1.25]).repeat_interleave(10).unsqueeze(1).double()
"""A descale of each of 6 pages of 10 keys."""


@pytest.mark.parametrize("step", [-2, -1, 1, 2])
def test_windows_a_key_or_two_off(step: int) -> None:
    found = solved_instead(problem(window=20), window=20 + step)
    assert (found.kind, found.parameters["keys"]) == (Kind.WINDOW, 20 + step), found


@pytest.mark.parametrize("keys", [2, 3])
def test_of_windows_that_see_the_same_the_nearest_is_named(keys: int) -> None:
    found = solved_instead(problem(keys=keys, queries=1, window=keys - 1), window=keys)
    assert (found.kind, found.parameters["keys"]) == (Kind.WINDOW, keys), found
    assert None in [other.parameters.get("keys", 0) for other in found.runners_up]


def test_no_window_goes_before_a_far_one_that_happens_to_see_all() -> None:
    found = solved_instead(problem(queries=1, window=20), window=None)
    assert found.parameters["keys"] is None
    assert [other.parameters["keys"] for other in found.runners_up] == [60]


@pytest.mark.parametrize(
    ("shift", "parameters"),
    [
        ("top left", {"alignment": "top_left"}),
        ("ahead", {"shift": 1}),
        ("behind", {"shift": -1}),
    ],
)
def test_causal_alignment(shift: str, parameters: dict[str, object]) -> None:
    asked = problem(keys=60, queries=8, q=normal(1, 8, 4, 16))
    rows = []
    for i in range(8):
        seen = {"top left": i + 1, "ahead": min(60, 54 + i), "behind": 52 + i}[shift]
        own = asked.subset(torch.arange(60) < seen)
        rows.append(returned(replace(own, q=asked.q[i : i + 1], q_lens=(1,), causal=False)))
    out, lse = (torch.cat([row[j] for row in rows]) for j in (0, 1))
    found = said(asked, out, lse)
    assert found.kind is Kind.CAUSAL, found
    assert found.parameters == parameters


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_sink_in_every_part_or_rank(ranks: int) -> None:
    found = solved_instead(problem(sinks=SINKS), sinks=SINKS.double() + math.log(ranks))
    assert (found.kind, found.parameters["times"]) == (Kind.SINK, ranks), found


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: None, "left out"),
        (lambda x: x * x, "applied twice"),
        (lambda x: x.flip(1), "head"),
    ],
)
def test_descales(name: str, change: Callable[[Tensor], Tensor | None], words: str) -> None:
    field = f"{name}_descale"
    found = solved_instead(problem(**{field: HEADS}), **{field: change(HEADS)})
    assert (found.kind, words in found.detail) == (Kind(field), True), found


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(
    ("given", "change", "words"),
    [
        (TOKENS, lambda x: x.roll(-1, 0), "next token"),
        (TOKENS, lambda x: x[:1].expand(x.shape).contiguous(), "first token for all"),
        (PAGES, lambda x: x.roll(-10, 0), "next page"),
        (TOKENS, lambda x: x[:10].repeat(6, 1), "first page for all"),
        (PAGES, lambda x: None, "left out"),
    ],
)
def test_descales_of_tokens_and_pages(
    name: str, given: Tensor, change: Callable[[Tensor], Tensor | None], words: str
) -> None:
    field = f"{name}_descale"
    asked = problem(**{field: given})
    wrong = replace(asked, **{field: change(given)})  # type: ignore[arg-type]
    found = said(asked, *returned(wrong), around=Surroundings(page_size=10))
    assert (found.kind, words in found.detail) == (Kind(field), True), found


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("written", ["fn", "fnuz"])
def test_fp8_flavours(dtype: torch.dtype, written: str) -> None:
    twin = torch.float8_e4m3fnuz if dtype is torch.float8_e4m3fn else torch.float8_e5m2fnuz
    k, v = normal(2, 60, 2, 16, dtype=dtype), normal(3, 60, 2, 16, dtype=dtype)
    if written == "fnuz":
        k, v, dtype, twin = k.view(twin), v.view(twin), twin, dtype
    found = solved_instead(problem(k=k, v=v), k=k.view(twin), v=v.view(twin))
    assert found.kind is Kind.FP8_FLAVOUR, found
    assert found.parameters["operands"] == ["k", "v"]


def latent() -> Problem:
    """One latent head: V is a part of K, as in multi-head latent attention."""
    k = normal(2, 60, 1, 24)
    return problem(q=normal(1, 3, 4, 24), k=k, v=k[..., :16])


def test_a_latent_key_that_is_missing() -> None:
    asked = latent()
    found = said(asked, *returned(asked.subset(torch.arange(60) != 23)))
    assert (found.kind, found.parameters["key"]) == (Kind.MISSING_KEY, 23), found


def test_a_latent_key_that_is_stale() -> None:
    asked = latent()
    k = asked.k.clone()
    k[31] = normal(9, 1, 24)
    found = said(asked, *returned(replace(asked, k=k, v=k[..., :16])))
    assert (found.kind, found.parameters["key"]) == (Kind.STALE_KEY, 31), found


def test_a_latent_page_read_in_place_of_another() -> None:
    asked = latent()
    index = torch.arange(60)
    index[8:16] = torch.arange(32, 40)
    k = asked.k[index]
    found = said(asked, *returned(replace(asked, k=k, v=k[..., :16])), around=Surroundings(page_size=8))
    assert (found.kind, found.parameters["page"], found.parameters["read"]) == (Kind.PAGE, 1, 4), found
