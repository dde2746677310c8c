"""Estimate seconds on a virtual card: record what a function calls and let the cost model time it."""

import sys
from collections.abc import Callable
from functools import cache

import torch

from tonnage.budget.time.collectives import collective_seconds
from tonnage.clock import kernels
from tonnage.clock.captured import CapturedCall
from tonnage.clock.kernels import copies
from tonnage.clock.launch import Settings
from tonnage.clock.step import busy_s
from tonnage.errors import RequestError
from tonnage.fit.virtual import uncaptured, virtual_cluster
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
    return launch.moved_bytes / kernels.seconds(launch, gpu)


@cache
def link_bytes_per_s(gpu: Gpu) -> float:
    """Return the mean rate to pinned memory and back."""
    there, back = (
        kernels.seconds(copies.transfer(_PROBE_BYTES, direction, pinned=True), gpu)
        for direction in ("to_device", "to_host")
    )
    return 2 * _PROBE_BYTES / (there + back)
