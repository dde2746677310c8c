"""One GPU as a program sees it: a row of the catalogue. It does not know of any GPU in this machine."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gpu:
    """A card. Rates are dense peak operations a second; a rate that the card lacks is absent from `rates`.

    Links are in one direction: `nvlink_bytes_per_s` is all that a card can send to its peers over `link` (NVLink, or Infinity
    Fabric on AMD's), `c2c_bytes_per_s` what a chip-to-chip link to its own CPU carries. 0 means that there is none.
    An SM is a compute unit on AMD's cards, shared memory is LDS. The catalogue holds one object a card, so identity
    is equality.
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    family: str
    maker: str
    generation: str
    architecture: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    memory_source: str
    memory_kind: str
    sm_count: int
    fp32_lanes_per_sm: int
    l2_bytes: int
    l2_bytes_per_clock_per_sm: float
    l3_bytes: int
    l3_bytes_per_s: float
    warp_size: int
    max_threads_per_sm: int
    max_threads_per_block: int
    registers_per_sm: int
    shared_memory_per_sm_bytes: int
    shared_memory_per_block_bytes: int
    shared_memory_per_block_optin_bytes: int
    shared_bytes_per_clock_per_sm: int
    clock_mhz: int
    memory_clock_mhz: int
    memory_bus_bits: int
    bandwidth_bytes_per_s: float
    rates: Mapping[str, float]
    power_w: int
    pcie_generation: int
    pcie_bytes_per_s: float
    link: str
    nvlink_bytes_per_s: float
    c2c_bytes_per_s: float
    overheads: Mapping[str, "Overhead"]

    @property
    def has_bf16(self) -> bool:
        """Volta and Turing have FP16 alone."""
        return "bf16" in self.rates

    @property
    def runs_cuda(self) -> bool:
        """Whether the virtual GPU can stand in for it."""
        return self.maker == "NVIDIA"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes that a process holds outside the caching allocator once a library is in use, and how we know."""

    size_bytes: int
    source: str
    host_bytes: int = 0  # what it holds of the host's memory
