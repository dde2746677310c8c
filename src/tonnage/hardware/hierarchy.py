"""The memory levels that a GPU reaches: capacity, bandwidth, latency, and the arithmetic intensity each needs.

| level     | bytes per second                                | source                                      |
|-----------|-------------------------------------------------|---------------------------------------------|
| registers | SMs × FP32 lanes × 3 operands × 4 B × clock     | what the lanes can consume                  |
| shared    | SMs × 128 B × clock                             | 32 banks of 4 bytes                         |
| L2        | SMs × bytes per clock (`architectures.toml`)    | a model, from published microbenchmarks     |
| the rest  | as their vendors state, in one direction        | data sheets                                 |

Latencies are orders of magnitude, the same for all GPUs. Beyond the GPU a level is its share of its host. Attained
shares of these peaks are not modelled here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.hardware.cluster import Cluster
from tonnage.hardware.gpu import Gpu

_OPERANDS = 3
_OPERAND_BYTES = 4
_REGISTER_BYTES = 4
LATENCIES_NS = {
    "registers": 1,
    "shared": 20,
    "L2": 200,
    "L3": 300,
    "memory": 500,
    "peers": 1_000,
    "host": 1_000,
    "network": 5_000,
    "NVMe": 100_000,
}


@dataclass(frozen=True, slots=True)
class Level:
    """One level. A capacity or bandwidth of 0 is unknown; `source` is the bandwidth's: "model" or "stated"."""

    name: str
    what: str
    capacity_bytes: int
    bytes_per_s: float
    source: str = "stated"

    @property
    def latency_ns(self) -> int:
        """Order of magnitude of its latency."""
        return LATENCIES_NS[self.name]

    def intensity(self, operations_per_s: float) -> float | None:
        """Return the operations per byte above which this level no longer limits that rate; None if unknown."""
        return operations_per_s / self.bytes_per_s if self.bytes_per_s else None


def reference_precision(gpu: Gpu) -> str:
    """Return the usual precision of models on this GPU: bf16 if supported, else fp16, else fp32."""
    return next(name for name in ("bf16", "fp16", "fp32") if name in gpu.rates)


def levels_of(cluster: Cluster) -> Iterator[Level]:
    """Yield the levels of one GPU of a cluster, nearest first, without those it lacks."""
    gpu, host = cluster.gpu, cluster.host
    clocks_per_s = gpu.sm_count * gpu.clock_mhz * 1e6
    registers = gpu.sm_count * gpu.registers_per_sm * _REGISTER_BYTES
    lane_bytes = gpu.fp32_lanes_per_sm * _OPERANDS * _OPERAND_BYTES
    yield Level("registers", "registers", registers, clocks_per_s * lane_bytes, "model")
    shared = gpu.sm_count * gpu.shared_memory_per_sm_bytes
    name = "LDS" if gpu.maker == "AMD" else "shared memory"
    yield Level("shared", name, shared, clocks_per_s * gpu.shared_bytes_per_clock_per_sm, "model")
    yield Level("L2", "L2 cache", gpu.l2_bytes, clocks_per_s * gpu.l2_bytes_per_clock_per_sm, "model")
    if gpu.l3_bytes:
        yield Level("L3", "Infinity Cache", gpu.l3_bytes, gpu.l3_bytes_per_s)
    yield Level("memory", gpu.memory_kind, gpu.memory_bytes, gpu.bandwidth_bytes_per_s)
    # Beyond the GPU.
    linked = host.link_gpus > 1 and gpu.nvlink_bytes_per_s > 0
    peers = (host.link_gpus if linked else host.gpus) - 1
    if peers:
        speed = gpu.nvlink_bytes_per_s if linked else cluster.pcie_bytes_per_s
        yield Level("peers", gpu.link if linked else pcie_name(cluster), peers * gpu.memory_bytes, speed)
    if cluster.host_memory_per_gpu_bytes:
        what = "chip to chip" if gpu.c2c_bytes_per_s else pcie_name(cluster)
        yield Level("host", what, cluster.host_memory_per_gpu_bytes, cluster.host_link_bytes_per_s)
    yield Level("network", host.network, 0, cluster.network_bytes_per_s)
    if cluster.nvme_bytes_per_s:
        yield Level("NVMe", "local drives", host.nvme_bytes // host.gpus, cluster.nvme_bytes_per_s)


def pcie_name(cluster: Cluster) -> str:
    """Return the PCIe generation that GPU and host share."""
    # Half the speed of the GPU's own is one generation less.
    generation, speed = cluster.gpu.pcie_generation, cluster.gpu.pcie_bytes_per_s
    while generation > 1 and cluster.pcie_bytes_per_s <= speed / 2:
        generation, speed = generation - 1, speed / 2
    return f"PCIe {generation}"
