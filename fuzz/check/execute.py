"""One execution of a target over one choice of poison, with everything that the checks compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fuzz import engine as engines
from fuzz.buffers import Poison
from fuzz.call import call
from fuzz.case import Case
from fuzz.check.result import CheckResult
from fuzz.check.sanitizer import sanitized, sanitizer_results
from fuzz.check.scratch import overrun, poisoned_allocations
from fuzz.instance import Instance, build
from fuzz.instance.merge import earlier_cases
from oracle.bits import bits
from oracle.declare import Declaration
from oracle.kinds import Engine

Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Execution:
    """Inputs, outputs and surroundings of one call.

    ``before`` and ``after`` hold the image of every buffer; ``overrun`` counts overwritten guard elements
    around memory that the target allocated; ``sanitizer`` is what the emulator saw,
    ``coverage`` what its kernels reached, if that was asked for.
    """

    poison: Poison
    instance: Instance
    outputs: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    overrun: int
    sanitizer: tuple[CheckResult, ...]
    coverage: dict[str, Any] | None = None

    def changed(self, name: str) -> Tensor:
        """Positions in the image of buffer ``name`` that the call changed."""
        return (self.before[name] != self.after[name]).nonzero().flatten()


def execute(
    declaration: Declaration,
    case: Case,
    poison: Poison,
    engine: Engine,
    progress: Progress,
    coverage: bool = False,
    change: Callable[[Instance], None] | None = None,
) -> Execution:
    """Rebuild the case and call the target once. Whatever the target raises passes through.

    ``progress`` hears of the phases generate, kernel and checks. ``change`` is done to the tensors before the call.
    """
    progress("generate")
    if declaration.reset is not None:
        declaration.reset()
    earlier = [build(one, poison, engines.device(engine)) for one in earlier_cases(case)]
    instance = build(case, poison, engines.device(engine))
    if change is not None:
        change(instance)
    before = {name: buffer.image() for name, buffer in instance.buffers.items()}
    engines.synchronize(engine)
    progress("kernel")
    with sanitized(engine, coverage) as log:
        marked = {} if log is None else {"allocated": log.mark_fresh}
        with poisoned_allocations(poison, **marked) as allocated:
            for one in earlier:
                call(declaration, one)
            outputs = call(declaration, instance)
            engines.synchronize(engine)
    progress("checks")
    after = {name: buffer.image() for name, buffer in instance.buffers.items()}
    return Execution(
        poison=poison,
        instance=instance,
        outputs=outputs,
        before=before,
        after=after,
        overrun=overrun(allocated, poison),
        sanitizer=sanitizer_results(log),
        coverage=log.coverage.to_dict() if log is not None and coverage else None,
    )


def output_bits(execution: Execution) -> dict[str, Tensor]:
    """Outputs as integers, contiguous, so that executions can be compared bit by bit."""
    return {name: bits(value.contiguous()) for name, value in execution.outputs.items()}
