"""NVML as seen through pynvml, if installed: memory in use is this process's, and sensors report an idle card."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches

_IDLE_CELSIUS = 40
_DRIVER = "580.159"


def install(cards: Cards, patches: Patches) -> None:
    """Replace pynvml's functions; a handle is a card's index."""
    try:
        import pynvml
    except ImportError:
        return

    def handle(index: Any) -> int:
        cards.check(int(index))
        return int(index)

    def used_bytes(index: int) -> int:
        allocator = cards.at(index).allocator
        return allocator.capacity_bytes - allocator.free_bytes

    def memory(index: int, version: Any = None) -> SimpleNamespace:
        total, used = cards.at(index).allocator.capacity_bytes, used_bytes(index)
        return SimpleNamespace(total=total, used=used, free=total - used, reserved=0, version=version)

    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlInitWithFlags": lambda flags: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: _DRIVER,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetIndex": handle,
        "nvmlDeviceGetName": lambda index: cards.at(index).gpu.name,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": lambda index: [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=used_bytes(index))
        ],
        "nvmlDeviceGetUtilizationRates": lambda index: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetTemperature": lambda index, sensor=0: _IDLE_CELSIUS,
        "nvmlDeviceGetPowerUsage": lambda index: cards.at(index).gpu.power_w * 1000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda index: cards.at(index).gpu.power_w * 1000,
        "nvmlDeviceGetClockInfo": lambda index, kind=0: cards.at(index).gpu.clock_mhz,
        "nvmlDeviceGetCudaComputeCapability": lambda index: cards.at(index).gpu.compute_capability,
    }
    patches.set_all(pynvml, {name: function for name, function in functions.items() if hasattr(pynvml, name)})
