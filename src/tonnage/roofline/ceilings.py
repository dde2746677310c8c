"""The limits of a GPU: bytes and operations per second, and the least time of a kernel.

| figure                  | from a probe of the GPU (`--ceilings FILE`)      | else                                         |
|-------------------------|--------------------------------------------------|----------------------------------------------|
| memory_bytes_per_s      | a large copy on the device, read and written     | the catalogue: what its vendor states        |
| rates                   | large matrix products, by precision              | the catalogue: dense peaks                   |
| host_link_bytes_per_s   | a copy from pinned memory                        | the catalogue: PCIe, in one direction        |
| kernel_floor_s, launch_s| an empty kernel                                  | the clock, beside an H200                    |

Programs reach a measured ceiling, but never a stated one: shares of the two differ by 10 to 25 %. A file may omit
figures. Times by kind of kernel are up to the clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tonnage.clock.host import host_costs, kernel_floor_s
from tonnage.clock.launch import Launch
from tonnage.errors import BadProfile
from tonnage.hardware import Gpu, find_gpu
from tonnage.hardware.hierarchy import reference_precision
from tonnage.untrusted import Unreadable, parse_json, read_bytes

FORMAT = 1
_MOST_BYTES = 2**20
_LARGEST = 1e30  # no GPU comes near it
_NUMBERS = ("memory_bytes_per_s", "host_link_bytes_per_s", "kernel_floor_s", "launch_s")
# What a GPU computes in if it lacks the dtype.
_NEXT_BEST = {"fp4": "fp8", "fp8": "bf16", "int8": "fp8", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The ceilings of one GPU. `measured` names the figures from a probe; the others are the catalogue's."""

    gpu: str
    memory_bytes_per_s: float
    rates: Mapping[str, float]
    host_link_bytes_per_s: float
    kernel_floor_s: float
    launch_s: float
    sm_count: int
    precision: str  # the usual precision of models on this GPU
    card: Gpu | None = None  # whose kernels the clock knows
    measured: tuple[str, ...] = ()

    def rate(self, precision: str) -> float:
        """Return operations per second in that precision, or in the next one that the GPU supports."""
        return self.rates[self.has(precision)]

    def has(self, precision: str) -> str:
        """Return the precision, or the next one that the GPU supports."""
        while precision not in self.rates and precision in _NEXT_BEST:
            precision = _NEXT_BEST[precision]
        return precision if precision in self.rates else "fp32"

    def ridge(self, precision: str) -> float:
        """Return the operations per byte above which memory is not the limit."""
        return self.rate(precision) / self.memory_bytes_per_s


def catalogue_ceilings(gpu: Gpu) -> Ceilings:
    """Return the vendor's figures."""
    return Ceilings(
        gpu=gpu.name,
        memory_bytes_per_s=gpu.bandwidth_bytes_per_s,
        rates=gpu.rates,
        host_link_bytes_per_s=gpu.c2c_bytes_per_s or gpu.pcie_bytes_per_s,
        sm_count=gpu.sm_count,
        precision=reference_precision(gpu),
        kernel_floor_s=kernel_floor_s(),
        launch_s=host_costs().forward.launch_s(Launch(kind="elementwise", name="")),
        card=gpu,
    )


def read_ceilings(path: Path, gpu: Gpu | None = None) -> Ceilings:
    """Read a probe's results over the catalogue's row of the GPU that it names (or of `gpu`)."""
    found = _read(path)
    named = found.get("gpu")
    if gpu is None and not isinstance(named, str):
        raise BadProfile(f"{path} does not name its card.", hint='Pass --gpu, or write "gpu": "h200" into it.')
    base = catalogue_ceilings(gpu or find_gpu(str(named)))
    numbers: dict[str, Any] = {key: _positive(path, key, found[key]) for key in _NUMBERS if key in found}
    rates = found.get("rates", {})
    if not isinstance(rates, dict):
        raise BadProfile(f"{path}: rates is not an object.", hint='Write it like "rates": {"bf16": 7.9e14}.')
    probed = {str(name): _positive(path, f"rates.{name}", rate) for name, rate in rates.items()}
    measured = (*numbers, *(f"rates.{name}" for name in probed))
    return replace(base, rates=MappingProxyType({**base.rates, **probed}), measured=measured, **numbers)


def _read(path: Path) -> dict[str, Any]:
    hint = "Write one with benchmarks/roofline_probe.py."
    try:
        found = parse_json(read_bytes(path, _MOST_BYTES))
    except Unreadable as error:
        raise BadProfile(f"{path} {error}.", hint=hint) from None
    if not isinstance(found, dict) or found.get("tonnage_ceilings") != FORMAT:
        raise BadProfile(f'{path} holds no ceilings ("tonnage_ceilings": {FORMAT}).', hint=hint)
    return found


def _positive(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        raise BadProfile(f"{path}: {key} is {value!r}.", hint="Give a number above 0, or leave it out.")
    return float(value)
