"""What a card's power limit costs: where a step would draw more than it allows, the card lowers its clock.

A step is short against the time over which a card averages its power, so one figure holds for all of it: arithmetic slows down,
what is bound by memory does not.
"""

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.hardware import Gpu, find_gpu

_DATA = Path(__file__).parent / "data" / "power.toml"
_LEAST_S = 1e-12
_LEAST_LIMIT = 0.05  # above what an idle card draws


@cache
def _figures() -> dict[str, Any]:
    return tomllib.loads(_DATA.read_text("utf-8"))


def slowdown(kernels: Iterable[tuple[float, float]], step_s: float) -> float:
    """The factor on the time of arithmetic. Each kernel has its seconds and the share of the peak rate that it reaches."""
    busy_s = at_peak_s = 0.0
    for seconds, share in kernels:
        busy_s += seconds
        at_peak_s += seconds * min(1.0, share)
    return float(slowdown_of(busy_s, at_peak_s, step_s))


def limit_of(gpu: Gpu) -> float:
    """A card's power limit against what its chip is sold with: less where an operator has lowered it, or a maker."""
    sold = _figures()["sold_w"].get(gpu.key) or find_gpu(gpu.key).power_w
    return gpu.power_w / sold if gpu.power_w and sold else 1.0


def slowdown_of(busy_s: Any, at_peak_s: Any, step_s: Any, limit: float = 1.0) -> Any:
    """The same from sums: how long kernels run, and how long their arithmetic would take at the peak rate. They may be arrays."""
    figures = _figures()
    whole_s = np.maximum(np.maximum(step_s, busy_s), _LEAST_S)
    drawn = busy_s * figures["busy"] + at_peak_s * figures["arithmetic"] + (whole_s - busy_s) * figures["idle"]
    # What an idle card draws does not fall with its clock.
    idle = figures["idle"]
    over = (drawn / whole_s - idle) / max(limit - idle, _LEAST_LIMIT)
    return np.maximum(1.0, over) ** (1 / figures["exponent"])
