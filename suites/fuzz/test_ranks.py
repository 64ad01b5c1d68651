"""Ranks in one process and in real ones: collectives, and what goes wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from suites.targets.ranks import Group, RankError, nccl_missing, over_gloo, over_nccl, stepped

pytestmark = pytest.mark.dcp

RUNS = [stepped, over_gloo]
COUNTS = [2, 3, 4]
"""Numbers of real processes."""


def own(group: Group) -> Tensor:
    return torch.arange(12.0).reshape(4, 3) + 100 * group.rank_in_group


def gathers(dim: int, group: Group) -> Tensor:
    return group.all_gather(own(group), dim)


def gathers_into(group: Group) -> Tensor:
    out = torch.empty(4 * group.world_size, 3)
    group.all_gather_into_tensor(out, own(group))
    return out


def reduces(group: Group) -> Tensor:
    return group.all_reduce(own(group))


def scatters(group: Group) -> Tensor:
    return group.reduce_scatter_along_dim(own(group), 0)


def exchanges(group: Group) -> Tensor:
    out = torch.empty(4, 3)
    group.all_to_all_single(out, own(group))
    return out


def twice(group: Group) -> Tensor:
    first = group.all_gather(own(group), 0)
    return group.all_reduce(first * (1 + group.rank_in_group))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives(run, ranks: int) -> None:  # type: ignore[no-untyped-def]
    parts = [torch.arange(12.0).reshape(4, 3) + 100 * r for r in range(ranks)]
    total = sum(parts, torch.zeros(4, 3))
    share = 4 // ranks
    for dim in (0, 1):
        assert all(torch.equal(x, torch.cat(parts, dim)) for x in run([partial(gathers, dim)] * ranks))
    assert all(torch.equal(x, torch.cat(parts)) for x in run([gathers_into] * ranks))
    assert all(torch.equal(x, total) for x in run([reduces] * ranks))
    assert torch.equal(torch.cat(run([scatters] * ranks)), total)
    for rank, got in enumerate(run([exchanges] * ranks)):
        assert torch.equal(got, torch.cat([p[rank * share : (rank + 1) * share] for p in parts]))
    expected = torch.cat(parts) * sum(range(1, ranks + 1))
    assert all(torch.equal(x, expected) for x in run([twice] * ranks))


def raises(group: Group) -> Tensor:
    if group.rank_in_group == 1:
        raise ValueError("a fault of rank 1")
    return group.all_reduce(own(group))


def test_an_exception_of_one_rank_ends_all_real_processes() -> None:
    with pytest.raises(RankError, match="rank 1: ValueError: a fault of rank 1"):
        over_gloo([raises] * 3)


def test_an_exception_of_one_rank_passes_through_in_one_process() -> None:
    with pytest.raises(ValueError, match="a fault of rank 1"):
        stepped([raises] * 3)


def killed(group: Group) -> Tensor:
    """The last rank is killed while the others wait for it in their second collective."""
    first = group.all_reduce(own(group))
    if group.rank_in_group == group.world_size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return group.all_reduce(first)


@pytest.mark.parametrize("ranks", COUNTS)
def test_a_rank_killed_in_mid_collective_is_named_and_nobody_is_left(ranks: int) -> None:
    with pytest.raises(RankError, match=rf"^rank {ranks - 1} was ended by SIGKILL before it answered$"):
        over_gloo([killed] * ranks, timeout_s=20)


def stopped(group: Group) -> Tensor:
    """The last rank is stopped, and neither ends nor goes on, while the others wait for it."""
    first = group.all_reduce(own(group))
    if group.rank_in_group == group.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return group.all_reduce(first)


@pytest.mark.parametrize("ranks", COUNTS)
def test_a_rank_stopped_in_mid_collective_ends_within_the_watchdogs_time_and_nobody_is_left(ranks: int) -> None:
    with pytest.raises(RankError, match=rf"no answer .*rank .*\b{ranks - 1} \(stopped\)$"):
        over_gloo([stopped] * ranks, timeout_s=1.5)


def test_a_rank_killed_in_mid_collective_of_one_process_ends_that_process() -> None:
    """The campaign's worker, whose end is the verdict crash; here a process made for it."""
    pid = os.fork()
    if pid == 0:
        try:
            stepped([killed] * 3)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def leaves(file: Path, group: Group) -> Tensor:
    """Every rank says who it is, and waits for one that never comes; the last one is stopped before."""
    with file.open("a") as out:
        out.write(f"{os.getpid()}\n")
    return stopped(group)


@pytest.mark.parametrize("ranks", COUNTS)
def test_ranks_end_with_the_process_that_runs_them(ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "ranks"
    file.touch()
    pid = os.fork()
    if pid == 0:
        try:
            over_gloo([partial(leaves, file)] * ranks, timeout_s=60)
        finally:
            os._exit(0)
    while len(file.read_text().split()) < ranks or not any(state(rank) == "T" for rank in file.read_text().split()):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for rank in file.read_text().split():
        assert any(state(rank) in "ZX" or time.sleep(0.01) for _ in range(1000))


def state(pid: str) -> str:
    """A process's state; X: there is none. One that has ended may wait, as Z, for somebody to bury it."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def sleeps(group: Group) -> Tensor:
    if group.rank_in_group == 0:
        time.sleep(60)
    return group.all_reduce(own(group))


def test_a_rank_that_never_comes_ends_within_the_watchdogs_time() -> None:
    with pytest.raises(RankError, match=r"rank \d"):
        over_gloo([sleeps] * 2, timeout_s=1.0)


def parts_ways(group: Group) -> Tensor:
    return reduces(group) if group.rank_in_group == 0 else gathers(0, group)


def test_ranks_that_come_to_different_collectives_are_told() -> None:
    with pytest.raises(RankError, match=r"gather of .*, sum of"):
        stepped([parts_ways] * 2)


def stops_early(group: Group) -> Tensor:
    return own(group) if group.rank_in_group == 0 else reduces(group)


def test_a_rank_that_does_not_come_is_told() -> None:
    with pytest.raises(RankError, match="1 of 2 ranks came"):
        stepped([stops_early] * 2)


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    before = children()
    yield
    assert children() == before


def children() -> set[str]:
    """Process ids of this process's children."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def test_a_process_left_behind_would_be_seen() -> None:
    before = children()
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    assert children() == before | {str(pid)}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_nccl_says_in_one_line_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(RankError, match=r"^nccl: this torch is built without it$"):
        over_nccl([reduces] * 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RankError, match=r"^nccl: 2 ranks need as many GPUs; torch sees 1$"):
        over_nccl([reduces] * 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RankError, match=r"^nccl: ranks are forked"):
        over_nccl([reduces] * 2)


@pytest.mark.skipif(nccl_missing(2) is not None, reason=str(nccl_missing(2)))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_over_nccl(ranks: int) -> None:
    if (reason := nccl_missing(ranks)) is not None:
        pytest.skip(reason)
    parts = [torch.arange(12.0).reshape(4, 3) + 100 * r for r in range(ranks)]
    work = partial(on_gpu, reduces)
    assert all(torch.equal(x, sum(parts, torch.zeros(4, 3))) for x in over_nccl([work] * ranks))
    assert all(torch.equal(x, torch.cat(parts)) for x in over_nccl([partial(on_gpu, partial(gathers, 0))] * ranks))


def on_gpu(work: Callable[[Group], Tensor], group: Group) -> Tensor:
    with torch.device("cuda"):
        return work(group)
