"""From a case to the problem and the physical tensors, bit-identical on any machine."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.buffers import Poison
from fuzz.case import Case
from fuzz.instance import attention, backend, copies, indices, merge
from fuzz.instance.model import Instance
from oracle.kinds import Operation, Role

__all__ = ["Instance", "Role", "build"]

_BUILDERS: dict[Operation, Callable[[Case, Poison, str], Instance]] = {
    Operation.KV_WRITE: copies.build_write,
    Operation.KV_GATHER: copies.build_gather,
    Operation.VARLEN_EXTEND: attention.build_extend,
    Operation.PAGED_DECODE: attention.build_decode,
    Operation.LSE_MERGE: merge.build_merge,
    Operation.INDEX_BUILD: indices.build_indices,
    Operation.BACKEND: backend.build_backend,
}


def build(case: Case, poison: Poison, device: str = "cpu") -> Instance:
    """Rebuild the tensors of ``case``, with ``poison`` wherever no data is."""
    return _BUILDERS[case.operation](case, poison, device)
