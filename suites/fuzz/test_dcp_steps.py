"""Decode steps of sglang's Triton backend over numbers of ranks that are no targets, and over real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fuzz import engine as engines
from fuzz.case import Case, Sink, load_case
from fuzz.check.result import Check
from fuzz.check.run import check_case
from oracle.declare import declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.targets import ranks, sglang_dcp_backend, sglang_dcp_decode

MISSING = sglang_dcp_backend.missing(Engine.EMULATOR)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

CASE = load_case(Path(__file__).parents[1] / "gpu_diff" / "cases" / "dcp-decode-sinks.json")
"""Three keys, twelve heads, sinks."""

STEPS = [(3, ranks.stepped), (4, ranks.stepped), (2, ranks.over_gloo), (3, ranks.over_gloo), (4, ranks.over_gloo)]


def failures(count: int, run, case: Case) -> set[Check]:  # type: ignore[no-untyped-def]
    """Checks that do not pass."""
    engines.start(Engine.EMULATOR)
    target = declaration_of(sglang_dcp_decode._target(count, "trial", sglang_dcp_decode.SUPPORTS, run))
    assert target is not None
    result = check_case(target, case, Engine.EMULATOR, lambda phase: None)
    assert result.verdict in (Verdict.PASS, Verdict.FAIL)
    return {failure.check for failure in result.failures}


@pytest.mark.parametrize(("count", "run"), STEPS)
def test_a_step_without_sinks_is_unsplit_attention(count: int, run) -> None:  # type: ignore[no-untyped-def]
    # With four ranks the shortest requests leave ranks without keys.
    lengths = (3, 70, 1)
    case = replace(CASE, sinks=Sink.NONE, context_lens=lengths, query_lens=(1,) * len(lengths))
    assert not failures(count, run, case)


@pytest.mark.parametrize(("count", "run"), STEPS[:3])
def test_every_rank_counts_the_sink(count: int, run) -> None:  # type: ignore[no-untyped-def]
    """As the ledger says of two ranks."""
    assert failures(count, run, CASE) == {Check.VALUES}
