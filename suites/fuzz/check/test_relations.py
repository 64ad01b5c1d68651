"""Relations run where their preconditions hold, and each can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fuzz import engine as engines
from fuzz.buffers import Poison
from fuzz.case import Case, Placement, Pool
from fuzz.check.relations import alone, elsewhere
from fuzz.check.result import CaseResult, Check
from fuzz.check.run import check_case
from fuzz.instance import build
from fuzz.instance.pool import pages
from oracle import declare
from oracle.declare import Declaration, DeclarationError, declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz.cases import backend_case, decode_case, extend_case, gather_case
from suites.targets.portable import targets

RELATIONS = (Check.PAGES, Check.BATCH, Check.AGREEMENT)
DECODE = declaration_of(targets.decode)
assert DECODE is not None
Wrong = Callable[..., Any]


def found(declaration: Declaration, case: Case) -> dict[Check, Verdict]:
    engines.start(Engine.EMULATOR)
    result: CaseResult = check_case(declaration, case, Engine.EMULATOR, lambda _: None)
    return {c.check: c.verdict for c in result.checks if c.check in RELATIONS}


def decoding(**changes: Any) -> Case:
    plain = {"head_dim": 64, "v_head_dim": 64, "group_size": 1, "num_kv_heads": 1, "index_form": "page_table"}
    return decode_case(**(plain | {"index_dtype": "int32", "page_size": 16, "kv_layout": "shuffle_5d"} | changes))


def with_function(function: Wrong, **changes: Any) -> Declaration:
    assert DECODE is not None
    return replace(DECODE, function=function, **changes)


def test_the_relations_of_a_right_kernel_hold() -> None:
    partner = with_function(targets.decode)
    assert found(with_function(targets.decode, agrees_with=partner), decoding()) == dict.fromkeys(
        RELATIONS, Verdict.PASS
    )


def test_a_result_that_depends_on_page_numbers_fails() -> None:
    def wrong(page_table: Tensor, **given: Any) -> Any:
        out, lse = targets.decode(page_table=page_table, **given)
        return out + int(page_table[0, 0]), lse

    case = decoding(placement="ascending", pool="tight")
    assert found(with_function(wrong), case)[Check.PAGES] is Verdict.FAIL


def test_a_result_that_depends_on_the_batch_fails_only_where_it_was_declared_not_to() -> None:
    def wrong(lengths: Tensor, **given: Any) -> Any:
        out, lse = targets.decode(lengths=lengths, **given)
        return out * (1 + 1e-6 * len(lengths)), lse

    assert found(with_function(wrong), decoding())[Check.BATCH] is Verdict.FAIL
    assert DECODE is not None
    lenient = replace(DECODE.supports, batch_invariant=False)
    assert Check.BATCH not in found(with_function(wrong, supports=lenient), decoding())


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.PASS), (1.01, Verdict.FAIL)])
def test_two_targets_that_must_agree(factor: float, verdict: Verdict) -> None:
    def other(**given: Any) -> Any:
        out, lse = targets.decode(**given)
        return (out.float() * factor).to(out.dtype), lse

    declaration = with_function(targets.decode, agrees_with=with_function(other))
    assert found(declaration, decoding(dtype="bf16", kv_dtype="bf16"))[Check.AGREEMENT] is verdict


def test_what_depends_on_poison_is_not_asked_about_relations() -> None:
    def wrong(k_cache: Tensor, **given: Any) -> Any:
        out, lse = targets.decode(k_cache=k_cache, **given)
        return out + k_cache.flatten()[-1], lse

    assert found(with_function(wrong), decoding(context_lens=[3, 3])) == {}


def test_no_other_place_is_no_relation() -> None:
    one = decoding(context_lens=[3], query_lens=[1], placement="ascending", pool="tight")
    assert elsewhere(one) is None
    assert elsewhere(decoding(pool=Pool.HUGE)) is None
    assert elsewhere(extend_case()) is None
    assert elsewhere(gather_case()) is None
    moved = elsewhere(decoding(pool="spare"))
    assert moved is not None
    assert pages(moved) != pages(decoding(pool="spare"))


@given(seed=st.integers(0, 1 << 31), placement=st.sampled_from(Placement), backend=st.booleans())
def test_the_first_request_alone_has_the_values_that_it_has_in_the_batch(
    seed: int, placement: Placement, backend: bool
) -> None:
    make = backend_case if backend else decode_case
    case = make(seed=seed, placement=placement)
    whole, single = (build(c, Poison.NAN) for c in (case, alone(case)))
    assert whole.problem is not None
    assert single.problem is not None
    queries, keys = case.query_lens[0], case.context_lens[0]
    assert torch.equal(single.problem.q, whole.problem.q[:queries])
    assert torch.equal(single.problem.k, whole.problem.k[:keys])
    assert torch.equal(single.problem.v, whole.problem.v[:keys])


def test_a_partner_is_a_declared_function_of_the_same_operation() -> None:
    for partner in (len, targets.extend):
        with pytest.raises(DeclarationError, match="agrees_with"):
            declare.paged_decode(name="x", convention=targets.DECODE, agrees_with=partner)
