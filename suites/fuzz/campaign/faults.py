"""Jobs that misbehave on purpose: one function `misbehave`, which does what the request's `do` names.

The phases are announced as a job of the product does; the fault happens in the phase `at` (default: kernel).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Request = dict[str, Any]
_FAULTS: dict[str, Callable[[Request], Any]] = {}
_SETUP: dict[str, Any] = {}
_PHASES = ("generate", "kernel", "oracle", "checks")


def set_up(setup: dict[str, Any]) -> None:
    if setup.get("raise"):
        raise ValueError("this set-up fails")
    _SETUP.update(setup)


def misbehave(request: Request, progress: Callable[[str], None]) -> Any:
    value: Any = {}
    request["progress"] = progress
    for phase in _PHASES:
        progress(phase)
        if phase == request.get("at", "kernel"):
            value = _FAULTS[request["do"]](request)
    return value


def fault(function: Callable[[Request], Any]) -> Callable[[Request], Any]:
    _FAULTS[function.__name__] = function
    return function


@fault
def nothing(request: Request) -> Any:
    return {"echo": request.get("echo"), "pid": os.getpid(), "setup": _SETUP}


@fault
def sleep(request: Request) -> Any:
    time.sleep(request["seconds"])
    return nothing(request)


@fault
def retire(request: Request) -> Any:
    return {**nothing(request), "retire": True}


@fault
def segfault(request: Request) -> Any:
    ctypes.string_at(0)


@fault
def abort(request: Request) -> Any:
    print("about to abort")
    os.abort()


@fault
def exit_quietly(request: Request) -> Any:
    os._exit(request["code"])


@fault
def system_exit(request: Request) -> Any:
    sys.exit(3)


@fault
def raise_in_str(request: Request) -> Any:
    class Nasty(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise Nasty


@fault
def raise_lines(request: Request) -> Any:
    print("printed before it raised")
    raise ValueError("first line\nsecond \udcff line")


@fault
def recurse(request: Request) -> Any:
    return recurse(request)


@fault
def hang_deaf(request: Request) -> Any:
    """Ignores SIGTERM and SIGINT."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        time.sleep(60)


@fault
def hang_in_c(request: Request) -> Any:
    """Sleeps in C without releasing the interpreter lock, as a stuck kernel launch does."""
    while True:
        ctypes.PyDLL(None).sleep(60)


@fault
def hang_with_descendants(request: Request) -> Any:
    """Its pids go to the file `pids`: a child, a grandchild in a session of its own, both deaf."""
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
        _note_pid(request)
        hang_deaf(request)
    return hang_deaf(request)


@fault
def leave_daemon(request: Request) -> Any:
    """A double fork; the daemon holds every descriptor of the worker. The job replies, or dies by `then`."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _note_pid(request)
            hang_deaf(request)
        os._exit(0)
    while not Path(request["pids"]).exists():
        time.sleep(0.01)
    return _FAULTS[request["then"]](request)


def _note_pid(request: Request) -> None:
    with open(request["pids"], "a") as file:
        file.write(f"{os.getpid()}\n")


@fault
def fork_and_return_twice(request: Request) -> Any:
    child = os.fork()
    return {**nothing(request), "forked": child}


@fault
def leave_threads(request: Request) -> Any:
    """A thread that prints and never ends, and one that is no daemon."""

    def chatter() -> None:
        while True:
            print("chatter")
            time.sleep(0.001)

    threading.Thread(target=chatter, daemon=True).start()
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return nothing(request)


@fault
def report_for_ever(request: Request) -> Any:
    """A thread that goes on reporting progress of a request that is answered."""

    def report() -> None:
        while True:
            request["progress"]("late")
            time.sleep(0.0005)

    threading.Thread(target=report, daemon=True).start()
    return nothing(request)


@fault
def crash_later(request: Request) -> Any:
    """Replies, and dies a moment later."""
    threading.Timer(0.05, os._exit, [7]).start()
    return nothing(request)


@fault
def close_low_descriptors(request: Request) -> Any:
    os.closerange(0, 100)
    return nothing(request)


@fault
def close_all_descriptors(request: Request) -> Any:
    os.closerange(0, 4096)
    return nothing(request)


@fault
def close_all_and_hang(request: Request) -> Any:
    os.closerange(0, 4096)
    return hang_deaf(request)


@fault
def replace_descriptors(request: Request) -> Any:
    """Every socket of the process becomes another one."""
    for descriptor in _sockets():
        one, _two = socket.socketpair()
        os.dup2(one.fileno(), descriptor)
    return nothing(request)


@fault
def write_into_sockets(request: Request) -> Any:
    for descriptor in _sockets():
        os.write(descriptor, b"\x00\xffgarbage\n{not json\n")
    return nothing(request)


def _sockets() -> list[int]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                found.append(int(entry))
        except OSError:  # the descriptor of the listing itself
            continue
    return found


@fault
def print_garbage(request: Request) -> Any:
    """Through Python, through C and through the descriptor, some megabytes; ends as `then` says."""
    libc = ctypes.CDLL(None)
    libc.puts(b'{"id": 1, "value": {}}')
    print('{"id": 1, "value": {}}')
    for _ in range(64):
        os.write(1, b"\x00\xff{\n" * 16384)
        os.write(2, b"\xfe" * 65536)
    libc.puts(b"last words in C")
    print("last words in Python")
    return _FAULTS[request["then"]](request)


@fault
def reply_nothing(request: Request) -> Any:
    return None


@fault
def reply_no_json(request: Request) -> Any:
    return {"set": {1, 2}}


@fault
def reply_large(request: Request) -> Any:
    return {"text": "x" * request["bytes"]}


@fault
def eat_memory(request: Request) -> Any:
    eaten = []
    while True:
        eaten.append(bytearray(b"x" * (8 << 20)))
        time.sleep(0.002)


@fault
def kill_self(request: Request) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@fault
def kill_server(request: Request) -> Any:
    """The first time only: whether it is the first is known by the file `once`."""
    once = Path(request["once"])
    if not once.exists():
        once.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return nothing(request)


@fault
def mark_then_fail_when_used(request: Request) -> Any:
    """Fails in a process that has run before, as after memory corruption."""
    return _FAULTS[request["then"]](request) if _SETUP.get("used") else nothing(request)


@fault
def corrupt(request: Request) -> Any:
    _SETUP["used"] = True
    return nothing(request)


@fault
def stack_overflow_in_c(request: Request) -> Any:
    """An endless recursion through C, of which Python does not keep count."""
    libc = ctypes.CDLL(None)
    compare_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    array = (ctypes.c_int * 2)()

    def recurse(_a: int, _b: int) -> int:
        libc.qsort(array, 2, 4, compare)
        return 0

    compare = compare_type(recurse)
    sys.setrecursionlimit(10**9)
    libc.qsort(array, 2, 4, compare)


@fault
def multiply(request: Request) -> Any:
    """A matrix product on `device`, on two threads where it is the CPU."""
    import torch

    torch.set_num_threads(2)
    square = torch.ones(256, 256, device=request["device"])
    return {"sum": float((square @ square).sum()), "pid": os.getpid()}


@fault
def cuda_assert(request: Request) -> Any:
    """A failed assertion in a kernel: the error sticks to the process, so the job asks for another."""
    import torch

    try:
        torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")].cpu()
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0], "pid": os.getpid(), "retire": True}
    return {}


@fault
def cuda_hang(request: Request) -> Any:
    import torch

    torch.cuda._sleep(10**13)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
