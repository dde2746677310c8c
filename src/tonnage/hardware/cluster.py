"""GPUs in hosts, from the names people use for them.

| asked                 | GPUs  | hosts                                       |
|-----------------------|-------|---------------------------------------------|
| "h200", "8xh200"      | 1, 8  | one HGX of 8, or that part of it            |
| "1024xh100"           | 1024  | 128 of 8                                    |
| "2x6xh100"            | 12    | two, with six GPUs each in use              |
| "dgx-h100"            | 8     | one                                         |
| "4xp5.48xlarge"       | 32    | four                                        |
| "h100:3g.40gb"        | 1     | a part of a GPU, in a plain server          |
| "8xmy-card.toml"      | 8     | one, of a GPU that the file describes       |

A host is a row of `data/hosts.toml` or `data/clouds.toml`. A part of a host has that part of its memory and drives; GPUs
in a workstation have all of it. Links are at the vendors' peak bandwidth, of which collectives and copies reach only a
share.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, overload

from tonnage.errors import RequestError, UnknownGpu
from tonnage.hardware.catalogue import (
    DATA,
    DataTables,
    check_cuda,
    close_keys,
    common_cards,
    find_gpu,
    gpu_tables,
    is_file,
    plain,
)
from tonnage.hardware.gpu import Gpu
from tonnage.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COUNT = re.compile(r"\s*(\d+)\s*[x×*]\s*(?=\S)", re.IGNORECASE)
_MOST_GPUS = 1_000_000
_HOW = "Write it like h200, 8xh200, 2x8xh100 (hosts × cards), dgx-h100 or 4xp5.48xlarge."


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine with GPUs. Speeds are peak bytes per second in one direction; 0: none, or not stated.

    `gpu` is the GPU that it holds ("": any). `link_gpus` is how many neighbouring GPUs the fast link joins (NVLink,
    Infinity Fabric; 0: they use PCIe). `network_bytes_per_s` is per GPU, `network_hop_s` one step of a ring over
    several hosts (0: as over InfiniBand), `network_tree_share` a tree's share of a ring's bandwidth. `whole`: the GPUs
    in use have all of its memory and drives, however few they are; else each has its share. `memory_bytes_per_s` is the
    CPUs' memory bandwidth.
    """

    key: str
    name: str
    aliases: tuple[str, ...] = ()
    gpu: str = ""
    gpus: int
    whole: bool = False
    memory_bytes: int
    memory_bytes_per_s: float = 3.072e11
    link: str = "PCIe"
    link_gpus: int = 0
    pcie_bytes_per_s: float = 6.4e10
    nvme_bytes: int = 0
    nvme_bytes_per_s: float = 0.0
    network: str
    network_bytes_per_s: float
    network_hop_s: float = 0.0
    network_tree_share: float = 1.0


@cache
def host_tables() -> DataTables:
    """Return the hosts of the catalogue, unparsed."""
    return DataTables.read(DATA / "hosts.toml", DATA / "clouds.toml")


@cache
def read_host(key: str) -> Host:
    """Return one host of the catalogue."""
    row = host_tables().table(key)
    return Host(**row | {"key": key, "aliases": tuple(row.get("aliases", ()))})


def all_hosts() -> tuple[Host, ...]:
    """Return every host, in the order of the file."""
    return tuple(read_host(key) for key in host_tables().texts)


@cache
def homes_of(gpu: Gpu) -> tuple[Host, ...]:
    """Return the default hosts of a GPU, the smallest first."""
    homes = DataTables.read(DATA / "homes.toml").table("homes")
    return tuple(read_host(key) for key in homes.get(gpu.key) or homes[gpu.family])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What was stated of a cluster instead of its catalogue: memory and drives of a host, and GPU memory of others."""

    memory_bytes: int | None = None
    nvme_bytes_per_s: float | None = None
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal hosts with equal GPUs. Speeds are bytes per second in one direction."""

    gpu: Gpu
    gpus_per_host: int
    hosts: int
    host: Host
    stated: Stated = Stated()

    @property
    def gpus(self) -> int:
        """Number of all GPUs."""
        return self.gpus_per_host * self.hosts

    @property
    def name(self) -> str:
        """The name as `find_cluster` takes it, like "8xh100", if the hosts are the GPU's usual ones."""
        return f"{self.gpus}x{self.gpu.key}" if self.gpus > 1 else self.gpu.key

    @property
    def words(self) -> str:
        """A description for a headline, like "16 × h100 in 2 hosts (HGX H100)"."""
        count = f"{self.gpus} × " if self.gpus > 1 else ""
        return f"{count}{self.gpu.key} in {self.hosts} host{'s' * (self.hosts > 1)} ({self.host.name})"

    @property
    def host_memory_bytes(self) -> int:
        """Memory of one host, or of the part that belongs to these GPUs."""
        return self.host_memory_per_gpu_bytes * self.gpus_per_host

    @property
    def host_memory_per_gpu_bytes(self) -> int:
        """A GPU's share of its host's memory."""
        return self.host.memory_bytes // self._sharing

    @property
    def host_memory_bytes_per_s(self) -> float:
        """Memory bandwidth of one host's CPUs, or of the part that belongs to these GPUs; 0 if not stated."""
        return self.host.memory_bytes_per_s * self.gpus_per_host / self._sharing

    @property
    def _sharing(self) -> int:
        """GPUs that share a host's memory and drives."""
        return self.gpus_per_host if self.host.whole else self.host.gpus

    def with_host(self, *, memory_bytes: int | None = None, nvme_bytes_per_s: float | None = None) -> "Cluster":
        """Return the same GPUs in hosts with this memory and drive speed; None keeps the current value.

        Drives of another speed are other drives, whose size is not known.
        """
        changed = {"memory_bytes": memory_bytes, "nvme_bytes_per_s": nvme_bytes_per_s}
        kept = {"memory_bytes": self.host_memory_bytes, "nvme_bytes_per_s": self.nvme_bytes_per_s * self.gpus_per_host}
        kept["memory_bytes_per_s"] = self.host_memory_bytes_per_s
        kept["nvme_bytes"] = self.nvme_bytes if nvme_bytes_per_s is None else 0
        known: dict[str, Any] = kept | {name: value for name, value in changed.items() if value is not None}
        stated = replace(
            self.stated,
            memory_bytes=self.stated.memory_bytes if memory_bytes is None else memory_bytes,
            nvme_bytes_per_s=self.stated.nvme_bytes_per_s if nvme_bytes_per_s is None else nvme_bytes_per_s,
        )
        return replace(self, host=replace(self.host, whole=True, **known), stated=stated)

    def without(self, size_bytes: int) -> "Cluster":
        """Return the cluster with `size_bytes` less on every GPU, which others use."""
        if size_bytes >= self.gpu.memory_bytes:
            raise RequestError(
                f"{format_bytes(size_bytes)} beside it leave nothing of {self.gpu.name}, which has "
                f"{format_bytes(self.gpu.memory_bytes)}.",
                hint="Give a smaller size, or another card.",
            )
        smaller = replace(self.gpu, memory_bytes=self.gpu.memory_bytes - size_bytes)
        stated = replace(self.stated, used_bytes=self.stated.used_bytes + size_bytes)
        return replace(self, gpu=smaller, stated=stated)

    def as_stated(self, stated: Stated) -> "Cluster":
        """Return these GPUs with what was stated of others; raises RequestError if nothing is left of a GPU."""
        cluster = self.without(stated.used_bytes) if stated.used_bytes else self
        if stated.memory_bytes is None and stated.nvme_bytes_per_s is None:
            return cluster
        return cluster.with_host(memory_bytes=stated.memory_bytes, nvme_bytes_per_s=stated.nvme_bytes_per_s)

    @property
    def peer_bytes_per_s(self) -> float:
        """Bandwidth from a GPU to its peers in the host: over the fast link if it joins all of them, else PCIe."""
        return self._reached(self.gpus_per_host)

    @property
    def network_bytes_per_s(self) -> float:
        """Bandwidth from a GPU to GPUs of other hosts."""
        return self.host.network_bytes_per_s

    @property
    def pcie_bytes_per_s(self) -> float:
        """The slower of the GPU's and the host's PCIe bandwidth."""
        return min(self.gpu.pcie_bytes_per_s, self.host.pcie_bytes_per_s)

    @property
    def host_link_bytes_per_s(self) -> float:
        """Bandwidth between a GPU and its host's memory: over a chip-to-chip link if there is one, else PCIe."""
        return self.gpu.c2c_bytes_per_s or self.pcie_bytes_per_s

    @property
    def nvme_bytes(self) -> int:
        """Bytes of one host's drives, or of the part that belongs to these GPUs; 0 if unknown."""
        return self.host.nvme_bytes * self.gpus_per_host // self._sharing

    @property
    def nvme_bytes_per_s(self) -> float:
        """A GPU's share of the host's drive bandwidth; 0 if unknown."""
        return self.host.nvme_bytes_per_s / self._sharing

    @overload
    def link_bytes_per_s(self, group_size: int) -> float: ...
    @overload
    def link_bytes_per_s(self, group_size: "NDArray[np.int64]") -> "NDArray[np.float64]": ...
    def link_bytes_per_s(self, group_size: Any) -> Any:
        """Return the slowest link within a group of that many neighbouring GPUs, for one size or an array of them."""
        if isinstance(group_size, int):
            return self._reached(group_size)
        import numpy as np

        ends = np.array([min(self.host.link_gpus, self.gpus_per_host), self.gpus_per_host])
        speeds = np.array([self._reached(1), self._reached(self.gpus_per_host), self._reached(self.gpus_per_host + 1)])
        return speeds[np.searchsorted(ends, group_size)]

    def _reached(self, group_size: int) -> float:
        if group_size > self.gpus_per_host:
            return min(self._reached(self.gpus_per_host), self.network_bytes_per_s)
        joined = group_size <= self.host.link_gpus and self.gpu.nvlink_bytes_per_s
        return self.gpu.nvlink_bytes_per_s if joined else self.pcie_bytes_per_s


def find_cluster(text: str) -> Cluster:
    """Return the cluster that a text such as "8xh200" or "4xdgx-h100" means."""
    counts, name = _split(text)
    host_key = None if is_file(name) else host_tables().keys_by_name.get(plain(name))
    if host_key is None:
        gpu = _find_card(name)
        homes = homes_of(gpu)
        wanted = counts[-1] if counts else 1
        host = next((home for home in homes if home.gpus >= wanted), homes[-1])
        if wanted <= host.gpus:
            return Cluster(gpu, wanted, counts[0] if len(counts) == 2 else 1, host)
        if len(counts) == 2:
            hint = f"{host.name} holds {host.gpus}: write {counts[0] * wanted}x{gpu.key}, or {counts[0]}x{host.gpus}x{gpu.key}."
            raise UnknownGpu(f"{text!r} puts {wanted} cards into one host.", hint=hint)
        if wanted % host.gpus:
            full = -(-wanted // host.gpus)
            even = next(hosts for hosts in range(full, wanted + 1) if wanted % hosts == 0)
            hint = f"Write {full * host.gpus}x{gpu.key}, or {even}x{wanted // even}x{gpu.key}: hosts × cards."
            raise UnknownGpu(f"{text!r} does not fill hosts of {host.gpus} cards.", hint=hint)
        return Cluster(gpu, host.gpus, wanted // host.gpus, host)
    host = read_host(host_key)
    if not host.gpu:
        hint = f"Name the card: {host.gpus}xh100-pcie, say."
        raise UnknownGpu(f"{text!r}: {host.name} can hold any card.", hint=hint)
    if len(counts) > 1:
        hint = f"Write {counts[0]}x{host.key}: each has {host.gpus}."
        raise UnknownGpu(f"{text!r} counts the cards of a host that has its own.", hint=hint)
    return Cluster(find_gpu(host.gpu), host.gpus, counts[0] if counts else 1, host)


def common_clusters(maker: str) -> list[Cluster]:
    """Return one to eight of the common GPUs, by memory, those of that vendor first."""
    found = [find_cluster(f"{count}x{card}") for card, counts in common_cards() for count in counts]
    return sorted(found, key=lambda each: (each.gpu.maker != maker, each.gpus * each.gpu.memory_bytes))


def find_cuda_cluster(text: str) -> Cluster:
    """Like `find_cluster`, but only for GPUs that run CUDA, as the virtual cluster needs."""
    cluster = find_cluster(text)
    check_cuda(cluster.gpu)
    return cluster


def _split(text: str) -> tuple[list[int], str]:
    counts, rest = [], text
    while match := _COUNT.match(rest):
        counts.append(int(match[1]))
        rest = rest[match.end() :]
    if len(counts) > 2 or not rest.strip():
        raise UnknownGpu(f"{text!r} does not name GPUs.", hint=_HOW)
    total = counts[0] * counts[-1] if len(counts) == 2 else sum(counts) if counts else 1
    if not 1 <= total <= _MOST_GPUS:
        raise UnknownGpu(f"{text!r} asks for {total:,} GPUs.", hint=f"Ask for 1 to {_MOST_GPUS:,} of them.")
    return counts, rest.strip()


def _find_card(name: str) -> Gpu:
    try:
        return find_gpu(name)
    except UnknownGpu:
        if is_file(name) or ":" in name:
            raise
        close = close_keys(name, gpu_tables(), host_tables())
        hint = f"Did you mean one of: {', '.join(close)}?" if close else f"`tonnage gpu` lists them. {_HOW}"
        raise UnknownGpu(f"There is no GPU or host called {name!r} in the catalogue.", hint=hint) from None
