"""Kernels that end or stop the process that compiles them. For the real Triton only; never imported."""

import triton
import triton.language as tl


@triton.constexpr_function
def _abort():
    import os  # Triton refuses functions of C that it finds among the globals

    print("LLVM ERROR: planted", flush=True)
    os.abort()


@triton.constexpr_function
def _sleep():
    import time

    time.sleep(3600)


@triton.constexpr_function
def _fail():
    print("kernel.py:1:2: error: planted pass failure", flush=True)
    raise KeyboardInterrupt


@triton.jit
def aborts(target):
    _abort()
    tl.store(target, 1.0)


@triton.jit
def hangs(target):
    _sleep()
    tl.store(target, 1.0)


@triton.jit
def fails(target):
    _fail()
    tl.store(target, 1.0)
