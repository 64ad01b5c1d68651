"""What batching the programs of a grid gains, and how the emulator compares with Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fuzz import registry
from fuzz.bench.report import BATCHED, INTERPRETER, Figure, NotMeasured
from fuzz.bench.timing import medians, shown, threads
from fuzz.buffers import Poison
from fuzz.call import call
from fuzz.case import Case, Placement, Pool, Probe, Sink, Skip, SlotMap
from fuzz.certify.compiled import load_kernels
from fuzz.engine.emulator import Options, session
from fuzz.instance import build
from oracle import philox
from oracle.convention import Granularity
from oracle.kinds import Engine, KVLayout, Operation, VLayout

GATHER = "sglang.shuffle_5d.gather"
TOKENS, HEADS, DIM = 64, 8, 128
COUNT = 16384
SEED = 3
_TIMEOUT_S = 300.0


def gather_case() -> Case:
    """64 tokens in pages of 16, 8 heads, D 128, bf16."""
    return Case(
        operation=Operation.KV_GATHER,
        seed=SEED,
        context_lens=(TOKENS,),
        query_lens=(),
        num_kv_heads=HEADS,
        group_size=1,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype="bf16",
        kv_dtype="bf16",
        kv_layout=KVLayout.SHUFFLE_5D,
        v_layout=VLayout.V5D,
        page_size=16,
        placement=Placement.SHUFFLED,
        pool=Pool.SPARE,
        index_dtype="int64",
        strided=False,
        causal=False,
        window=None,
        sinks=Sink.NONE,
        soft_cap=None,
        scale=None,
        q_descale=Granularity.NONE,
        k_descale=Granularity.NONE,
        v_descale=Granularity.NONE,
        skip=Skip.NONE,
        slot_map=SlotMap.NONE,
        probe=Probe.NORMAL,
    )


def batched_vs_serial() -> Figure:
    """Time of the gather emulated one program after the other, over that in batches. One thread."""
    target = registry.load()[GATHER]
    reason = registry.why_not(target, Engine.EMULATOR)
    if reason is not None:
        raise NotMeasured(reason)
    instance = build(gather_case(), Poison.POSITIVE)

    def run(options: Options) -> Callable[[], object]:
        def once() -> None:
            with session(options):
                call(target, instance)

        return once

    with threads(1):
        found = medians({"serial": run(Options(serial=True)), "batched": run(Options())}, 5)
    return Figure(
        BATCHED,
        found["serial"] / found["batched"],
        "times",
        f"one program after the other, {GATHER}, {TOKENS} tokens x {HEADS} heads x {DIM}, 1 thread",
        True,
        shown(found),
    )


def vs_interpreter() -> Figure:
    """Time of Triton's interpreter over that of the emulator, on one kernel of ours; in a process of its own."""
    if importlib.util.find_spec("triton") is None:
        raise NotMeasured("triton is not installed, and its interpreter comes with it")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fuzz.bench.emulator"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise NotMeasured(f"the interpreter failed: {last}")
    found: dict[str, float] = json.loads(done.stdout)
    return Figure(
        INTERPRETER,
        found["interpreter"] / found["emulator"],
        "times",
        f"TRITON_INTERPRET=1, our division kernel on {COUNT} elements, 1 thread",
        True,
        shown(found),
    )


def _operands() -> tuple[Tensor, Tensor]:
    return (
        philox.uniform_int(SEED, 0, COUNT, -1000, 1000).int(),
        philox.uniform_int(SEED, 1, COUNT, 1, 40).int(),
    )


def _compare() -> dict[str, float]:
    """Seconds of each, in a process in which Triton interprets."""
    compiled, emulated = load_kernels(Engine.CUDA), load_kernels(Engine.EMULATOR)
    a, b = _operands()
    torch.set_num_threads(1)
    return medians({"interpreter": lambda: compiled.divide(a, b), "emulator": lambda: emulated.divide(a, b)}, 5)


if __name__ == "__main__":
    print(json.dumps(_compare()))
