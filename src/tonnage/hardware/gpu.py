"""One GPU as a program sees it: a row of the catalogue. It does not know of any GPU in this machine."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gpu:
    """A card. Rates are dense peak operations a second; a rate that the card lacks is absent from `rates`.

    The catalogue holds one object a card, so identity is equality.
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    architecture: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    memory_source: str
    sm_count: int
    l2_bytes: int
    warp_size: int
    max_threads_per_sm: int
    max_threads_per_block: int
    registers_per_sm: int
    shared_memory_per_sm_bytes: int
    shared_memory_per_block_bytes: int
    shared_memory_per_block_optin_bytes: int
    clock_mhz: int
    memory_clock_mhz: int
    memory_bus_bits: int
    bandwidth_bytes_per_s: float
    rates: Mapping[str, float]
    power_w: int
    pcie_bytes_per_s: float
    nvlink_bytes_per_s: float
    overheads: Mapping[str, "Overhead"]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes that a process holds outside the caching allocator once a library is in use, and how we know."""

    size_bytes: int
    source: str
