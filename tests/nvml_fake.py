"""A machine's NVML without the machine: `pynvml` itself with its errors, its structures and the driver's answers faked."""

from ctypes import sizeof
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml

GIB = 2**30


@dataclass
class FakeCard:
    """One GPU: its processes may use more than `used_bytes` says only by mistake, as on a real one."""

    name: str = "NVIDIA H200"
    total_bytes: int = 140 * GIB
    reserved_bytes: int = GIB // 2
    used_bytes: int = 0
    busy_percent: int | None = 0
    compute: dict[int, int | None] = field(default_factory=dict)
    graphics: dict[int, int | None] = field(default_factory=dict)


class FakeNvml:
    """As `pynvml` behaves: unusable before nvmlInit, errors by its own classes, memory in two versions."""

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(self, *cards: FakeCard, names: dict[int, str] | None = None, driver_version: int = 580) -> None:
        self.cards = list(cards)
        self.names = names or {}
        self.driver_version = driver_version
        self.open = 0
        self.lost = False

    def _ask(self) -> None:
        if not self.open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._ask()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        self._ask()
        return self.cards[index]

    def nvmlDeviceGetName(self, handle: FakeCard) -> str:
        self._ask()
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeCard) -> str:
        self._ask()
        return f"GPU-{self.cards.index(handle):08d}"

    def nvmlDeviceGetMemoryInfo(self, handle: FakeCard, version: int | None = None):
        self._ask()
        if version is None:
            memory = pynvml.c_nvmlMemory_t()
            memory.used = handle.used_bytes + handle.reserved_bytes
        else:
            if self.driver_version < 510:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            memory = pynvml.c_nvmlMemory_v2_t()
            if version != sizeof(memory) | 2 << 24:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
            memory.used, memory.reserved = handle.used_bytes, handle.reserved_bytes
        memory.total = handle.total_bytes
        memory.free = handle.total_bytes - handle.used_bytes - handle.reserved_bytes
        return memory

    def nvmlDeviceGetUtilizationRates(self, handle: FakeCard):
        self._ask()
        if handle.busy_percent is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=handle.busy_percent, memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeCard):
        return self._processes(handle.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeCard):
        return self._processes(handle.graphics)

    def _processes(self, used_by_pid: dict[int, int | None]):
        self._ask()
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in used_by_pid.items()]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        self._ask()
        if pid not in self.names:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.names[pid]
