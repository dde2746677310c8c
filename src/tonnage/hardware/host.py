"""Hosts: the machines that GPUs sit in, and the links of their GPUs to each other, to the host and to other hosts.

A host is a row of `data/hosts.toml` or `data/clouds.toml`.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tonnage.hardware.gpu import Gpu
from tonnage.hardware.tables import DataTables

_DATA = Path(__file__).parent / "data"


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
    return DataTables.read(_DATA / "hosts.toml", _DATA / "clouds.toml")


@cache
def read_host(key: str) -> Host:
    """Return one host of the catalogue."""
    row = host_tables().table(key)
    return Host(**row | {"key": key, "aliases": tuple(row.get("aliases", ()))})


def all_hosts() -> tuple[Host, ...]:
    """Return every host, in the order of the file."""
    return tuple(read_host(key) for key in host_tables().texts)


def homes_of(gpu: Gpu) -> tuple[Host, ...]:
    """Return the default hosts of a GPU, the smallest first."""
    homes = _homes()
    return tuple(read_host(key) for key in homes.get(gpu.key) or homes[gpu.family])


@cache
def _homes() -> dict[str, list[str]]:
    return DataTables.read(_DATA / "homes.toml").table("homes")
