"""What the models of compute kernels share: their fitted figures, and how a call is read.

The figures are in `data/compute.toml`; `tools/fit_clock_compute.py` fits them to times measured on a card. Times are those of
kernels in a full queue: they hold the half microsecond or so until the next one begins, which a profiler does not count.
"""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

from tonnage.clock.launch import Launch
from tonnage.clock.operators import Call
from tonnage.clock.settings import Settings
from tonnage.hardware import find_gpu
from tonnage.hardware.gpu import Gpu

_DATA = Path(__file__).parents[1] / "data" / "compute.toml"
_CARDS = _DATA.with_name("cards.toml")
Read = Callable[[Call, Settings], Launch | None]


@cache
def figures() -> dict[str, Any]:
    """All of them, as the file has them."""
    return tomllib.loads(_DATA.read_text("utf-8"))


@cache
def _reached() -> dict[str, float]:
    return tomllib.loads(_CARDS.read_text("utf-8"))


def peak(gpu: Gpu, precision: str) -> float:
    """Operations a second; a precision that the card lacks runs as the next wider one that it has.

    Less where libraries reach less of what the maker states than they do on the cards that the figures come from.
    """
    wider = {"fp8": "bf16", "int8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32", "fp64": "fp32"}
    while precision not in gpu.rates and precision in wider:
        precision = wider[precision]
    stated = gpu.rates.get(precision) or gpu.sm_count * gpu.fp32_lanes_per_sm * 2e6 * gpu.clock_mhz
    return stated * _reached().get(gpu.key, 1.0)


@cache
def measured() -> Gpu:
    """The card that the figures come from."""
    return find_gpu(figures()["measured"])


def share_of_peak(gpu: Gpu, precision: str, share: float) -> float:
    """Of a card's rate, what a kernel reaches that reaches a share on the card that was measured.

    What keeps it from more (loads, addresses, waits) takes an SM's cycles, and where tensor cores do less in a cycle it hides
    behind them. Cards whose tensor cores do more have kernels of their own.
    """
    most: float = figures()["most_of_peak"]
    return max(share, min(most, share * _per_cycle(measured(), precision) / _per_cycle(gpu, precision)))


def _per_cycle(gpu: Gpu, precision: str) -> float:
    return peak(gpu, precision) / (gpu.sm_count * gpu.clock_mhz)


def l2_bytes_per_s(gpu: Gpu) -> float:
    """What the L2 cache gives one SM; where nobody has measured it, as much for its tensor cores' rate as Hopper's gives."""
    if gpu.l2_bytes_per_clock_per_sm:
        return gpu.l2_bytes_per_clock_per_sm * gpu.clock_mhz * 1e6
    return peak(gpu, "fp16") / gpu.sm_count / float(figures()["operations_per_l2_byte"])


def older_share(gpu: Gpu) -> float:
    """Of the peak, what kernels written for Ampere reach: from Hopper on only products of whole warp groups are faster."""
    share: float = figures()["older_share"]
    return share if gpu.maker == "NVIDIA" and gpu.compute_capability[0] in (9, 10) else 1.0


def on_card(launch: Launch, gpu: Gpu) -> Launch:
    """The launch as that card runs it: without TF32 there, in FP32."""
    return replace(launch, precision="fp32") if launch.precision == "tf32" and "tf32" not in gpu.rates else launch


def reader(read: Read) -> Read:
    """A reading that gives None for the arguments of another version's operator."""

    @wraps(read)
    def safe(call: Call, settings: Settings) -> Launch | None:
        try:
            return read(call, settings)
        except (IndexError, TypeError, KeyError, ValueError, ArithmeticError):
            return None

    return safe


def arithmetic(call: Call, at: int, tf32: bool) -> str | None:
    """What the products of that tensor's type are done in."""
    name: str | None = figures()["precision"].get(call.types[at])
    return "tf32" if name == "fp32" and tf32 else name
