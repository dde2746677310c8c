"""Triton without a GPU: its driver describes the virtual card, and launches are only counted.

Triton's own driver builds a small C library and queries the CUDA driver; neither is needed here.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from tonnage.hardware import Gpu
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.standins import StandIns

_MILLISECONDS = 1.0
_FLUSH_BYTES = 256 * 2**20  # what Triton's CUDA driver writes to flush the L2 cache before each timing


class _Utilities:
    """Replaces Triton's C library."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the card's limits, by Triton's names."""
        return {
            "max_shared_mem": self._gpu.shared_memory_per_block_optin_bytes,
            "max_num_regs": self._gpu.registers_per_sm,
            "multiprocessor_count": self._gpu.sm_count,
            "warpSize": self._gpu.warp_size,
            "sm_clock_rate": self._gpu.clock_mhz * 1000,
            "mem_clock_rate": self._gpu.memory_clock_mhz * 1000,
            "mem_bus_width": self._gpu.memory_bus_bits,
        }


class VirtualDriver:
    """The driver of the virtual card, with the methods of Triton's CudaDriver."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.utils = _Utilities(gpu)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self._gpu.compute_capability
        return GPUTarget("cuda", major * 10 + minor, self._gpu.warp_size)

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self._gpu.compute_capability

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def get_device_interface(self) -> Any:
        """Return the module with events and synchronization."""
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return the function that `triton.autotune` times configurations with."""
        return do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return the buffer that flushes the L2 cache."""
        return torch.empty(_FLUSH_BYTES // 4, dtype=torch.int, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()

    def map_python_to_cpp_type(self, type_name: str) -> str:
        """Return the C type of an argument in a launcher's source."""
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(type_name))


def do_bench(
    fn: Callable[[], Any],
    warmup: int = 25,
    rep: int = 100,
    grad_to_none: Sequence[torch.Tensor] | None = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """Run the function as `triton.testing.do_bench` does, with its flush buffer, and return a constant time."""
    fn()
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int, device="cuda")
    for tensor in grad_to_none or ():
        tensor.grad = None
    fn()
    del flush
    if quantiles is not None:
        times = [_MILLISECONDS] * len(quantiles)
        return times if len(times) > 1 else times[0]
    return [_MILLISECONDS] if return_mode == "all" else _MILLISECONDS


def replace_driver(backends: ModuleType, gpu: Gpu, patches: Patches) -> None:
    """Replace Triton's NVIDIA backend driver with the virtual card's."""
    nvidia = backends.backends["nvidia"]
    driver = type("CudaDriver", (VirtualDriver,), {"__init__": lambda self: VirtualDriver.__init__(self, gpu)})
    patches.set_item(backends.backends, "nvidia", type(nvidia)(compiler=nvidia.compiler, driver=driver))


def forget_driver(driver: ModuleType, patches: Patches) -> None:
    """Make Triton look its driver up again, now and on undo."""
    patches.set_all(driver.driver, {"_active": None, "_default": None})


def quiet_launches(jit: ModuleType, stand_ins: StandIns, patches: Patches) -> None:
    """Replace launches of the script's own kernels: count them and do nothing."""

    def run(self: Any, *arguments: Any, warmup: bool = False, **keywords: Any) -> None:
        name = getattr(self, "__name__", None) or getattr(getattr(self, "fn", None), "__name__", "kernel")
        if not warmup:
            stand_ins.unmodelled(f"triton kernel {name}", "not run: it writes into tensors that exist already")
            # Tell the profiler, as Inductor does for its kernels; Triton leaves that to CUPTI.
            if torch.autograd.profiler._is_profiler_enabled:
                given = (*arguments, *keywords.values())
                shown = [value for value in given if isinstance(value, (torch.Tensor, int, float))]
                with torch._C._profiler._RecordFunctionFast(f"triton_{str(name).removeprefix('triton_')}", shown):
                    pass

    patches.set(jit.JITFunction, "run", run)


def constant_times(testing: ModuleType, patches: Patches) -> None:
    """Return constant times, because real ones would be the host's."""
    patches.set(testing, "do_bench", do_bench)
    patches.set(testing, "do_bench_cudagraph", lambda fn, *_, **keywords: do_bench(fn, **keywords))
