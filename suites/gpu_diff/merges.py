"""Merges of attention states: every path, number of ranks and kind of states; what passes, and what does not and why.

`run` judges what is installed here and puts its columns into the table; `table` puts in columns of other machines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as File
from typing import Annotated

import torch
import typer
from torch import Tensor

from fuzz import engine as engines
from fuzz.buffers import DTYPE_NAMES
from fuzz.case import Case
from fuzz.check.result import Check
from fuzz.cli import Seed, guarded
from fuzz.commands import built_in_ledger
from fuzz.engine.emulator import FindingsError
from fuzz.errors import Exit, Stop
from fuzz.ledger import Defect
from fuzz.versions import versions
from oracle.attention import Solution
from oracle.bits import bit_equal
from oracle.budget import judge
from oracle.budget.merge import merge_bounds
from oracle.kinds import Engine
from oracle.merge import merge_states
from oracle.verdict import Verdict
from suites.gpu_diff import merge_table
from suites.gpu_diff.merge_kinds import PATHS, REFUSABLE, Given, Kind, Path, drawn, states
from suites.gpu_diff.merge_table import Cell, Column, Outcome
from suites.targets import ranks
from suites.targets.sglang_dcp_comm import Merge

TABLE = File(__file__).parents[2] / "docs" / "results" / "dcp-merges.md"
OVER = {"stepped": ranks.stepped, "gloo": ranks.over_gloo, "nccl": ranks.over_nccl}
GLOO = (2, 3, 4)
"""Numbers of real processes on a CPU."""

HEAD = """# Merges of attention states

Made by `python -m suites.gpu_diff.merges run`, once for each version of sglang, from `dcp-merges.json` beside it.
Numbers are of ranks, or of states where one call merges all. "One process": all ranks in one process, stopped at each
collective. A single rank gives its state back, bit for bit. "No promise": wrong, but nothing that was read says that
the path can take such states, and its callers do not give them.

"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command("run")
def run_here(
    over: Annotated[
        list[str] | None, typer.Option(help="stepped, gloo or nccl. Repeatable. Default: the first two.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="emulator or cuda, for stepped; gloo has the emulator, nccl the GPUs.")
    ] = "",
    most: Annotated[int, typer.Option(min=1, max=16, help="Largest number of ranks.")] = 16,
    cases: Annotated[int, typer.Option(min=1, max=64, help="Cases a cell.")] = 2,
    seed: Seed = 0,
    json_: Annotated[File | None, typer.Option("--json", help="Write the columns there; leave the table.")] = None,
) -> None:
    """Judge every path that is installed here."""
    chosen = over or ["stepped", "gloo"]
    if unknown := set(chosen) - set(OVER):
        raise Stop(Exit.USAGE, f"--over: {min(unknown)!r}; allowed: {', '.join(OVER)}")
    if "nccl" in chosen and len(chosen) > 1:
        raise Stop(Exit.USAGE, "--over nccl: allowed alone; its ranks are forked from a process that uses no GPU")
    columns = []
    for way in chosen:
        for unfinished in column(way, _engine(way, engine), most, cases, seed):
            # What comes after may bring a GPU down, or take too long.
            keep([*columns, unfinished], json_)
        columns.append(unfinished)
    new = [c for column_ in columns for c in column_.cells if c.outcome is Outcome.FINDING and c.known is None]
    for cell in new:
        print(f"new: {cell.path}, {cell.ranks} ranks, {cell.kind}: {cell.text}", file=sys.stderr)
    if new:
        raise Stop(Exit.FINDINGS)


@app.command("table")
def table(
    files: Annotated[list[File], typer.Argument(metavar="FILE...", help="JSON files of `run --json`.")],
) -> None:
    """Put the columns of other machines into the table."""
    keep([column_ for file in files for column_ in merge_table.load(file)], None)


def keep(columns: Sequence[Column], file: File | None) -> None:
    """Write ``columns`` to ``file``, or put them into the table."""
    if file is not None:
        merge_table.save(file, columns)
        return
    kept = TABLE.with_suffix(".json")
    whole = merge_table.replaced(merge_table.load(kept) if kept.exists() else [], columns)
    merge_table.save(kept, whole)
    TABLE.write_text(HEAD + merge_table.markdown(whole), encoding="utf-8")


def _engine(way: str, asked: str) -> Engine:
    """The engine of a way of execution. Raises ``Stop`` where it cannot run."""
    if way == "nccl":
        if (reason := ranks.nccl_missing(2)) is not None:
            raise Stop(Exit.NOTHING, reason)
        # Neither this process nor what it asks of torch may begin to use a GPU: ranks are forked.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        return Engine.CUDA
    if asked not in ("", *Engine):
        raise Stop(Exit.USAGE, f"--engine: {asked!r}; allowed: {', '.join(Engine)}")
    engine = Engine.EMULATOR if way == "gloo" else Engine(asked) if asked else engines.detect()
    engines.start(engine)
    return engine


def column(way: str, engine: Engine, most: int, cases: int, seed: int) -> Iterator[Column]:
    """Every path over one way of execution: the column as it grows, path by path."""
    ledger, found = built_in_ledger(), versions_elsewhere() if way == "nccl" else versions()
    known = [defect for defect in ledger if defect.applies(engine, found)]
    counts = {"stepped": range(1, most + 1), "gloo": GLOO, "nccl": range(2, torch.cuda.device_count() + 1)}[way]
    cells: list[Cell] = []
    for path in PATHS:
        if way != "stepped" and path.merge is None:
            continue
        cells += judged(path, way, engine, [n for n in counts if n <= most], cases, seed, known)
        print(f"{way}: {path.name}", file=sys.stderr)
        yield Column(way, engine.value, found, tuple(cells))


def versions_elsewhere() -> dict[str, str | None]:
    """What is installed, asked by a process of its own: to name the GPU is to begin to use it."""
    asks = "import json; from fuzz.versions import versions; print(json.dumps(versions()))"
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def judged(
    path: Path, way: str, engine: Engine, counts: Sequence[int], cases: int, seed: int, known: Sequence[Defect]
) -> Iterator[Cell]:
    """A cell for every kind that the path can be given and every number of ranks."""
    reason = path.declaration.unavailable(engine)
    place = on_own_gpu if way == "nccl" else as_it_is
    device = "cpu" if way == "nccl" else engines.device(engine)
    for kind in (kind for kind in Kind if kind in path.tried):
        for count in counts:
            if kind is Kind.UNEVEN and count == 1:
                continue
            if reason is not None:
                yield Cell(path.name, kind, count, Outcome.UNSUPPORTED, reason)
                continue
            drawn_ = [drawn(path.declaration, kind, count, index, seed) for index in range(cases)]
            yield cell(path, kind, OVER[way], place, device, drawn_, known)


def as_it_is(merge: Merge, out: Tensor, lse: Tensor, group: ranks.Group) -> Tensor:
    """The work of a rank where its tensors are."""
    return merge(out, lse, group)


def on_own_gpu(merge: Merge, out: Tensor, lse: Tensor, group: ranks.Group) -> Tensor:
    """The work of a rank on the GPU that is its own."""
    engines.start(Engine.CUDA)
    return merge(out.cuda(), lse.cuda(), group)


def cell(
    path: Path,
    kind: Kind,
    run: ranks.Run,
    place: Callable[..., Tensor],
    device: str,
    cases: Sequence[Case],
    known: Sequence[Defect],
) -> Cell:
    """The first case that does not pass decides."""
    for case in cases:
        given = states(kind, case, device)
        try:
            out, lse = path.call(run, place, kind, given)
        except Exception as error:  # noqa: BLE001 - whatever a path raises is its outcome
            said = _in_one_line(error, case, kind)
            unbound = isinstance(error, FindingsError) and kind not in path.promised
            outcome = Outcome.UNSUPPORTED if kind in REFUSABLE else Outcome.FINDING
            outcome = Outcome.NO_PROMISE if unbound else outcome
            checks: tuple[Check, ...] = (Check.CRASH,)
        else:
            checks, said = wrong(path, case, given, out, lse)
            outcome = Outcome.FINDING if kind in path.promised else Outcome.NO_PROMISE
        if said:
            entry = _entry(known, path, checks, case) if outcome is Outcome.FINDING else None
            return Cell(path.name, kind, case.parts, outcome, said, entry)
    return Cell(path.name, kind, cases[0].parts, Outcome.PASS)


def _in_one_line(error: Exception, case: Case, kind: Kind) -> str:
    """Its name and last line, whichever rank it is of; numbers of ranks, uneven heads and narrow dims as N, H and D.

    Of an access out of bounds, no more than what it was.
    """
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, FindingsError):
        lines = [lines[0].partition(",")[0]]
    said = re.sub(r"^RankError: rank \d+: ", "", " ".join(f"{type(error).__name__}: {lines[-1]}".split()))[:160]
    letters = {case.parts: "N"} | ({case.num_kv_heads: "H"} if kind is Kind.UNEVEN else {})
    letters |= {case.v_head_dim: "D"} if kind is Kind.NARROW else {}
    for number, letter in letters.items():
        said = re.sub(rf"(?<![\w.:])(?<!power of ){number}\b", letter, said)
    return said


def _entry(known: Sequence[Defect], path: Path, checks: Sequence[Check], case: Case) -> str | None:
    name = path.declaration.name
    return next((d.id for d in known if any(d.matches(name, check, None, case) for check in checks)), None)


def wrong(path: Path, case: Case, given: Given, out: Tensor, lse: Tensor | None) -> tuple[tuple[Check, ...], str]:
    """Checks that fail and what is wrong, in words without numbers; nothing, if the merge is right."""
    if case.parts == 1 and path.gives_back:
        same = out.shape == given.outs[0].shape and bool(bit_equal(out.cpu(), given.outs[0].cpu().contiguous()).all())
        return ((), "") if same else ((Check.VALUES,), "a single state is not given back")
    if out.shape != given.outs.shape[1:]:
        return (Check.VALUES,), "not all heads come back, and nothing is said"
    outs, lses, base = given.outs.double(), given.meant.double(), path.declaration.convention.lse_base
    precision = path.precision(case)
    truth = Solution(*merge_states(outs, lses, base))
    bounds = merge_bounds(outs, lses, truth.out, truth.lse, precision, base)
    # Both log-sum-exps are in the path's own base: nothing is converted.
    judgement = judge(out, lse, truth, bounds, out_dtype=DTYPE_NAMES[out.dtype], precision=precision)
    failed = {Check.VALUES: judgement.out, Check.LSE: judgement.lse}
    judged_ = {check: tally for check, tally in failed.items() if tally is not None and tally.elements}
    checks = [check for check, tally in judged_.items() if tally.verdict is Verdict.FAIL]
    if not checks:
        if any(tally.verdict is not Verdict.PASS for tally in judged_.values()):
            return (Check.VALUES,), "the budget says nothing of most elements"
        return (), ""
    results = {Check.VALUES: out, Check.LSE: lse}
    nan = any(results[check] is not None and bool(results[check].isnan().any()) for check in checks)  # type: ignore[union-attr]
    what = " and ".join({Check.VALUES: "output", Check.LSE: "log-sum-exp"}[check] for check in checks)
    return tuple(checks), f"NaN in the {what}" if nan else f"wrong {what}"


if __name__ == "__main__":
    sys.exit(guarded(app))
