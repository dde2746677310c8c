"""The cost of a GPU's power limit: if a step would exceed it, the GPU lowers its clock.

A step is short compared with the time over which a GPU averages its power, so one factor applies to all of it:
arithmetic slows down, memory-bound kernels do not.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from tonnage.clock import facts
from tonnage.hardware import Gpu, find_gpu

_LEAST_S = 1e-12
_LEAST_LIMIT = 0.05  # above the idle power


def slowdown(kernels: Iterable[tuple[float, float]], step_s: float) -> float:
    """Return the factor on the time of arithmetic, from each kernel's seconds and attained share of the peak rate."""
    busy_s = at_peak_s = 0.0
    for seconds, share in kernels:
        busy_s += seconds
        at_peak_s += seconds * min(1.0, share)
    return float(slowdown_of(busy_s, at_peak_s, step_s))


def limit_of(gpu: Gpu) -> float:
    """Return a GPU's power limit relative to its chip's default: less if an operator or vendor lowered it."""
    sold = facts("power")["sold_w"].get(gpu.key) or find_gpu(gpu.key).power_w
    return gpu.power_w / sold if gpu.power_w and sold else 1.0


def slowdown_of(busy_s: Any, at_peak_s: Any, step_s: Any, limit: float = 1.0) -> Any:
    """Return the same from sums: kernel seconds, and the seconds of their arithmetic at peak rate. Arrays are allowed."""
    figures = facts("power")
    whole_s, idle = np.maximum(np.maximum(step_s, busy_s), _LEAST_S), figures["idle"]
    drawn = busy_s * figures["busy"] + at_peak_s * figures["arithmetic"] + (whole_s - busy_s) * idle
    # Idle power does not fall with the clock.
    over = (drawn / whole_s - idle) / max(limit - idle, _LEAST_LIMIT)
    return np.maximum(1.0, over) ** (1 / figures["exponent"])
