"""Several ranks of decode context parallel: in one process, step by step, or as real processes over gloo or NCCL.

A rank's code asks its group for collectives. In one process every rank has a thread of its own, of which one runs at a
time: each in its turn runs until its next collective and is stopped there; once all have come, the collective is
computed, in the order of the ranks, and they go on with its result. The same every time.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fuzz.tensor_data import from_data, to_data

MOST_COLLECTIVES = 8
"""A rank that asks for more is taken to loop."""


GRACE_S = 0.5
"""Once a rank has complained, how long the others are listened to: what it complains of may be another's death."""

_PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


class Group(Protocol):
    """What the code under test asks of a group of ranks: the operations of sglang's ``GroupCoordinator`` in use."""

    world_size: int
    rank_in_group: int

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Every rank's tensor, concatenated along ``dim``."""

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor) -> None:
        """Every rank's tensor, one after the other, into ``out``."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks."""

    def reduce_scatter_along_dim(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's share, along ``dim``, of the sum over ranks."""

    def all_to_all_single(self, out: Tensor, tensor: Tensor) -> None:
        """Piece r of this rank's tensor goes to rank r; what arrives is in ``out``, in the order of the ranks."""


Rank = Callable[[Group], Tensor]
"""The work of one rank."""

Run = Callable[[Sequence[Rank]], list[Tensor]]
"""Run every rank's work; their results, in the order of the ranks."""


class RankError(RuntimeError):
    """A rank raised, died, or did not come to the end in time. One line."""


class _Abandoned(BaseException):
    """Ends the work of a rank whose group has come to an end without it."""


class SteppedGroup(threading.Thread):
    """One rank's view in one process, and the thread that does its work."""

    def __init__(self, rank: int, ranks: int, work: Rank) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank_in_group, self.world_size = rank, ranks
        self.asked: tuple[str, Tensor] | None = None
        """The collective that it has come to, None at the end."""
        self.result: Tensor | None = None
        self._work, self._error = work, None
        self._answer: Tensor | None = None
        self._turn, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self._abandoned = False
        self.start()

    def run(self) -> None:
        """The work, once it is its turn."""
        self._turn.acquire()
        try:
            if not self._abandoned:
                self.result = self._work(self)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the group is run
            self._error = error
        self.asked = None
        self._over.release()

    def advance(self, answer: Tensor | None) -> None:
        """Let it run, with the result of its collective, until the next or the end. Raises what it raises."""
        self._answer = answer
        self._turn.release()
        self._over.acquire()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End its work where it stands."""
        self._abandoned = True
        self._turn.release()
        self.join()

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``Group``."""
        return self._collect("gather", tensor).movedim(0, dim).flatten(dim, dim + 1)

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor) -> None:
        """See ``Group``."""
        out.copy_(self._collect("gather", tensor).flatten(0, 1))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See ``Group``. The tensor itself is left as it is."""
        return self._collect("sum", tensor)

    def reduce_scatter_along_dim(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``Group``."""
        _divisible(tensor, dim, self.world_size)
        return self._collect("sum", tensor).chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    def all_to_all_single(self, out: Tensor, tensor: Tensor) -> None:
        """See ``Group``."""
        _divisible(tensor, 0, self.world_size)
        pieces = [row.chunk(self.world_size)[self.rank_in_group] for row in self._collect("gather", tensor)]
        out.copy_(torch.cat(pieces))

    def _collect(self, kind: str, tensor: Tensor) -> Tensor:
        self.asked = (kind, tensor.clone())
        self._over.release()
        self._turn.acquire()
        if self._abandoned or self._answer is None:
            raise _Abandoned
        return self._answer.clone()


def _divisible(tensor: Tensor, dim: int, ranks: int) -> None:
    if tensor.shape[dim] % ranks:
        raise ValueError(f"{tensor.shape[dim]} entries do not divide among {ranks} ranks")


def stepped(work: Sequence[Rank]) -> list[Tensor]:
    """Run every rank's work in this process; returns their results. Raises ``RankError`` if they part ways."""
    groups = [SteppedGroup(rank, len(work), run) for rank, run in enumerate(work)]
    answer = None
    try:
        for _ in range(MOST_COLLECTIVES + 1):
            for group in groups:
                group.advance(answer)
            results = [group.result for group in groups if group.result is not None]
            if len(results) == len(groups):
                return results
            answer = _collective([group.asked for group in groups if group.asked is not None], len(work))
        raise RankError(f"the ranks asked for more than {MOST_COLLECTIVES} collectives")
    finally:
        for group in groups:
            group.abandon()


def _collective(asked: Sequence[tuple[str, Tensor]], ranks: int) -> Tensor:
    kinds = {(kind, tensor.shape, tensor.dtype) for kind, tensor in asked}
    if len(asked) != ranks or len(kinds) != 1:
        said = ", ".join(sorted(f"{kind} of {dtype} {list(shape)}" for kind, shape, dtype in kinds))
        raise RankError(f"{len(asked)} of {ranks} ranks came to a collective: {said}")
    tensors = [tensor for _, tensor in asked]
    if asked[0][0] == "gather":
        return torch.stack(tensors)
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


class ProcessGroup:
    """One rank's view of real processes, through torch.distributed."""

    def __init__(self) -> None:
        self.rank_in_group, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``Group``."""
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        torch.distributed.all_gather(found, tensor.contiguous())
        return torch.cat(found, dim)

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor) -> None:
        """See ``Group``."""
        torch.distributed.all_gather_into_tensor(out, tensor.contiguous())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See ``Group``."""
        torch.distributed.all_reduce(tensor)
        return tensor

    def reduce_scatter_along_dim(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``Group``."""
        _divisible(tensor, dim, self.world_size)
        whole = tensor.movedim(dim, 0).contiguous()
        own = torch.empty_like(whole[: len(whole) // self.world_size])
        # torch 2.13 gives it another name.
        scatter = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)
        scatter(own, whole)
        return own.movedim(0, dim).contiguous()

    def all_to_all_single(self, out: Tensor, tensor: Tensor) -> None:
        """See ``Group``."""
        _divisible(tensor, 0, self.world_size)
        torch.distributed.all_to_all_single(out, tensor.contiguous())


def over_gloo(work: Sequence[Rank], timeout_s: float = 30.0) -> list[Tensor]:
    """Run every rank's work in a process of its own, forked from this one, with collectives over gloo.

    Raises ``RankError`` if a rank raises, dies or takes longer than ``timeout_s``; no process is left behind.
    """
    return _in_processes(work, "gloo", timeout_s)


def over_nccl(work: Sequence[Rank], timeout_s: float = 120.0) -> list[Tensor]:
    """The same over NCCL: rank r has GPU r as its current device. Tensors are made, or moved there, by the work.

    Raises ``RankError`` where ``nccl_missing`` says why not.
    """
    if (reason := nccl_missing(len(work))) is not None:
        raise RankError(reason)
    return _in_processes(work, "nccl", timeout_s)


def nccl_missing(count: int) -> str | None:
    """Why ``count`` ranks cannot run over NCCL from this process, in one line, or None."""
    if not torch.distributed.is_nccl_available():
        return "nccl: this torch is built without it"
    # Counting does not begin to use a GPU: a process that did could not be forked.
    if (found := torch.cuda.device_count()) < count:
        return f"nccl: {count} ranks need as many GPUs; torch sees {found}"
    if torch.cuda.is_initialized():
        return "nccl: ranks are forked, which a process that uses its GPU already cannot be"
    return None


def _in_processes(work: Sequence[Rank], backend: str, timeout_s: float) -> list[Tensor]:
    with tempfile.TemporaryDirectory(prefix="attn-oracle-ranks-") as folder:
        store = Path(folder, "store")
        children = [_fork(rank, work, store, backend, timeout_s) for rank in range(len(work))]
        try:
            return _answers(children, time.monotonic() + timeout_s)
        finally:
            for child in children:
                child.end()


@dataclass
class _Child:
    """A rank's process, the descriptor that it answers on, and what has come so far."""

    rank: int
    pid: int
    channel: int
    received: bytes = b""
    ended: int | None = None
    """How, once it has been waited for."""

    def end(self) -> None:
        os.close(self.channel)
        if self.ended is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def complaint(self) -> str | None:
        """What went wrong, once it has closed its descriptor, or None."""
        if not self.received:
            self.ended = os.waitpid(self.pid, 0)[1] if self.ended is None else self.ended
            by = f" by {signal.Signals(self.ended).name}" if os.WIFSIGNALED(self.ended) else ""
            return f"rank {self.rank} was ended{by} before it answered"
        answer = json.loads(self.received)
        return f"rank {self.rank}: {answer['error']}" if "error" in answer else None

    def silent(self) -> str:
        """How to call it where no answer comes: its number, and whether somebody stopped it."""
        try:
            state = Path("/proc", str(self.pid), "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = ""
        return f"{self.rank} (stopped)" if state in ("T", "t") else str(self.rank)

    def tensor(self) -> Tensor:
        """The answer, if there is nothing to complain of."""
        return from_data(json.loads(self.received))["result"]


def _fork(rank: int, work: Sequence[Rank], store: Path, backend: str, timeout_s: float) -> _Child:
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(write)
        return _Child(rank, pid, read)
    _end_with(parent)
    try:
        answer = _run_rank(rank, work, store, backend, timeout_s)
    except BaseException as error:  # noqa: BLE001 - the boundary of a process: the parent hears of whatever it is
        said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        answer = {"error": said}
    with open(write, "wb") as channel:
        channel.write(json.dumps(answer).encode())
    os._exit(0)


def _end_with(parent: int) -> None:
    """Let this process be killed when ``parent`` ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run_rank(rank: int, work: Sequence[Rank], store: Path, backend: str, timeout_s: float) -> dict[str, Any]:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.FileStore(str(store), len(work)),
        rank=rank,
        world_size=len(work),
        timeout=timedelta(seconds=timeout_s),
    )
    return to_data({"result": work[rank](ProcessGroup()).contiguous().cpu()})


def _answers(children: Sequence[_Child], deadline: float) -> list[Tensor]:
    """Every rank's result. The first complaint ends the wait, but for those that it may come from: see ``GRACE_S``."""
    open_ = {child.channel: child for child in children}
    complaints: list[str] = []
    while open_:
        ready, _, _ = select.select(list(open_), [], [], max(0.0, deadline - time.monotonic()))
        if not ready and not complaints:
            raise RankError(f"no answer in time from rank {', '.join(child.silent() for child in open_.values())}")
        if not ready:
            break
        for channel in ready:
            piece = os.read(channel, 1 << 20)
            open_[channel].received += piece
            if not piece and (said := open_.pop(channel).complaint()) is not None:
                complaints.append(said)
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if complaints:
        # A rank that was killed is why the others lost their connections; one that was stopped, why they gave up.
        said = min(complaints, key=lambda said: " was ended" not in said)
        stopped = [child.silent() for child in open_.values() if child.silent() != str(child.rank)]
        raise RankError(f"{said}; no answer from rank {', '.join(stopped)}" if stopped else said)
    return [child.tensor() for child in children]
