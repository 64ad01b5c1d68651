"""Our own Triton kernels as targets: right on planned cases, and seen to be wrong where they are made so."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz import registry
from fuzz.case import Case
from fuzz.check.result import CaseResult, Check
from fuzz.check.run import check_case
from fuzz.plan import Plan
from fuzz.space import Space
from oracle.convention import Granularity
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz.cases import extend_case
from suites.targets import aiter_prefill
from suites.targets.portable import targets
from suites.targets.portable.attention import Keys, attention

TARGETS = {d.name: d for module in (targets, aiter_prefill) for d in registry.declared_in(module)}
TARGETS = {name: d for name, d in TARGETS.items() if name.startswith("portable.")}
IN_PAGES = [name for name in TARGETS if name.startswith("portable.aiter.mha_batch_prefill_func.")]
"""One function over one kernel, whose options other targets show: their pages are what is asked about."""


def checked(declaration: Declaration, case: Case) -> CaseResult:
    engines.start(Engine.EMULATOR)
    return check_case(declaration, case, Engine.EMULATOR, lambda _: None)


def planned(declaration: Declaration, count: int, seed: int = 0) -> list[Case]:
    return list(islice(Plan(Space(declaration), seed), count))


def test_the_portable_kernels_can_be_read_in_one_sitting() -> None:
    folder = Path(targets.__file__).parent
    assert (
        sum(len((folder / f"{name}.py").read_text().splitlines()) for name in ("attention", "kernels", "merge")) < 500
    )


@pytest.mark.parametrize("name", TARGETS)
def test_planned_cases_pass(name: str) -> None:
    for case in planned(TARGETS[name], 4 if name in IN_PAGES else 12):
        result = checked(TARGETS[name], case)
        assert result.verdict is Verdict.PASS, (case, result.failures)
        assert result.vacuous_elements == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_hundreds_of_planned_cases_pass(name: str) -> None:
    for case in planned(TARGETS[name], 300, seed=1):
        result = checked(TARGETS[name], case)
        assert result.verdict is Verdict.PASS, (case, result.failures)


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("scale", lambda scale: (scale or 0.1) * 1.01),
        ("window", lambda window: (window[0] + 1, window[1]) if isinstance(window, tuple) else window + 1),
        ("sinks", lambda sinks: None),
        ("soft_cap", lambda cap: None),
        ("k_descale", lambda factors: factors * 1.02),
        ("v_descale", lambda factors: factors.flip(0)),
    ],
)
@pytest.mark.parametrize("name", [name for name in TARGETS if name not in IN_PAGES])
def test_a_wrong_option_is_a_wrong_value(name: str, option: str, wrong: Any) -> None:
    right = TARGETS[name].function

    def faulty(*tensors: Tensor, **options: Any) -> Any:
        return right(*tensors, **{**options, option: wrong(options[option])})

    asked = {
        "scale": lambda case: True,
        "window": lambda case: case.window is not None and max(case.context_lens, default=0) > case.window + 4,
        "sinks": lambda case: case.sinks in ("normal", "dominant"),
        "soft_cap": lambda case: case.soft_cap is not None,
        # A single visible key, and logits that are all capped, have the same weights whatever their descale.
        "k_descale": lambda case: case.k_descale != "none" and case.window != 1 and case.soft_cap != 0.01,
        "v_descale": lambda case: case.v_descale == "head" and case.num_kv_heads > 1,
    }[option]
    descales = TARGETS[name].convention.descales
    if option.endswith("descale") and descales.k is Granularity.NONE:
        pytest.skip("it takes no descales")
    cases = [c for c in planned(TARGETS[name], 200) if asked(c) and 0 < sum(c.query_lens) < 200 and c.probe == "normal"]
    assert cases
    seen = [checked(replace(TARGETS[name], function=faulty), case) for case in cases[:3]]
    assert any(Check.VALUES in {f.check for f in result.failures} for result in seen)


@pytest.mark.parametrize("change", [lambda table: table.flip(1), lambda table: table.roll(1, 0)])
@pytest.mark.parametrize("name", IN_PAGES)
def test_another_page_is_a_wrong_value(name: str, change: Any) -> None:
    right = TARGETS[name].function

    def faulty(page_table: Tensor, **given: Any) -> Any:
        return right(page_table=change(page_table), **given)

    case = extend_case(
        **{"context_lens": [20, 25], "query_lens": [4, 5], "head_dim": 64, "v_head_dim": 64, "group_size": 1},
        **{"dtype": "bf16", "kv_dtype": "bf16", "index_dtype": "int32", "prefix": "all", "index_form": "page_table"},
        kv_layout=TARGETS[name].convention.kv_layout,
    )
    assert checked(TARGETS[name], case).verdict is Verdict.PASS
    assert Check.VALUES in {f.check for f in checked(replace(TARGETS[name], function=faulty), case).failures}


def test_keys_in_two_parts_are_the_keys_in_one() -> None:
    engines.start(Engine.EMULATOR)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(count, 2, 64, generator=generator) for count in (3, 50, 50))
    q_indptr, contexts = torch.tensor([0, 3]), torch.tensor([50])
    slots = torch.arange(50)
    whole = [Keys(k=k, v=v, index=slots, counts=contexts)]
    parts = [
        Keys(k=k, v=v, index=slots, counts=torch.tensor([33])),
        Keys(
            k=k,
            v=v,
            index=slots,
            counts=torch.tensor([17]),
            starts=torch.tensor([33]),
            firsts=torch.tensor([33]),
        ),
    ]
    once, twice = (attention(q, q_indptr, contexts, keys, scale=0.2) for keys in (whole, parts))
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    other = attention(q, q_indptr, contexts, parts[:1], scale=0.2)
    assert not torch.allclose(other[0], once[0], rtol=1e-3)
