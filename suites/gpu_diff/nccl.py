"""Merges of attention states over NCCL, one GPU a rank: every path of sglang's communication, against the oracle.

Needs two GPUs; with more, every number of ranks up to theirs is tried.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor

from fuzz import engine as engines
from fuzz import registry
from fuzz.buffers import DTYPE_NAMES, Poison
from fuzz.case import Case
from fuzz.cli import Seed, guarded
from fuzz.errors import Exit, Stop
from fuzz.instance.merge import build_merge
from oracle.attention import Solution
from oracle.budget import judge
from oracle.budget.merge import merge_bounds
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.merge import merge_states
from oracle.verdict import Verdict
from suites.gpu_diff.merges import Cell, drawn, markdown
from suites.targets import ranks, sglang_dcp_comm
from suites.targets.sglang_dcp_comm import Merge

Run = Callable[[Sequence[ranks.Rank]], list[Tensor]]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def nccl(
    cases: Annotated[int, typer.Option(min=1, help="Cases a cell.")] = 3,
    seed: Seed = 0,
) -> None:
    """See the module's text."""
    if (reason := ranks.nccl_missing(2)) is not None:
        raise Stop(Exit.NOTHING, reason)
    # Ranks are forked: neither this process nor what it asks of torch may begin to use a GPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    targets = [d for d in registry.declared_in(sglang_dcp_comm) if d.name in sglang_dcp_comm.PATHS]
    missing = {d.name: d.unavailable(Engine.CUDA) for d in targets}
    for name, why in missing.items():
        if why is not None:
            print(f"{name}: {why}", file=sys.stderr)
    targets = [d for d in targets if missing[d.name] is None]
    found = judged(targets, ranks.over_nccl, on_own_gpu, torch.cuda.device_count(), cases, seed)
    print(markdown(targets, found))
    if any(text != "pass" for text in found.values()):
        raise Stop(Exit.FINDINGS)


def on_own_gpu(merge: Merge, out: Tensor, lse: Tensor, group: ranks.Group) -> Tensor:
    """The work of a rank on the GPU that is its own."""
    engines.start(Engine.CUDA)
    return merge(out.cuda(), lse.cuda(), group)


def judged(
    targets: Sequence[Declaration],
    run: Run,
    place: Callable[[Merge, Tensor, Tensor, ranks.Group], Tensor],
    most: int,
    cases: int,
    seed: int,
) -> dict[Cell, str]:
    """For each target, number of ranks up to ``most`` and kind of states: "pass", or what is wrong."""
    found: dict[Cell, str] = {}
    for target in targets:
        merge = partial(place, sglang_dcp_comm.PATHS[target.name])
        for cell, case in drawn(target, cases, seed):
            if cell.parts <= most and found.get(cell, "pass") == "pass":
                found[cell] = verdict(target, partial(sglang_dcp_comm.merged, run, merge), case)
    return found


def verdict(target: Declaration, merge: Callable[[Tensor, Tensor], Tensor], case: Case) -> str:
    """ "pass", the error of a rank, or how far a result is beyond its budget."""
    buffers = build_merge(case, Poison.POSITIVE, "cpu").buffers
    outs, lses = buffers["outs"].view, buffers["lses"].view
    try:
        out = merge(outs, lses)
    except ranks.RankError as error:
        return str(error)
    precision, base = target.precision_for(case.dtype), target.convention.lse_base
    true_out, true_lse = merge_states(outs.double(), lses.double(), base)
    bounds = merge_bounds(outs.double(), lses.double(), true_out, true_lse, precision, base)
    tally = judge(
        out, None, Solution(true_out, true_lse), bounds, out_dtype=DTYPE_NAMES[out.dtype], precision=precision
    ).out
    if tally.verdict is Verdict.PASS or not tally.elements:
        return "pass"
    return f"{tally.verdict}: {tally.failures} of {tally.elements} elements; {tally.worst}"


if __name__ == "__main__":
    sys.exit(guarded(app))
