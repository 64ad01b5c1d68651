"""What a rebuilt case consists of."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fuzz.buffers import Buffer
from fuzz.case import Case
from oracle.kinds import Role
from oracle.problem import Problem


@dataclass(frozen=True, eq=False)
class Instance:
    """A case with its tensors on one device.

    ``buffers`` by parameter name. ``slots`` int64 [T] on the CPU: where each token lives in the pool, -1 for a
    token that is not to be stored. ``linear``: the keys and values [T, H, D] that the pool holds or is to hold,
    on the CPU. ``problem``: what an attention operation has to solve. ``indices``: what an index_build has to
    return, on the CPU.
    """

    case: Case
    device: str
    buffers: dict[str, Buffer]
    slots: Tensor | None = None
    linear: dict[Role, Tensor] = field(default_factory=dict)
    problem: Problem | None = None
    indices: Tensor | None = None
