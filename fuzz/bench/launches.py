"""What a device would be asked to do: kernels launched, transfers, and waits, counted on a machine that has none.

A `Remote` tensor says that it is on a GPU and holds its numbers on the CPU. Under `counted` every operation on one is
carried out there and counted, so that code takes the ways that it takes on a GPU, without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
_SILENT = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "lift_fresh", "_local_scalar_dense"}
)
"""Operations that launch nothing, beside views."""


_MIXED = frozenset({"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_"})
"""Operations that take tensors of both sides; others take those without a dimension alone."""


class Remote(torch.Tensor):
    """A tensor on an imagined GPU."""

    numbers: Tensor

    @staticmethod
    def of(inner: Tensor) -> Remote:
        """The numbers of a CPU tensor there."""
        remote = torch.Tensor._make_wrapper_subclass(
            Remote, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        remote.numbers = inner
        found: Remote = remote
        return found

    def tolist(self) -> Any:
        """As of any tensor on a device: it is copied first."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError("tensors on an imagined GPU are used within `counted`")


@dataclass
class Counts:
    """launches: kernels, by operation; copies: transfers from and to the device; waits: of the CPU for the device;
    moved: bytes that the kernels read and write, as if none were cached."""

    launches: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    waits: int = 0
    moved: int = 0

    @property
    def total(self) -> int:
        return sum(self.launches.values())

    def __str__(self) -> str:
        return f"{self.total} launches, {self.copies} transfers, {self.waits} waits, {self.moved / 1e9:.3g} GB"


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what is done on the imagined GPU inside the block."""
    counts = Counts()
    with _Counting(counts):
        yield counts


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        remote = any(isinstance(x, Remote) for x in tree_leaves((args, kwargs)))
        if name == "_local_scalar_dense":
            self.counts.waits += remote
        target = kwargs.get("device")
        there = torch.device(target).type == DEVICE.type if target is not None else remote
        if target is not None and there:
            kwargs["device"] = torch.device("cpu")
        if remote and name not in _MIXED and any(_is_on_cpu(x) for x in tree_leaves((args, kwargs))):
            raise RuntimeError(f"{name}: of tensors on the device and on the CPU")
        if remote != there and name == "_to_copy":
            self.counts.copies += 1
            self.counts.waits += not (there and kwargs.get("non_blocking"))
        if there and name == "nonzero":
            self.counts.waits += 1
        plain_args, plain_kwargs = tree_map(_inner, (args, kwargs))
        if any(_is(x) and x.device.type == DEVICE.type for x in tree_leaves((plain_args, plain_kwargs))):
            raise RuntimeError(f"{name}: a tensor that torch made on the device by itself, such as a list of indices")
        found = func(*plain_args, **plain_kwargs)
        if not there:
            return found
        copied = name == "_to_copy" and not remote
        if not (copied or func.is_view or name in _SILENT):
            self.counts.launches[name] += 1
            self.counts.moved += sum(x.nbytes for x in tree_leaves((plain_args, plain_kwargs, found)) if _is(x))
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], Remote):
            return args[0]
        if isinstance(kwargs.get("out"), Remote):
            return kwargs["out"]
        return tree_map(lambda x: Remote.of(x) if isinstance(x, Tensor) else x, found)


def _is(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_on_cpu(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, Remote) and x.dim() > 0 and x.device.type == "cpu"


def _inner(x: Any) -> Any:
    return x.numbers if isinstance(x, Remote) else x


def counts_of(run: Callable[[], object]) -> Counts:
    """Counts of one call, after one that does not count: what is kept for later calls is made in that."""
    with counted():
        run()
    with counted() as counts:
        run()
    return counts
