"""Seconds of one operator on one card: the larger of its arithmetic and its bytes, each at the share of the peak that it reaches.

The shares are data (`data/calibration.toml`), measured on one card and borrowed by the others. This module does not know
models: it is given sizes.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tonnage.budget.configuration import Number, Precision, Quantity
from tonnage.hardware import Gpu

_DATA = Path(__file__).parent / "data" / "calibration.toml"
# Rows of a matrix begin at multiples of 16 bytes where tensor cores are to be fed at full speed.
_ALIGNMENT_BYTES = 16
_RATES = {"fp32": "fp32", "tf32": "tf32", "fp16-mixed": "fp16", "bf16-mixed": "bf16", "bf16": "bf16", "fp8": "fp8"}
# What a card computes in where it lacks the type that was asked for.
_NEXT_BEST = {"fp8": "bf16", "bf16": "fp16", "tf32": "fp32", "fp16": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Shares of the peaks, and the host's own pace. The file says what each means and where it came from."""

    matmul_ceiling: float
    matmul_half_size: float
    matmul_unaligned: float
    attention_ceiling: float
    memory_ceiling: float
    host_forward_s_per_layer: float
    host_backward_s_per_layer: float
    host_checkpoint_s_per_layer: float
    optimizer_ceiling: float
    optimizer_parameters_per_sm_clock: float
    link_ceiling: float
    link_hop_s: float
    network_hop_s: float
    host_link_ceiling: float
    nvme_ceiling: float
    nvme_default_bytes_per_s: float
    host_optimizer_bytes_per_s: float


@cache
def calibration() -> Calibration:
    """The calibration that ships with the package."""
    tables = tomllib.loads(_DATA.read_text("utf-8"))
    del tables["source"]
    return Calibration(**{f"{table}_{name}": value for table, rows in tables.items() for name, value in rows.items()})


def peak_rate(gpu: Gpu, precision: Precision) -> float:
    """Operations a second of matrix products in that precision, or in the next one that the card has."""
    name = _RATES[precision]
    while name not in gpu.rates and name in _NEXT_BEST:
        name = _NEXT_BEST[name]
    return gpu.rates[name]


@dataclass(frozen=True, slots=True)
class Roofline:
    """One card computing in one precision."""

    gpu: Gpu
    precision: Precision
    element_bytes: int
    shares: Calibration

    def matmul_s(self, m: Quantity, n: Quantity, k: Quantity, *, width: Number = 0) -> Quantity:
        """[m, k] × [k, n]. `width` is the row of the one operand or result that may be badly aligned (0: none)."""
        half = self.shares.matmul_half_size
        shortened = (1 + half / m) * (1 + half / n) * (1 + half / k)
        rate = peak_rate(self.gpu, self.precision) * self.shares.matmul_ceiling * self._alignment(width)
        moved_bytes = (m * k + k * n + m * n) * self.element_bytes
        return np.maximum(2 * m * n * k * shortened / rate, self.memory_s(moved_bytes))

    def attention_s(self, operations: Quantity) -> Quantity:
        """A fused attention kernel, which keeps its scores on the chip; it stays in 16 bits where products are in FP8."""
        return operations / (peak_rate(self.gpu, self.wide) * self.shares.attention_ceiling)

    @property
    def wide(self) -> Precision:
        """What is computed in where it is not FP8: attention, and the head."""
        return "bf16-mixed" if self.precision == "fp8" else self.precision

    def memory_s(self, moved_bytes: Quantity) -> Quantity:
        """A kernel that is bound by what it reads and writes."""
        return moved_bytes / (self.gpu.bandwidth_bytes_per_s * self.shares.memory_ceiling)

    def _alignment(self, width: Number) -> Quantity:
        odd = (width * self.element_bytes) % _ALIGNMENT_BYTES != 0
        return np.where(odd, self.shares.matmul_unaligned, 1.0)
