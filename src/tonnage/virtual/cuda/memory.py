"""The caching allocator's part of `torch.cuda`: statistics, limits, settings, raw allocations; pinned host memory."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tonnage.allocator import BadAllocatorSettings
from tonnage.virtual.cuda.cards import Cards, UnmodelledCall
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.device import OutOfDeviceMemory
from tonnage.virtual.session import active

_HOST_COUNTERS = ("allocations", "active_requests", "allocated_bytes", "active_bytes")
_HOST_TIMES = dict.fromkeys(("total", "max", "min", "count", "avg"), 0)


class _Memory:
    """The functions of `torch._C` about a card's memory, under their names there."""

    def __init__(self, cards: Cards) -> None:
        self.cards, self.library = cards, cards.library
        self.fractions = [device.allocator.settings.memory_fraction for device in cards.devices]

    def _cuda_memoryStats(self, index: int) -> dict[str, Any]:
        """Return nested statistics, {"a": {"b": 1}} for {"a.b": 1}; PyTorch's Python flattens them again."""
        tree: dict[str, Any] = {}
        for key, value in self.cards.at(index).allocator.memory_stats().items():
            *path, last = key.split(".")
            branch = tree
            for name in path:
                branch = branch.setdefault(name, {})
            branch[last] = value
        return tree

    def _cuda_resetPeakMemoryStats(self, index: int) -> None:
        self.cards.at(index).allocator.reset_peak()

    def _cuda_resetAccumulatedMemoryStats(self, index: int) -> None:
        self.cards.at(index).allocator.reset_accumulated()

    def _cuda_emptyCache(self, *_: Any) -> None:
        for device in self.cards.devices:
            device.empty_cache()

    def _accelerator_getMemoryInfo(self, index: int) -> tuple[int, int]:
        return self.cards.memory_info(index)

    def _cuda_getMemoryFraction(self, index: int) -> float:
        return self.fractions[index]

    def _cuda_setMemoryFraction(self, fraction: float, index: int) -> None:
        self.cards.at(index).allocator.set_memory_fraction(fraction)
        self.fractions[index] = fraction

    def _cuda_cudaCachingAllocator_raw_alloc(self, size: int, stream: int) -> int:
        """Allocate a block without a tensor. The stream's handle is its id here."""
        index = self.cards.selected
        try:
            return self.cards.at().malloc(size, index, stream, "caching_allocator_alloc", -1, 0, (size,), "Byte")
        except OutOfDeviceMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None

    def _cuda_cudaCachingAllocator_raw_delete(self, address: int) -> None:
        for device in self.cards.devices:
            if address in device.live:
                device.free(address, 0)
                return
        raise RuntimeError(f"invalid device pointer: {address:#x}")

    def _cuda_cudaCachingAllocator_enable(self, enabled: bool) -> None:
        if not enabled:
            raise UnmodelledCall("memory without the caching allocator")

    def _cuda_getAllocatorBackend(self) -> str:
        return self.cards.at(0).allocator.settings.backend

    def _cuda_getAllocator(self) -> Any:
        return torch._C._cuda_CUDAAllocator

    def _accelerator_getAllocatorSettings(self) -> str:
        return self.cards.at(0).allocator.settings.text

    def _accelerator_setAllocatorSettings(self, text: str) -> None:
        """Apply a string of allocator settings, as `PYTORCH_ALLOC_CONF` would."""
        for device in self.cards.devices:
            try:
                device.allocator.settings = device.allocator.settings.changed_by(text)
            except BadAllocatorSettings as error:
                raise error.pytorch_type(str(error)) from None

    def _cuda_attach_out_of_memory_observer(self, observer: Callable[[int, int, int, int], None]) -> None:
        """Call the observer for each out-of-memory error with the card, bytes requested, allocated and free."""
        for device in self.cards.devices:
            device.oom_observers.append(
                lambda short: observer(short.device, short.segment_bytes, short.allocated_bytes, short.free_bytes)
            )

    # Pinned host memory

    def _cuda_hostMemoryStats(self) -> dict[str, Any]:
        """Return statistics of pinned memory; times are not modelled."""
        values = (ctypes.c_uint64 * 16)()
        self.library.tonnage_host_stats(values)
        counters = {
            name: dict(zip(("current", "peak", "allocated", "freed"), values[4 * row : 4 * row + 4], strict=True))
            for row, name in enumerate(_HOST_COUNTERS)
        }
        blocks = counters["allocations"]
        calls = {"num_host_alloc": blocks["allocated"], "num_host_free": blocks["freed"]}
        return calls | counters | {"host_alloc_time": dict(_HOST_TIMES), "host_free_time": dict(_HOST_TIMES)}

    def _cuda_resetPeakHostMemoryStats(self) -> None:
        self.library.tonnage_reset_host_stats(True)

    def _cuda_resetAccumulatedHostMemoryStats(self) -> None:
        self.library.tonnage_reset_host_stats(False)

    def _host_emptyCache(self) -> None:
        self.library.tonnage_empty_pinned_cache()

    # cuBLAS

    def _cuda_clearCublasWorkspaces(self) -> None:
        active().workspaces.clear()

    def _cuda_getCublasWorkspaceSize(self) -> int:
        return active().workspaces.size_bytes("cublas")

    def _cuda_getCublasLtWorkspaceSize(self) -> int:
        return active().workspaces.size_bytes("cublaslt")

    # torch.accelerator

    _accelerator_emptyCache, _accelerator_emptyHostCache = _cuda_emptyCache, _host_emptyCache
    _accelerator_getDeviceStats, _accelerator_resetPeakStats = _cuda_memoryStats, _cuda_resetPeakMemoryStats
    _accelerator_resetAccumulatedStats = _cuda_resetAccumulatedMemoryStats


def install(cards: Cards, patches: Patches) -> None:
    """Supply the functions for `torch.cuda` and `torch.accelerator`."""
    patches.set_methods(torch._C, _Memory(cards))
    patches.set(torch._C, "_accelerator_isAllocatorInitialized", torch.cuda.is_initialized)
