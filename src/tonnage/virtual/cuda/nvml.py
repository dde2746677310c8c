"""NVML as pynvml answers it, where that is installed: memory in use is the process's, sensors read an idle card."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.device import Device

_IDLE_CELSIUS = 40
_DRIVER = "580.159"


class _Nvml:
    """A handle is a card's index."""

    def __init__(self, cards: Cards) -> None:
        self.cards = cards

    def used_bytes(self, index: int) -> int:
        allocator = self.cards.at(index).allocator
        return allocator.capacity_bytes - allocator.free_bytes

    def memory(self, index: int, version: Any = None) -> SimpleNamespace:
        total, used = self.cards.at(index).allocator.capacity_bytes, self.used_bytes(index)
        return SimpleNamespace(total=total, used=used, free=total - used, reserved=0, version=version)

    def processes(self, index: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.used_bytes(index))]

    def device(self, index: int) -> Device:
        return self.cards.at(index)


def install(cards: Cards, patches: Patches) -> None:
    """Answer in pynvml's place."""
    try:
        import pynvml
    except ImportError:
        return
    nvml = _Nvml(cards)
    for name, function in _functions(nvml).items():
        if hasattr(pynvml, name):
            patches.set(pynvml, name, function)


def _functions(nvml: _Nvml) -> dict[str, Callable[..., Any]]:
    def handle(index: Any) -> int:
        nvml.cards.check(int(index))
        return int(index)

    return {
        "nvmlInit": lambda: None,
        "nvmlInitWithFlags": lambda flags: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: _DRIVER,
        "nvmlDeviceGetCount": lambda: len(nvml.cards),
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetIndex": handle,
        "nvmlDeviceGetName": lambda index: nvml.device(index).gpu.name,
        "nvmlDeviceGetMemoryInfo": nvml.memory,
        "nvmlDeviceGetComputeRunningProcesses": nvml.processes,
        "nvmlDeviceGetUtilizationRates": lambda index: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetTemperature": lambda index, sensor=0: _IDLE_CELSIUS,
        "nvmlDeviceGetPowerUsage": lambda index: nvml.device(index).gpu.power_w * 1000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda index: nvml.device(index).gpu.power_w * 1000,
        "nvmlDeviceGetClockInfo": lambda index, kind=0: nvml.device(index).gpu.clock_mhz,
        "nvmlDeviceGetCudaComputeCapability": lambda index: nvml.device(index).gpu.compute_capability,
    }
