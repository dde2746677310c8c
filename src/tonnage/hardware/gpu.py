"""One GPU as a program sees it: a row of the catalogue, independent of this machine's GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass

from tonnage.units import KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gpu:
    """A GPU. Rates are dense peak operations per second; a precision that the GPU lacks is absent from `rates`.

    Links are in one direction: `nvlink_bytes_per_s` is what a GPU can send to its peers over `link` (NVLink, or
    Infinity Fabric on AMD), `c2c_bytes_per_s` the bandwidth of a chip-to-chip link to its own CPU. 0 means none. An SM
    is a compute unit on AMD, shared memory is LDS. The catalogue holds one object per GPU, so identity is equality.
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
        """Whether it supports BF16: Volta and Turing have only FP16."""
        return "bf16" in self.rates

    @property
    def runs_cuda(self) -> bool:
        """Whether the virtual GPU can emulate it."""
        return self.maker == "NVIDIA"

    @property
    def cublas_workspace_bytes(self) -> int:
        """The bytes that torch keeps for cuBLAS in each thread. Before torch 2.12 it kept the smaller size on Blackwell."""
        return 32 * MIB if self.compute_capability[0] >= 9 else 8 * MIB + 128 * KIB


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes that a process holds outside the caching allocator once a library is in use, and their source."""

    size_bytes: int
    source: str
    host_bytes: int = 0  # host memory that it uses
