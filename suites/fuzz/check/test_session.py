"""A session of steps over one pool: right steps pass, and what only a used or a shared page shows is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz.buffers import DTYPES, Poison, pattern
from fuzz.case import Case
from fuzz.check.result import Check
from fuzz.check.run import check_case
from fuzz.check.session import extender, in_session
from oracle.bits import bits
from oracle.declare import Declaration, declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz.cases import backend_case
from suites.targets.sglang_backend import targets

Step = Callable[..., Tensor]


def serving(**changes: Any) -> Case:
    """The first request has one whole page and a part of another before its new tokens, which begin in that."""
    lengths = {"context_lens": [40, 5], "query_lens": [9, 2], "head_dim": 64, "v_head_dim": 64, "seed": 3}
    return backend_case(**(lengths | {"group_size": 1, "num_kv_heads": 1} | changes))


def declared(function: Step) -> Declaration:
    found = declaration_of(function)
    assert found is not None
    reason = found.unavailable(Engine.EMULATOR)
    if reason is not None:
        pytest.skip(reason)
    engines.start(Engine.EMULATOR)
    return found


def verdicts(declaration: Declaration, case: Case) -> dict[Check, Verdict]:
    result = check_case(declaration, case, Engine.EMULATOR, lambda _: None)
    return {c.check: c.verdict for c in result.checks}


def keeps_what_is_stored(k_cache: Tensor, slots: Tensor, **given: Any) -> Tensor:
    """Writes to no slot that holds a key already."""
    before = k_cache.clone()
    out = targets.extend(k_cache=k_cache, slots=slots, **given)
    empty = [pattern(DTYPES["bf16"], poison) for poison in Poison]
    held = ~torch.isin(bits(before), torch.tensor(empty, dtype=torch.int16))
    k_cache.copy_(torch.where(held, before, k_cache))
    return out


def knows_no_sharing(slots: Tensor, **given: Any) -> Tensor:
    """Takes a slot that two requests list for the first one's alone."""
    first_of = {int(slot): place for place, slot in reversed(list(enumerate(slots)))}
    own = [slot if first_of[int(slot)] == place else torch.zeros_like(slot) for place, slot in enumerate(slots)]
    return targets.extend(slots=torch.stack(own), **given)


@pytest.mark.parametrize(
    ("function", "told"),
    [(keeps_what_is_stored, "after two chunks: "), (knows_no_sharing, "with a prefix in shared pages: ")],
)
def test_what_only_a_used_or_a_shared_page_shows_fails(function: Step, told: str) -> None:
    wrong = replace(declared(targets.extend), function=function)
    result = check_case(wrong, serving(), Engine.EMULATOR, lambda _: None)
    failed = {c.check: c.message for c in result.failures}
    assert failed.keys() == {Check.SESSION}
    assert failed[Check.SESSION].startswith(told)


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (targets.extend, {}),
        (targets.decode, {"query_lens": [1, 1]}),
        *(
            pytest.param(function, changes, marks=pytest.mark.slow)
            for function, changes in (
                (targets.extend, {"window": 20, "slot_map": "full"}),
                (targets.extend, {"query_lens": [40, 5]}),
                (targets.extend, {"strided": True, "pool": "tight", "placement": "ascending"}),
                (targets.decode_fp8, {"query_lens": [1, 1], "kv_dtype": "e4m3fn"}),
                (targets.decode_fp8_gfx942, {"query_lens": [1, 1], "kv_dtype": "e4m3fnuz"}),
            )
        ),
    ],
)
def test_right_steps_hold_over_a_used_pool(function: Step, changes: dict[str, Any]) -> None:
    found = verdicts(declared(function), serving(**changes))
    assert found[Check.SESSION] is Verdict.PASS
    assert set(found.values()) == {Verdict.PASS}


def test_who_is_asked() -> None:
    assert in_session(serving())
    assert not in_session(serving(seed=4))
    assert not in_session(serving(causal=False))
    assert not in_session(serving(window=20, slot_map="holes"))
    extend, decode, alone = (declared(f) for f in (targets.extend, targets.decode, targets.decode_plain))
    assert extender(extend) is extend
    assert extender(decode) is extend
    assert extender(alone) is None
