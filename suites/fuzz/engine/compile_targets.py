"""An adapter whose targets launch a small kernel of ours beside a gather that is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz.engine import loader
from oracle import Supports, declare
from oracle.precision import EXACT_COPY
from suites.fuzz.planted import COPY, gather_clean

KERNELS = Path(__file__).with_name("compile_kernels.py")


@loader.KernelLoader
def kernels() -> ModuleType:
    return loader.load_source(KERNELS, "attn_oracle_loaded.compile_kernels", {}, engines.current())


def _target(name: str, launch: Callable[[ModuleType], Any], **supports: Any) -> Any:
    def gather(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Any:
        launch(kernels())
        return gather_clean(k_cache, v_cache, slots)

    supported = Supports(dtypes=("bf16",), head_dims=(32,), num_kv_heads=(1,), **supports)
    return declare.kv_gather(name=name, convention=COPY, precision=EXACT_COPY, supports=supported)(gather)


def _total(count: int) -> Callable[[ModuleType], Any]:
    return lambda module: module.total[(1,)](torch.zeros(8), torch.zeros(1), COUNT=count)


def _by_machine(module: ModuleType) -> None:
    module.total[(1,)](torch.zeros(64), torch.zeros(1), COUNT=module.lanes())


def _narrow(module: ModuleType) -> None:
    module.narrow[(1,)](torch.zeros(64), torch.zeros(64, dtype=torch.float8_e4m3fnuz), BLOCK=64)


clean = _target("compile.clean", _total(4))
refused = _target("compile.refused", _total(3))
one_arch = _target("compile.one_arch", _narrow)
declared = _target("compile.declared", _narrow, archs=("gfx942", "gfx950"))
other_compiler = _target("compile.other_compiler", _total(4), compiler="other-triton")
by_machine = _target("compile.by_machine", _by_machine)
no_launch = _target("compile.no_launch", lambda module: None)
