"""Exact equality for kernels that move data: KV write and gather."""

from __future__ import annotations

from torch import Tensor

from fuzz.check.execute import Execution
from fuzz.check.result import Check, CheckResult
from fuzz.instance import build, write_expected
from oracle.bits import bits
from oracle.kinds import Role
from oracle.verdict import Verdict


def gather_values(run: Execution) -> tuple[CheckResult, int]:
    """The gathered rows are the rows that the pool holds, bit for bit. Also the number of elements."""
    elements = 0
    for name, role in (("key", Role.K), ("value", Role.V)):
        expected, got = bits(run.instance.linear[role]), bits(run.outputs[name].cpu().contiguous())
        elements += expected.numel()
        wrong = expected != got
        if bool(wrong.any()):
            return _mismatch(name, wrong, expected, got), elements
    return CheckResult(Check.VALUES, Verdict.PASS), elements


def _mismatch(name: str, wrong: Tensor, expected: Tensor, got: Tensor) -> CheckResult:
    where = wrong.nonzero()[0].tolist()
    token, head, dim = where
    count, rows = int(wrong.sum()), int(wrong.flatten(1).any(1).sum())
    message = (
        f"{name}: {count} of {wrong.numel()} elements in {rows} tokens differ, the first at token {token}, "
        f"head {head}, dim {dim}: expected bits {_hex(expected[token, head, dim])}, "
        f"got {_hex(got[token, head, dim])}"
    )
    return CheckResult(Check.VALUES, Verdict.FAIL, message, {"output": name, "count": count, "first": where})


def _hex(element: Tensor) -> str:
    width = element.element_size()
    return f"0x{int(element) & ((1 << 8 * width) - 1):0{2 * width}x}"


def written_pool(run: Execution) -> tuple[list[CheckResult], int]:
    """After a KV write the pool holds the new rows, and nothing else of it changed.

    Rows that should have been written and hold what they held are WRITTEN, other wrong rows VALUES, and a
    change anywhere else is BOUNDS.
    """
    expected = build(run.instance.case, run.poison, run.instance.device)
    write_expected(expected)
    worst: dict[Check, CheckResult] = {}
    elements = 0
    for name in ("k_cache", "v_cache"):
        buffer = run.instance.buffers[name]
        before, after, wanted = run.before[name], run.after[name], expected.buffers[name].image()
        elements += int((wanted != before).sum())
        wrong = after != wanted
        kinds = {
            Check.WRITTEN: (wrong & (after == before), "elements were not written"),
            Check.VALUES: (wrong & (wanted != before) & (after != before), "elements hold something else"),
            Check.BOUNDS: (wrong & (wanted == before), "elements outside the slots were overwritten"),
        }
        for check, (mask, words) in kinds.items():
            count = int(mask.sum())
            if count:
                first = buffer.where(int(mask.nonzero()[0]))
                message = f"{name}: {count} {words}, the first at element {first}"
                evidence = {"buffer": name, "count": count, "first": first}
                worst.setdefault(check, CheckResult(check, Verdict.FAIL, message, evidence))
    passed = (Check.WRITTEN, Check.VALUES, Check.BOUNDS)
    return [worst.get(check, CheckResult(check, Verdict.PASS)) for check in passed], elements
