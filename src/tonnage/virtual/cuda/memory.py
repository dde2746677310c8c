"""The caching allocator's part of `torch.cuda`: statistics, limits, settings, raw allocations; pinned host memory."""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tonnage.allocator import BadAllocatorSettings
from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.cuda.unmodelled import UnmodelledCall
from tonnage.virtual.device import OutOfDeviceMemory

_HOST_COUNTERS = ("allocations", "active_requests", "allocated_bytes", "active_bytes")
_HOST_TIMES = dict.fromkeys(("total", "max", "min", "count", "avg"), 0)


class _Memory:
    """The functions of `torch._C` about a card's memory."""

    def __init__(self, cards: Cards) -> None:
        self.cards = cards
        self._fractions = [device.allocator.settings.memory_fraction for device in cards.devices]

    def stats(self, index: int) -> dict[str, Any]:
        """Return nested statistics, as the native function does; PyTorch's Python flattens them."""
        return nested(self.cards.at(index).allocator.memory_stats())

    def reset_peak(self, index: int) -> None:
        self.cards.at(index).allocator.reset_peak()

    def reset_accumulated(self, index: int) -> None:
        self.cards.at(index).allocator.reset_accumulated()

    def empty_cache(self, *_: Any) -> None:
        for device in self.cards.devices:
            device.empty_cache()

    def info(self, index: int) -> tuple[int, int]:
        allocator = self.cards.at(index).allocator
        return allocator.free_bytes, allocator.capacity_bytes

    def get_fraction(self, index: int) -> float:
        return self._fractions[index]

    def set_fraction(self, fraction: float, index: int) -> None:
        self.cards.at(index).allocator.set_memory_fraction(fraction)
        self._fractions[index] = fraction

    def raw_alloc(self, size: int, stream: int) -> int:
        """Allocate a block without a tensor. The stream's handle is its id here."""
        try:
            return self.cards.at().malloc(
                size, self.cards.selected, stream, "caching_allocator_alloc", -1, 0, (size,), "Byte"
            )
        except OutOfDeviceMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None

    def raw_delete(self, address: int) -> None:
        for device in self.cards.devices:
            if address in device.live:
                device.free(address, 0)
                return
        raise RuntimeError(f"invalid device pointer: {address:#x}")

    def enable_caching(self, enabled: bool) -> None:
        if not enabled:
            raise UnmodelledCall("memory without the caching allocator")

    def change_settings(self, text: str) -> None:
        """Apply a string of allocator settings, as `PYTORCH_ALLOC_CONF` would."""
        for device in self.cards.devices:
            try:
                device.allocator.settings = device.allocator.settings.changed_by(text)
            except BadAllocatorSettings as error:
                raise error.pytorch_type(str(error)) from None

    def observe_oom(self, observer: Callable[[int, int, int, int], None]) -> None:
        """Call the observer for each out-of-memory error with the card, bytes requested, allocated and free."""
        for device in self.cards.devices:
            device.oom_observers.append(
                lambda shortage: observer(
                    shortage.device, shortage.segment_bytes, shortage.allocated_bytes, shortage.free_bytes
                )
            )

    def host_stats(self) -> dict[str, Any]:
        """Return statistics of pinned memory; times are not modelled."""
        values = (ctypes.c_uint64 * 16)()
        self.cards.library.tonnage_host_stats(values)
        counters = {
            name: dict(zip(("current", "peak", "allocated", "freed"), values[4 * row : 4 * row + 4], strict=True))
            for row, name in enumerate(_HOST_COUNTERS)
        }
        blocks = counters["allocations"]
        calls = {"num_host_alloc": blocks["allocated"], "num_host_free": blocks["freed"]}
        return calls | counters | {"host_alloc_time": dict(_HOST_TIMES), "host_free_time": dict(_HOST_TIMES)}


def nested(flat: Mapping[str, int]) -> dict[str, Any]:
    """Convert {"a.b": 1} to {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        branch = tree
        for name in path:
            branch = branch.setdefault(name, {})
        branch[last] = value
    return tree


def install(cards: Cards, patches: Patches) -> None:
    """Supply the functions for `torch.cuda` and `torch.accelerator`."""
    from tonnage.virtual import session

    memory, library = _Memory(cards), cards.library
    functions: dict[str, Callable[..., Any]] = {
        "_cuda_memoryStats": memory.stats,
        "_cuda_resetPeakMemoryStats": memory.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": memory.reset_accumulated,
        "_cuda_emptyCache": memory.empty_cache,
        "_cuda_getMemoryFraction": memory.get_fraction,
        "_cuda_setMemoryFraction": memory.set_fraction,
        "_cuda_cudaCachingAllocator_raw_alloc": memory.raw_alloc,
        "_cuda_cudaCachingAllocator_raw_delete": memory.raw_delete,
        "_cuda_cudaCachingAllocator_enable": memory.enable_caching,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_getAllocatorBackend": lambda: cards.at(0).allocator.settings.backend,
        "_cuda_getAllocator": lambda: torch._C._cuda_CUDAAllocator,
        "_cuda_attach_out_of_memory_observer": memory.observe_oom,
        "_cuda_hostMemoryStats": memory.host_stats,
        "_cuda_resetPeakHostMemoryStats": lambda: library.tonnage_reset_host_stats(True),
        "_cuda_resetAccumulatedHostMemoryStats": lambda: library.tonnage_reset_host_stats(False),
        "_host_emptyCache": library.tonnage_empty_pinned_cache,
        # torch.accelerator
        "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
        "_accelerator_emptyCache": memory.empty_cache,
        "_accelerator_emptyHostCache": library.tonnage_empty_pinned_cache,
        "_accelerator_getDeviceStats": memory.stats,
        "_accelerator_resetPeakStats": memory.reset_peak,
        "_accelerator_resetAccumulatedStats": memory.reset_accumulated,
        "_accelerator_getMemoryInfo": memory.info,
        "_accelerator_setAllocatorSettings": memory.change_settings,
        "_accelerator_getAllocatorSettings": lambda: cards.at(0).allocator.settings.text,
        # cuBLAS
        "_cuda_clearCublasWorkspaces": lambda: session.active().workspaces.clear(),
        "_cuda_getCublasWorkspaceSize": lambda: session.active().workspaces.size_bytes("cublas"),
        "_cuda_getCublasLtWorkspaceSize": lambda: session.active().workspaces.size_bytes("cublaslt"),
        "_cuda_getCurrentBlasHandle": lambda: 1,
        "_cuda_getCurrentSolverHandle": lambda: 1,
    }
    patches.set_all(torch._C, functions)
