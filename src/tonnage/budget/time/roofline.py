"""Attainable shares of the peak rates of links, drives and hosts, and a GPU's rate by precision.

The shares are data (`data/calibration.toml`). Kernel times are up to `tonnage.clock`.
"""

from dataclasses import dataclass
from functools import cache

from tonnage.budget import table
from tonnage.budget.training.configuration import Precision
from tonnage.hardware import Gpu

# The dtype in which matrix products are computed.
RATES = {"fp32": "fp32", "tf32": "tf32", "fp16-mixed": "fp16", "bf16-mixed": "bf16", "bf16": "bf16", "fp8": "fp8"}
# What a GPU uses instead of a dtype it lacks.
_NEXT_BEST = {"fp8": "bf16", "bf16": "fp16", "tf32": "fp32", "fp16": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Attainable shares of the peaks; the data file explains each and its source."""

    link_ceiling: float
    link_hop_s: float
    link_start_s: float
    link_channels: int
    network_hop_s: float
    network_small_saves_s: float
    network_small_bytes_per_s: float
    card_spread: float
    host_link_ceiling: float
    nvme_ceiling: float
    nvme_default_bytes_per_s: float
    host_optimizer_bytes_per_s: float


@cache
def calibration() -> Calibration:
    """Return the calibration that ships with the package."""
    parts = table("calibration")
    return Calibration(**{f"{part}_{name}": parts[part][name] for part in parts for name in parts[part]})


def peak_rate(gpu: Gpu, precision: Precision) -> float:
    """Return the FLOP/s of matrix products in that precision, or in the next one that the GPU supports."""
    name = RATES[precision]
    while name not in gpu.rates and name in _NEXT_BEST:
        name = _NEXT_BEST[name]
    return gpu.rates[name]
