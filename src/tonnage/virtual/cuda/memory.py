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


def install(cards: Cards, patches: Patches) -> None:
    """Supply the functions for `torch.cuda` and `torch.accelerator`."""
    at, devices, library = cards.at, cards.devices, cards.library
    fractions = [device.allocator.settings.memory_fraction for device in devices]

    def set_fraction(fraction: float, index: int) -> None:
        at(index).allocator.set_memory_fraction(fraction)
        fractions[index] = fraction

    def reset_accumulated(index: int) -> None:
        at(index).allocator.reset_accumulated()

    def empty_cache(*_: Any) -> None:
        for device in devices:
            device.empty_cache()

    def raw_alloc(size: int, stream: int) -> int:
        """Allocate a block without a tensor. The stream's handle is its id here."""
        try:
            return at().malloc(size, cards.selected, stream, "caching_allocator_alloc", -1, 0, (size,), "Byte")
        except OutOfDeviceMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None

    def raw_delete(address: int) -> None:
        owner = next((device for device in devices if address in device.live), None)
        if owner is None:
            raise RuntimeError(f"invalid device pointer: {address:#x}")
        owner.free(address, 0)

    def enable(enabled: bool) -> None:
        if not enabled:
            raise UnmodelledCall("memory without the caching allocator")

    def set_settings(text: str) -> None:
        """Apply a string of allocator settings, as `PYTORCH_ALLOC_CONF` would."""
        for device in devices:
            try:
                device.allocator.settings = device.allocator.settings.changed_by(text)
            except BadAllocatorSettings as error:
                raise error.pytorch_type(str(error)) from None

    def attach_observer(observer: Callable[[int, int, int, int], None]) -> None:
        """Call the observer for each out-of-memory error with the card, bytes requested, allocated and free."""
        for device in devices:
            device.oom_observers.append(
                lambda short: observer(short.device, short.segment_bytes, short.allocated_bytes, short.free_bytes)
            )

    of_both = {  # what torch.cuda and torch.accelerator have under two names
        ("_cuda_emptyCache", "_accelerator_emptyCache"): empty_cache,
        ("_host_emptyCache", "_accelerator_emptyHostCache"): lambda: library.tonnage_empty_pinned_cache(),
        ("_cuda_memoryStats", "_accelerator_getDeviceStats"): lambda index: _nested(at(index).memory_stats()),
        ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"): lambda index: at(index).allocator.reset_peak(),
        ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats"): reset_accumulated,
    }
    patches.set_all(torch._C, {name: function for names, function in of_both.items() for name in names})
    patches.set_all(
        torch._C,
        {
            "_accelerator_getMemoryInfo": cards.memory_info,
            "_accelerator_getAllocatorSettings": lambda: at(0).allocator.settings.text,
            "_accelerator_setAllocatorSettings": set_settings,
            "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
            "_cuda_getMemoryFraction": lambda index: fractions[index],
            "_cuda_setMemoryFraction": set_fraction,
            "_cuda_cudaCachingAllocator_raw_alloc": raw_alloc,
            "_cuda_cudaCachingAllocator_raw_delete": raw_delete,
            "_cuda_cudaCachingAllocator_enable": enable,
            "_cuda_getAllocatorBackend": lambda: at(0).allocator.settings.backend,
            "_cuda_getAllocator": lambda: torch._C._cuda_CUDAAllocator,
            "_cuda_attach_out_of_memory_observer": attach_observer,
            # Pinned host memory
            "_cuda_hostMemoryStats": lambda: _host_stats(library),
            "_cuda_resetPeakHostMemoryStats": lambda: library.tonnage_reset_host_stats(True),
            "_cuda_resetAccumulatedHostMemoryStats": lambda: library.tonnage_reset_host_stats(False),
            # cuBLAS
            "_cuda_clearCublasWorkspaces": lambda: active().workspaces.clear(),
            "_cuda_getCublasWorkspaceSize": lambda: active().workspaces.size_bytes("cublas"),
            "_cuda_getCublasLtWorkspaceSize": lambda: active().workspaces.size_bytes("cublaslt"),
        },
    )


def _nested(stats: dict[str, int]) -> dict[str, Any]:
    """Return nested statistics, {"a": {"b": 1}} for {"a.b": 1}; PyTorch's Python flattens them again."""
    tree: dict[str, Any] = {}
    for key, value in stats.items():
        *path, last = key.split(".")
        branch = tree
        for name in path:
            branch = branch.setdefault(name, {})
        branch[last] = value
    return tree


def _host_stats(library: ctypes.PyDLL) -> dict[str, Any]:
    """Return statistics of pinned memory; times are not modelled."""
    values = (ctypes.c_uint64 * 16)()
    library.tonnage_host_stats(values)
    counters = {
        name: dict(zip(("current", "peak", "allocated", "freed"), values[4 * row : 4 * row + 4], strict=True))
        for row, name in enumerate(_HOST_COUNTERS)
    }
    blocks = counters["allocations"]
    calls = {"num_host_alloc": blocks["allocated"], "num_host_free": blocks["freed"]}
    return calls | counters | {"host_alloc_time": dict(_HOST_TIMES), "host_free_time": dict(_HOST_TIMES)}
