"""What the models of compute kernels share: their fitted figures, and how to read a call.

`tools/fit_clock_compute.py` fits the figures in `data/compute.toml` to times measured on a GPU. Times are those of
kernels in a full queue: they include the half microsecond or so until the next one begins, which a profiler does not
count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial, wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tonnage.clock import facts
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware import find_gpu
from tonnage.hardware.gpu import Gpu

Reader = Callable[[OperatorCall, Settings], Launch | None]
_REMEMBERED = 1024  # calls cached per family


figures = partial(facts, "compute")


def peak(gpu: Gpu, precision: str) -> float:
    """Return FLOP/s; a precision that the GPU lacks runs as the next wider one.

    It is reduced if libraries reach less of the vendor's figure than on the GPUs that were measured.
    """
    wider = {"fp8": "bf16", "int8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32", "fp64": "fp32"}
    while precision not in gpu.rates and precision in wider:
        precision = wider[precision]
    stated = gpu.rates.get(precision) or gpu.sm_count * gpu.fp32_lanes_per_sm * 2e6 * gpu.clock_mhz
    return stated * float(facts("cards").get(gpu.key, 1.0))


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


def careful(readers: Mapping[str, Reader]) -> dict[str, Reader]:
    """Wrap readers to return None for arguments of another version's operator, or ones not recorded."""
    return {name: _careful(reader) for name, reader in readers.items()}


@cache
def _careful(reader: Reader) -> Reader:
    @lru_cache(_REMEMBERED)  # the layers of a model make the same calls
    @wraps(reader)
    def read(call: OperatorCall, settings: Settings) -> Launch | None:
        try:
            return reader(call, settings) if call.shapes else None
        except (IndexError, TypeError, KeyError, ValueError, ArithmeticError):
            return None

    return read


def arithmetic(call: OperatorCall, at: int, tf32: bool) -> str | None:
    """Return the precision in which products of that tensor's type are computed."""
    name: str | None = figures()["precision"].get(call.types[at])
    return "tf32" if name == "fp32" and tf32 else name


def distinct(columns: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first index of each distinct row of these columns, and the distinct row of every row.

    A search over thousands of launches computes each distinct one once.
    """
    arrays = [array for array in map(np.asarray, columns) if array.ndim]
    number = np.zeros(max((array.size for array in arrays), default=1), dtype=np.int64)
    first = np.zeros(1, dtype=np.int64)
    for array in arrays:
        # Combine the codes so far with the values of one more column.
        _, codes = _numbered(array)
        first, number = _numbered(number * array.size + codes)
    return first, number


def _numbered(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first index of each value, and which one every entry is: `np.unique` without its imports."""
    order = np.argsort(values, kind="stable")
    begins = np.ones(values.size, dtype=bool)
    begins[1:] = values[order][1:] != values[order][:-1]
    places = np.empty(values.size, dtype=np.int64)
    places[order] = np.cumsum(begins) - 1
    return order[begins], places
