"""Measure bytes and seconds on a CUDA device, real or virtual.

On a real card, times come from CUDA events. On a virtual one, where nothing runs, they come from the cost model's
clock, which covers the kernels and the host that launches them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import torch

from tonnage.budget.time.collectives import collective_seconds
from tonnage.clock import kernels
from tonnage.clock.captured import CapturedCall
from tonnage.clock.kernels import copies
from tonnage.clock.launch import Settings
from tonnage.clock.step import busy_s
from tonnage.errors import RequestError
from tonnage.fit.virtual import on_virtual_gpu, uncaptured, virtual_cluster
from tonnage.hardware import Gpu, find_cuda_gpu
from tonnage.script import profiler

_TRIES = 3  # the first ones may compile something
_PROBE_BYTES = 256 << 20


def card_of(device: torch.device) -> Gpu:
    """Return the catalogue entry for the device's name."""
    return find_cuda_gpu(torch.cuda.get_device_name(device))


def clocked(run: Callable[[], object], gpu: Gpu) -> tuple[float, float]:
    """Return the seconds of a call: on the card, and on the host that launches it."""
    if profiler.is_on():
        raise RequestError(
            "fit on a virtual GPU looks at operators through torch's profiler, and one is on already.",
            hint="Call fit before the profiler begins.",
        )
    with uncaptured():
        for _ in range(_TRIES):
            compiled = _graphs()
            step = profiler.calls_of(run)
            if _graphs() == compiled:
                break
    cluster = virtual_cluster()
    return busy_s(step, gpu, collective_seconds(cluster) if cluster else None)


def _graphs() -> int:
    """Count graphs compiled so far. A compilation calls every operator, on tensors without memory."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


@cache
def adding_bytes_per_s(gpu: Gpu) -> float:
    """Return the bytes per second read and written when gradients are accumulated."""
    shape = (_PROBE_BYTES // 4,)
    call = CapturedCall(name="add_", shapes=(shape, shape), types=("float", "float"), devices=("cuda", "cuda"))
    launch = kernels.launch_of(call, Settings())
    assert launch is not None
    return float(launch.moved_bytes / kernels.seconds(launch, gpu))


@cache
def link_bytes_per_s(gpu: Gpu) -> float:
    """Return the mean rate to pinned memory and back."""
    ways = (copies.transfer(_PROBE_BYTES, direction, pinned=True) for direction in ("to_device", "to_host"))
    return float(2 * _PROBE_BYTES / sum(kernels.seconds(way, gpu) for way in ways))


_BUSY = 0.9  # if the host is busy for more than this share of the GPU time, the call is host-bound
_BURST_S = 5e-3  # seconds of launches to queue at once; the launch queue holds about a thousand
_BURSTS = 3
_CYCLES_PER_S = 2e9  # GPU clock, roughly


@dataclass
class Watch:
    """Memory use during a `with` block, relative to what was allocated at its start."""

    before_bytes: int
    peak_bytes: int = 0  # peak above `before_bytes`
    kept_bytes: int = 0  # still allocated at the end


@dataclass(frozen=True)
class Duration:
    """Time of one call on the GPU, and of the host that launches its kernels."""

    gpu_s: float
    host_s: float = 0.0


class GpuMeter:
    """Measures a device. With `timed=False` every time is 0: enough for those who ask for bytes alone."""

    timed = True

    def __init__(self, device: torch.device, *, timed: bool = True) -> None:
        if device.type != "cuda":
            raise RequestError(
                f"fit measures GPU memory, and this model is on {device.type!r}.",
                hint='Move the model to "cuda", or plan on a GPU that you do not have: with tonnage.virtual_gpu("h200"): ...',
            )
        self.device, self.timed, self.virtual = device, timed, on_virtual_gpu(device)

    @property
    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def capacity_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def free_bytes(self) -> int:
        """Return the bytes PyTorch could use in all: what it has reserved plus what is free on the card."""
        return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        watch = Watch(self.allocated_bytes)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield watch
        watch.peak_bytes = torch.cuda.max_memory_allocated(self.device) - watch.before_bytes
        watch.kept_bytes = self.allocated_bytes - watch.before_bytes

    def new_peak(self) -> int:
        """Return the peak since the last call, or since a watch began."""
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak_bytes

    def time(self, run: Callable[[], object], *, least_s: float = 0.1) -> Duration:
        """Return the mean time of a call, repeated for about `least_s` seconds: a card under load is slower."""
        if not self.timed:
            run()  # libraries allocate workspaces at their first call
            return Duration(0.0)
        if self.virtual:
            return Duration(*clocked(run, card_of(self.device)))
        once = self._agreed(self._timed(run, 1))
        repeats = min(200, max(2, round(least_s / max(once.gpu_s, 1e-6))))
        self._timed(run, max(1, repeats // 2))
        found = self._agreed(self._timed(run, repeats))
        if found.host_s < _BUSY * found.gpu_s:
            return Duration(found.gpu_s, min(once.host_s, found.host_s))
        # Host-bound: the GPU waits. In a full step the host may run ahead, so measure the GPU time alone too.
        calls = max(1, int(_BURST_S / found.host_s))
        bursts = [self._timed(run, calls, behind_s=2 * calls * found.host_s) for _ in range(_BURSTS)]
        return self._agreed(Duration(min(burst.gpu_s for burst in bursts), found.host_s))

    def _timed(self, run: Callable[[], object], calls: int, *, behind_s: float = 0.0) -> Duration:
        """Time `calls` calls; with `behind_s` the GPU starts that much later, with the launches already queued."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if behind_s:
            torch.cuda.synchronize(self.device)
            torch.cuda._sleep(int(behind_s * _CYCLES_PER_S))
        start.record()
        began_s = perf_counter()
        for _ in range(calls):
            run()
        host_s = perf_counter() - began_s
        end.record()
        end.synchronize()
        return Duration(float(start.elapsed_time(end)) / 1e3 / calls, host_s / calls)

    def _agreed(self, found: Duration) -> Duration:
        """Hook for several ranks that measure together."""
        return found
