"""The table of merges: its verdicts can fail, and the one that is kept is what its columns say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz.cli import guarded
from fuzz.errors import Exit, Stop
from oracle.kinds import Engine
from suites.gpu_diff import merge_table, merges
from suites.gpu_diff.merge_kinds import PATHS, Kind, drawn, states
from suites.gpu_diff.merge_table import Cell, Column, Outcome
from suites.targets import ranks
from suites.targets.ranks import Group
from suites.targets.sglang_dcp_comm import Merge

pytestmark = pytest.mark.dcp

ALL_REDUCE = next(path for path in PATHS if path.name.startswith("all-reduce"))
PORTABLE = next(path for path in PATHS if path.name.startswith("our portable"))


def too_large(merge: Merge, out: Tensor, lse: Tensor, group: Group) -> Tensor:
    return merge(out, lse, group) * 1.01


def one_head_less(merge: Merge, out: Tensor, lse: Tensor, group: Group) -> Tensor:
    return merge(out, lse, group)[:, 1:]


def raises(merge: Merge, out: Tensor, lse: Tensor, group: Group) -> Tensor:
    raise ValueError(f"nothing for {group.world_size} ranks")


def judged(place, kind: Kind = Kind.FULL, count: int = 2) -> Cell:  # type: ignore[no-untyped-def]
    reason = ALL_REDUCE.declaration.unavailable(Engine.EMULATOR)
    if reason is not None:
        pytest.skip(reason)
    engines.start(Engine.EMULATOR)
    cases = [drawn(ALL_REDUCE.declaration, kind, count, 0, 0)]
    return merges.cell(ALL_REDUCE, kind, ranks.stepped, place, "cpu", cases, ())


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.EMPTY_NAN, Kind.ALL_EMPTY, Kind.VIEWS])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_right_merge_passes(kind: Kind, count: int) -> None:
    assert judged(merges.as_it_is, kind, count).outcome is Outcome.PASS


def test_a_wrong_merge_does_not_pass() -> None:
    assert judged(too_large).shown == "finding: wrong output"
    assert judged(too_large, count=1).shown == "finding: a single state is not given back"
    assert judged(one_head_less, Kind.UNEVEN).outcome is Outcome.NO_PROMISE
    assert judged(raises).shown == "finding: ValueError: nothing for N ranks"
    assert judged(raises, Kind.UNEVEN).outcome is Outcome.UNSUPPORTED


def test_a_log_sum_exp_is_judged_too() -> None:
    case = drawn(PORTABLE.declaration, Kind.FULL, 3, 0, 0)
    given = states(Kind.FULL, case, "cpu")
    engines.start(Engine.EMULATOR)
    out, lse = PORTABLE.call(ranks.stepped, merges.as_it_is, Kind.FULL, given)
    assert lse is not None
    assert merges.wrong(PORTABLE, case, given, out, lse) == ((), "")
    assert merges.wrong(PORTABLE, case, given, out, lse + 1e-3)[1] == "wrong log-sum-exp"
    assert merges.wrong(PORTABLE, case, given, out, lse * torch.nan)[1] == "NaN in the log-sum-exp"


@pytest.mark.parametrize("kind", [Kind.INFINITE, Kind.NOT_A_NUMBER])
def test_special_log_sum_exps_are_meant_as_empty(kind: Kind) -> None:
    given = states(kind, drawn(ALL_REDUCE.declaration, kind, 4, 0, 0), "cpu")
    special = given.lses.isnan() | (given.lses == torch.inf)
    assert bool(special.any())
    assert torch.equal(special, given.meant == -torch.inf)


COLUMN = Column(
    "stepped",
    "emulator",
    {"sglang": "1", "gpu": None},
    (
        *(Cell("a", "full", n, Outcome.PASS) for n in (1, 2, 3, 8)),
        Cell("a", "full", 4, Outcome.FINDING, "wrong", "an-entry"),
        *(Cell("b", "full", n, Outcome.UNSUPPORTED, "there is none") for n in (1, 2)),
    ),
)


def test_the_table_groups_ranks_and_says_a_text_once() -> None:
    other = replace(COLUMN, over="gloo")
    text = merge_table.markdown([COLUMN, other])
    assert text.count("| full | 1 to 3, 8: pass; 4: finding [1] | 1 to 3, 8: pass; 4: finding [1] |") == 1
    assert text.count("1. finding (`an-entry`): wrong") == 1
    assert "one process, sglang 1: unsupported: there is none." in text


def test_columns_come_back_from_their_file_and_replace_their_namesakes(tmp_path: Path) -> None:
    file = tmp_path / "columns.json"
    merge_table.save(file, [COLUMN])
    (again,) = merge_table.load(file)
    assert set(again.cells) == set(COLUMN.cells)
    assert replace(again, cells=()) == replace(COLUMN, cells=())
    newer = replace(COLUMN, cells=COLUMN.cells[:1])
    assert merge_table.replaced([COLUMN], [newer]) == [newer]
    file.write_text('{"schema": 2}')
    with pytest.raises(Stop, match=r"columns\.json: no columns of merges: schema 2; allowed: 1"):
        merge_table.load(file)


def test_the_kept_table_is_what_its_columns_say() -> None:
    columns = merge_table.load(merges.TABLE.with_suffix(".json"))
    assert merges.TABLE.read_text() == merges.HEAD + merge_table.markdown(columns)
    assert not [cell for c in columns for cell in c.cells if cell.outcome is Outcome.FINDING and cell.known is None]


@pytest.mark.skipif(ranks.nccl_missing(2) is None, reason="NCCL can run here")
def test_nccl_says_in_one_line_why_not(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "columns.json"
    assert guarded(merges.app, ["run", "--over", "nccl", "--json", str(file)]) == Exit.NOTHING
    said = capfd.readouterr().err.splitlines()
    assert said == [f"attn-oracle: {ranks.nccl_missing(2)}"]
    assert not file.exists()
