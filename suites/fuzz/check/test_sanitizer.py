"""From a kernel's launch to the checks: the harness marks what is unwritten, roots come before consequences."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
import torch

from fuzz.buffers import Poison
from fuzz.check.result import CaseResult, Check
from fuzz.check.sanitizer import CHECK_OF, sanitized, sanitizer_results
from fuzz.check.scratch import poisoned_allocations
from fuzz.engine import emulator
from fuzz.engine.emulator import FindingKind
from oracle.kinds import Engine
from oracle.verdict import Verdict

SOURCE = """
import torch
import triton
import triton.language as tl

@triton.jit
def partials(x, scratch, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(scratch + lanes, tl.load(x + lanes, mask=lanes < n), mask=lanes < n)

@triton.jit
def total(scratch, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(scratch + lanes, mask=lanes < n, other=0.0), axis=0))

@triton.jit
def beyond(x, out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes))

def summed(x, written, read):
    scratch = torch.empty(16, dtype=x.dtype)
    out = x.new_empty(1)
    partials[(1,)](x, scratch, written, 16)
    total[(1,)](scratch, out, read, 16)
    return out
"""


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return emulator.load_text(SOURCE, "two_kernels")


@pytest.mark.parametrize("poison", list(Poison))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_scratch_that_nobody_wrote_is_seen_under_every_poison(
    host: ModuleType, poison: Poison, dtype: torch.dtype
) -> None:
    x = torch.ones(16).to(dtype)
    with sanitized(Engine.EMULATOR) as log, poisoned_allocations(poison, log.mark_fresh):
        host.summed(x, 12, 12)
    assert log.findings == ()
    with sanitized(Engine.EMULATOR) as log, poisoned_allocations(poison, log.mark_fresh):
        host.summed(x, 12, 13)
    (finding,) = log.findings
    assert finding.kind is FindingKind.UNINITIALISED_OUTPUT
    assert finding.unwritten is not None
    assert finding.unwritten.indices == (12, 12)
    failures = [r for r in sanitizer_results(log) if r.verdict is Verdict.FAIL]
    assert [r.check for r in failures] == [Check.UNINITIALISED]


def test_roots_come_first_and_evidence_is_plain_data(host: ModuleType) -> None:
    with sanitized(Engine.EMULATOR) as log:
        host.beyond[(1,)](torch.zeros(12), torch.zeros(8), 16)
    results = sanitizer_results(log)
    causes = [r.evidence["caused_by"] for r in results if r.verdict is Verdict.FAIL]
    assert causes
    assert sorted(causes, key=lambda cause: cause is not None) == causes
    back = CaseResult.from_dict(json.loads(json.dumps(CaseResult(checks=results).to_dict())))
    assert [c.message for c in back.checks] == [r.message for r in results]


def test_each_kind_of_finding_belongs_to_a_check() -> None:
    assert set(CHECK_OF) == set(FindingKind)


def test_coverage_is_collected_where_it_is_asked_for(host: ModuleType) -> None:
    for asked in (True, False):
        with sanitized(Engine.EMULATOR, coverage=asked) as log:
            host.summed(torch.ones(16), 16, 16)
        assert bool(log.coverage.functions) is asked
    result = CaseResult(checks=(), coverage={"a.py:f": {}})
    assert CaseResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert "coverage" not in CaseResult(checks=()).to_dict()
