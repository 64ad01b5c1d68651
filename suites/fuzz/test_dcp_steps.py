"""Steps of sglang's Triton backend over numbers of ranks that are no targets, and over real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuzz import engine as engines
from fuzz.case import Case, Sink, load_case
from fuzz.check.result import Check
from fuzz.check.run import check_case
from oracle.convention import SinkUnits
from oracle.declare import declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.targets import ranks, sglang_dcp_backend, sglang_dcp_decode, sglang_dcp_modules
from suites.targets.sglang_dcp_backend import Mode

MISSING = sglang_dcp_backend.missing(Engine.EMULATOR)
pytestmark = [pytest.mark.dcp, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

CASE = load_case(Path(__file__).parents[1] / "gpu_diff" / "cases" / "dcp-decode-sinks.json")
"""Three keys, twelve heads, sinks."""

LENGTHS = (3, 70, 1)
"""With four ranks the shortest requests leave ranks without keys."""

BARE = replace(CASE, sinks=Sink.NONE, context_lens=LENGTHS, query_lens=(1,) * len(LENGTHS))
ONE = [(1, ranks.stepped)]
STEPS = [(3, ranks.stepped), (4, ranks.stepped), (2, ranks.over_gloo), (3, ranks.over_gloo), (4, ranks.over_gloo)]


def failures(count: int, run: ranks.Run, case: Case, supports: Any = None, **options: Any) -> set[Check]:
    """Checks that do not pass."""
    engines.start(Engine.EMULATOR)
    supports = supports or sglang_dcp_decode.SUPPORTS
    target = declaration_of(sglang_dcp_decode.over_ranks(count, "trial", supports, run, **options))
    assert target is not None
    result = check_case(target, case, Engine.EMULATOR, lambda phase: None)
    assert result.verdict in (Verdict.PASS, Verdict.FAIL)
    return {failure.check for failure in result.failures}


@pytest.mark.parametrize(("count", "run"), ONE + STEPS)
def test_a_step_is_unsplit_attention_whatever_the_number_of_ranks(count: int, run: ranks.Run) -> None:
    assert not failures(count, run, BARE)


@pytest.mark.parametrize("count", [2, 16])
def test_one_key_head_for_each_query_head(count: int) -> None:
    supports = replace(sglang_dcp_decode.SUPPORTS, group_sizes=(1,))
    assert not failures(count, ranks.stepped, replace(BARE, num_kv_heads=16, group_size=1), supports)


def test_one_rank_counts_the_sink_once() -> None:
    assert not failures(1, ranks.stepped, CASE)


@pytest.mark.parametrize(("count", "run"), STEPS[:3])
def test_every_rank_counts_the_sink(count: int, run: ranks.Run) -> None:
    """As the ledger says of two ranks."""
    assert failures(count, run, CASE) == {Check.VALUES}


# Where a step over ranks is wrong, the same step of one rank is right: it is the ranks' doing.
FEW = replace(BARE, num_kv_heads=1, group_size=4, head_dim=64, v_head_dim=64, context_lens=(5, 40), query_lens=(1, 1))
NO_SINKS = {"sink": SinkUnits.UNSUPPORTED}


def test_drafts_of_one_rank_without_a_prefix_and_of_several() -> None:
    drafts = replace(FEW, context_lens=(3, 3), query_lens=(3, 3))
    options = {"mode": Mode.VERIFY, **NO_SINKS}
    supports = sglang_dcp_decode.FEW
    assert not failures(2, ranks.stepped, drafts, supports, **options)
    behind = replace(drafts, context_lens=(9, 4))
    assert failures(2, ranks.stepped, behind, supports, **options) >= {Check.VALUES, Check.BOUNDS}


@pytest.mark.skipif(not sglang_dcp_modules.later(), reason="this version of sglang has no lean kernel")
@pytest.mark.parametrize("count", [1, 2])
def test_the_lean_kernel_gives_no_log_sum_exps_to_merge_by(count: int) -> None:
    found = failures(count, ranks.stepped, FEW, sglang_dcp_decode.FEW, lean=True, **NO_SINKS)
    assert (Check.VALUES in found) is (count > 1)
