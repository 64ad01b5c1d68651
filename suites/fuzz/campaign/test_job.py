"""How many workers there are; what one does before its first case, and after a target has raised."""

from __future__ import annotations

import pytest
import torch

from fuzz import engine as engines
from fuzz.campaign import job
from fuzz.commands import default_jobs
from oracle.kinds import Engine

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.mark.parametrize(("cores", "gib", "jobs"), [(4, 80, 4), (64, 141, 16), (16, 8, 8), (8, 0, 1)])
def test_workers_of_a_gpu(monkeypatch: pytest.MonkeyPatch, cores: int, gib: int, jobs: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(engines, "memory_bytes", lambda: (gib << 30) + 1)
    assert default_jobs(Engine.CUDA) == default_jobs(Engine.HIP) == jobs
    assert default_jobs(Engine.EMULATOR) == cores


def broken(*arguments: object, **options: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def crashed(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> dict[str, object]:
    monkeypatch.setattr(engines, "_current", engine)
    return job._crashed(ValueError("odd"))


def test_a_process_goes_on_while_its_device_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(engines, "device", lambda engine: "cpu")
    found = crashed(monkeypatch, Engine.CUDA)
    assert found["retire"] is False
    assert "odd" in str(found)


@pytest.mark.parametrize("engine", [Engine.CUDA, Engine.HIP])
def test_an_error_that_sticks_to_the_device_ends_the_process(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert crashed(monkeypatch, engine)["retire"] is True


def test_the_emulator_always_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert crashed(monkeypatch, Engine.EMULATOR)["retire"] is False


@NO_GPU
def test_without_a_device_there_is_nothing_to_warm() -> None:
    engines.warm(Engine.CUDA)
    assert not torch.cuda.is_initialized()
    assert not engines.works(Engine.CUDA)


def test_a_device_and_its_driver_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    asked: list[str] = []

    class Driver:
        def get_current_target(self) -> None:
            asked.append("driver")

    monkeypatch.setattr(torch, "zeros", lambda *shape, device: asked.append(device))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    engines.warm(Engine.CUDA)
    assert asked == ["cuda", "driver"]
    engines.warm(Engine.EMULATOR)
    assert asked == ["cuda", "driver"]
