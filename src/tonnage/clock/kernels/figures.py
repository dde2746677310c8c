"""What the models of compute kernels share: their fitted figures, and how to read a call.

`tools/fit_clock_compute.py` fits the figures in `data/compute.toml` to times measured on a GPU. Times are those of
kernels in a full queue: they include the half microsecond or so until the next one begins, which a profiler does not
count.
"""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

from tonnage.clock.launch import Launch
from tonnage.clock.operators import OperatorCall
from tonnage.clock.settings import Settings
from tonnage.hardware import find_gpu
from tonnage.hardware.gpu import Gpu

_DATA = Path(__file__).parents[1] / "data" / "compute.toml"
_CARDS = _DATA.with_name("cards.toml")
Read = Callable[[OperatorCall, Settings], Launch | None]


@cache
def figures() -> dict[str, Any]:
    """Return all figures of the data file."""
    return tomllib.loads(_DATA.read_text("utf-8"))


@cache
def _reached() -> dict[str, float]:
    return tomllib.loads(_CARDS.read_text("utf-8"))


def peak(gpu: Gpu, precision: str) -> float:
    """Return FLOP/s; a precision that the GPU lacks runs as the next wider one.

    It is reduced if libraries reach less of the vendor's figure than on the GPUs that were measured.
    """
    wider = {"fp8": "bf16", "int8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32", "fp64": "fp32"}
    while precision not in gpu.rates and precision in wider:
        precision = wider[precision]
    stated = gpu.rates.get(precision) or gpu.sm_count * gpu.fp32_lanes_per_sm * 2e6 * gpu.clock_mhz
    return stated * _reached().get(gpu.key, 1.0)


@cache
def measured() -> Gpu:
    """Return the GPU that the figures were measured on."""
    return find_gpu(figures()["measured"])


def share_of_peak(gpu: Gpu, precision: str, share: float) -> float:
    """Convert a kernel's share of the peak on the measured GPU to this one's.

    What limits it (loads, addresses, waits) takes SM cycles, and is better hidden if tensor cores do less per cycle.
    GPUs with faster tensor cores have kernels of their own.
    """
    most: float = figures()["most_of_peak"]
    return max(share, min(most, share * _per_cycle(measured(), precision) / _per_cycle(gpu, precision)))


def _per_cycle(gpu: Gpu, precision: str) -> float:
    return peak(gpu, precision) / (gpu.sm_count * gpu.clock_mhz)


def l2_bytes_per_s(gpu: Gpu) -> float:
    """Return the L2 bandwidth per SM; if not measured, Hopper's ratio to the tensor cores' rate."""
    if gpu.l2_bytes_per_clock_per_sm:
        return gpu.l2_bytes_per_clock_per_sm * gpu.clock_mhz * 1e6
    return peak(gpu, "fp16") / gpu.sm_count / float(figures()["operations_per_l2_byte"])


def older_share(gpu: Gpu) -> float:
    """Return the share of the peak that kernels written for Ampere reach; Hopper's are faster."""
    share: float = figures()["older_share"]
    return share if gpu.maker == "NVIDIA" and gpu.compute_capability[0] in (9, 10) else 1.0


def on_card(launch: Launch, gpu: Gpu) -> Launch:
    """Return the launch as that GPU runs it: FP32 if it lacks TF32."""
    return replace(launch, precision="fp32") if launch.precision == "tf32" and "tf32" not in gpu.rates else launch


def reader(read: Read) -> Read:
    """Wrap a reader to return None for the arguments of another version's operator."""

    @wraps(read)
    def safe(call: OperatorCall, settings: Settings) -> Launch | None:
        try:
            return read(call, settings)
        except (IndexError, TypeError, KeyError, ValueError, ArithmeticError):
            return None

    return safe


def arithmetic(call: OperatorCall, at: int, tf32: bool) -> str | None:
    """Return the precision in which products of that tensor's type are computed."""
    name: str | None = figures()["precision"].get(call.types[at])
    return "tf32" if name == "fp32" and tf32 else name
