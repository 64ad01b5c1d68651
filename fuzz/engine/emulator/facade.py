"""Real modules as loaded files shall see them where the machine lacks what they ask for."""

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Facade(ModuleType):
    """A module that answers some names itself and leaves the others, and its submodules, to a real one."""

    def __init__(self, real: ModuleType, **names: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(names, _real=real)

    @property
    def real(self) -> ModuleType:
        """The module behind it."""
        found: ModuleType = self.__dict__["_real"]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@dataclass(frozen=True)
class Device:
    """What `torch.cuda` shall say of the device that host code asks about.

    `arch`: AMD's name, None for NVIDIA. Launchers choose block sizes and paths by these.
    """

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    multi_processor_count: int = 132
    warp_size: int = 32
    arch: str | None = None


H200 = Device()
MI300X = Device("AMD Instinct MI300X", (9, 4), 304, 64, "gfx942")
MI350X = Device("AMD Instinct MI350X", (9, 5), 256, 64, "gfx950")


def torch_with(device: Device) -> Facade:
    """`torch` whose `torch.cuda` answers queries as on `device`; tensors stay where they are, on the CPU.

    For `imports={"torch": torch_with(H200)}`. `torch.version.hip` tells the vendors apart.
    """
    major, minor = device.capability
    properties = SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        multi_processor_count=device.multi_processor_count,
        warp_size=device.warp_size,
        gcnArchName=device.arch or "",
    )
    cuda = Facade(
        torch.cuda,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_capability=lambda device=None: (major, minor),
        get_device_name=lambda device=None: properties.name,
        get_device_properties=lambda device=None: properties,
        is_available=lambda: True,
        synchronize=lambda device=None: None,
    )
    version = Facade(torch.version, hip="6.4" if device.arch else None, cuda=None if device.arch else "12.8")
    return Facade(torch, cuda=cuda, version=version)
