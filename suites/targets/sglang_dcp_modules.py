"""sglang's modules for decode context parallel, and what they find out about their rank.

sglang keeps a rank's group in a global; so does this module, one for each thread, for as long as ``as_rank`` says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fuzz.engine.loader import KernelLoader
from oracle.kinds import Engine
from suites.targets import ranks, sglang_wheel

KERNELS = ("srt/layers/dcp/kernels.py", "kernels/ops/attention/dcp_kernels.py")
"""Where the kernels live: up to 0.5.16, and later."""

COMM = ("srt/layers/dcp/comm.py",)
LAYOUT = ("srt/layers/dcp/layout.py",)
METADATA = ("srt/layers/dcp/metadata.py",)
PLANNER = ("srt/layers/dcp/planner.py",)


class _Here(threading.local):
    """What the code of this thread is to find."""

    group: ranks.Group | None = None
    device: torch.device | str = "cpu"


_here = _Here()


@contextmanager
def as_rank(group: ranks.Group, device: torch.device | str = "cpu") -> Iterator[None]:
    """Within the block sglang's code takes itself for the rank of ``group``, and makes its tensors on ``device``."""
    before = _here.group, _here.device
    _here.group, _here.device = group, device
    try:
        yield
    finally:
        _here.group, _here.device = before


def _current() -> ranks.Group:
    if _here.group is None:
        raise RuntimeError("sglang asks for its rank outside of as_rank")
    return _here.group


def _parallel() -> SimpleNamespace:
    group = _current()
    return SimpleNamespace(
        dcp_enabled=group.world_size > 1, dcp_size=group.world_size, dcp_rank=group.rank_in_group, dcp_group=group
    )


class _Translator:
    """As ``KVIndexTranslator`` without a unified pool: a widened slot becomes a row of its owner's pool."""

    def translate_dcp_read_ids(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows."""
        return slots // _current().world_size


def given(*, cuda: bool = True) -> dict[str, dict[str, Any]]:
    """What the modules are told: by older versions' names, and by later ones'."""
    return {
        "sglang.srt.distributed.parallel_state": {
            "get_dcp_group": _current,
            "get_dcp_group_no_assert": _current,
            "get_dcp_rank": lambda: _current().rank_in_group,
            "get_dcp_world_size": lambda: _current().world_size,
        },
        "sglang.srt.runtime_context": {
            "get_parallel": _parallel,
            "get_device": lambda: SimpleNamespace(device=_here.device),
        },
        "sglang.srt.server_args": {"get_global_server_args": lambda: SimpleNamespace(device=_here.device)},
        "sglang.srt.model_executor.forward_context": {
            "get_attn_backend": lambda: SimpleNamespace(kv_index_translator=_Translator())
        },
        "sglang.srt.distributed.device_communicators.pynccl_allocator": {
            "use_symmetric_memory": lambda group: nullcontext()
        },
        "sglang.srt.utils": {"is_hip": lambda: False, "is_cuda": lambda: cuda, "is_xpu": lambda: False},
    }


@KernelLoader
def kernels() -> ModuleType:
    """Index lists, the correction of partial outputs and, later, the combination after an all-to-all."""
    return sglang_wheel.load(KERNELS, {})


@KernelLoader
def comm() -> ModuleType:
    """Merges of partial outputs, and the gathering of keys and values."""
    own = vars(kernels())
    names = ("sglang.srt.layers.dcp.kernels", "sglang.kernels.ops.attention.dcp_kernels")
    return sglang_wheel.load(COMM, given() | dict.fromkeys(names, own))


@KernelLoader
def layout() -> ModuleType:
    """Lengths and indices of one rank."""
    return sglang_wheel.load(LAYOUT, given() | {"sglang.srt.layers.dcp.comm": vars(comm())})


@KernelLoader
def planner() -> ModuleType:
    """Index lists of a batch."""
    metadata = sglang_wheel.load(METADATA, {})
    own = {
        "sglang.srt.layers.dcp.comm": vars(comm()),
        "sglang.srt.layers.dcp.layout": vars(layout()),
        "sglang.srt.layers.dcp.metadata": vars(metadata),
    }
    names = ("sglang.srt.layers.dcp.kernels", "sglang.kernels.ops.attention.dcp_kernels")
    return sglang_wheel.load(PLANNER, given() | own | dict.fromkeys(names, vars(kernels())))


def later() -> bool:
    """Whether the installed sglang is later than 0.5.16."""
    return sglang_wheel.has(KERNELS[1:])


def missing(engine: Engine, function: str | None = None) -> str | None:
    """Why the modules, or a function of ``comm``, cannot be had here, in one line, or None."""
    for files in (KERNELS, COMM, LAYOUT):
        if (reason := sglang_wheel.missing(files, engine)) is not None:
            return reason
    return None if function is None else sglang_wheel.lacks(COMM, function)
