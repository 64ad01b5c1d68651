"""Checks on memory: written, bounds, inputs, poison, NaN, determinism. None of them needs the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.buffers import Poison, pattern
from fuzz.check.execute import Execution, output_bits
from fuzz.check.result import Check, CheckResult
from oracle.verdict import Verdict

IN_PLACE = ("k_cache", "v_cache")
"""Buffers that kv_write and backend may change."""


def inputs_untouched(run: Execution, in_place: tuple[str, ...] = ()) -> CheckResult:
    """Every input buffer is bit for bit what it was; a change inside its view is INPUTS."""
    for name, buffer in run.instance.buffers.items():
        if name in in_place:
            continue
        changed = run.changed(name)
        if len(changed):
            first = buffer.where(int(changed[0]))
            message = f"{len(changed)} elements of {name} or around it changed, the first at element {first}"
            return CheckResult(
                Check.INPUTS, Verdict.FAIL, message, {"buffer": name, "count": len(changed), "first": first}
            )
    return CheckResult(Check.INPUTS, Verdict.PASS)


def allocations_in_bounds(run: Execution) -> CheckResult:
    """Nothing was written around the memory that the target allocated."""
    if run.overrun:
        message = f"{run.overrun} elements around memory that the target allocated were overwritten"
        return CheckResult(Check.BOUNDS, Verdict.FAIL, message, {"count": run.overrun})
    return CheckResult(Check.BOUNDS, Verdict.PASS)


def unwritten(first: Execution, second: Execution) -> dict[str, Tensor]:
    """Per output, which elements still hold the poison that was there before, under two poisons."""
    found = {}
    a, b = output_bits(first), output_bits(second)
    for name, value in first.outputs.items():
        held_a = a[name] == pattern(value.dtype, first.poison)
        held_b = b[name] == pattern(value.dtype, second.poison)
        found[name] = held_a & held_b
    return found


def all_written(first: Execution, second: Execution) -> CheckResult:
    """Every element of every output was written."""
    for name, mask in unwritten(first, second).items():
        count = int(mask.sum())
        if count:
            where = mask.nonzero()[0].tolist()
            message = f"{count} of {mask.numel()} elements of {name} were not written, the first at {where}"
            return CheckResult(Check.WRITTEN, Verdict.FAIL, message, {"output": name, "count": count, "first": where})
    return CheckResult(Check.WRITTEN, Verdict.PASS)


def same_result(check: Check, first: Execution, second: Execution, ignore: dict[str, Tensor]) -> CheckResult:
    """Two executions gave the same bits, elements in ``ignore`` apart."""
    a, b = output_bits(first), output_bits(second)
    for name in a:
        differ = (a[name] != b[name]) & ~ignore.get(name, torch.zeros_like(a[name], dtype=torch.bool))
        count = int(differ.sum())
        if count:
            where = differ.nonzero()[0].tolist()
            words = {
                Check.POISON: "depend on values where no data is",
                Check.NAN: "are contaminated by NaN where no data is",
                Check.DETERMINISM: "differ between two identical calls",
            }[check]
            message = f"{count} of {differ.numel()} elements of {name} {words}, the first at {where}"
            return CheckResult(check, Verdict.FAIL, message, {"output": name, "count": count, "first": where})
    return CheckResult(check, Verdict.PASS)


def opposite(poison: Poison) -> Poison:
    """The other finite poison."""
    return Poison.NEGATIVE if poison is Poison.POSITIVE else Poison.POSITIVE
