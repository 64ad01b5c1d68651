"""Workers forked from a server with torch preloaded use a GPU, and survive its faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.campaign.reply import Status
from fuzz.campaign.server import Server
from fuzz.campaign.worker import Job, Worker

LONG = 120.0
MULTIPLY = {"do": "multiply", "device": "cuda"}

# Asking torch would cost seconds of each run without a GPU.
_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
pytestmark = pytest.mark.skipif(not _GPU, reason="needs a GPU")


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Server() as server, Worker(Job("suites.fuzz.campaign.faults:misbehave"), server) as worker:
        yield worker


def product(worker: Worker) -> int:
    """The pid of the worker that could compute it."""
    value = worker.run(MULTIPLY, LONG).value
    assert value is not None
    assert value["sum"] == 256.0**3
    pid: int = value["pid"]
    return pid


def test_error_that_sticks(worker: Worker) -> None:
    pid = product(worker)
    reply = worker.run({"do": "cuda_assert"}, LONG)
    assert reply.value is not None
    assert "device-side assert" in reply.value["error"]
    assert reply.value["pid"] == pid
    assert product(worker) != pid


def test_kernel_that_hangs(worker: Worker) -> None:
    product(worker)
    reply = worker.run({"do": "cuda_hang"}, 2.0)
    assert reply.status is Status.HANG
    assert "in cuda_hang" in reply.output
    product(worker)


def test_crash_and_restart(worker: Worker) -> None:
    product(worker)
    assert worker.run({"do": "segfault"}, LONG).status is Status.CRASH
    reply = worker.run(MULTIPLY, LONG)
    assert reply.ok
    print(f"first product after a crash: {sum(reply.seconds.values()):.2f} s")
