"""Hosts: the machines that cards sit in, and what joins the cards of one host to each other, to it and to other hosts.

A host is a row of `data/hosts.toml` or `data/clouds.toml`. This module does not know which hosts there are in anybody's cluster.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tonnage.hardware.gpu import Gpu
from tonnage.hardware.tables import Tables

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine with cards. Speeds are bytes a second in one direction, at their peak; 0: there is none, or none is stated.

    `gpu` is the card that it holds ("": any). `link_gpus` is how many neighbouring cards the fast link joins (NVLink, Infinity
    Fabric; 0: none, they talk over PCIe). `network_bytes_per_s` is for each card, `network_hop_s` one step of a ring of cards in
    several hosts (0: as over InfiniBand), `network_tree_share` what a tree of hosts reaches of a ring's bandwidth. `whole`: the
    cards in use have all of its memory and drives, however few they are; else each has its share. `memory_bytes_per_s` is
    what its CPUs read of their memory.
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
def host_tables() -> Tables:
    """The hosts of the catalogue, unparsed."""
    return Tables.read(_DATA / "hosts.toml", _DATA / "clouds.toml")


@cache
def read_host(key: str) -> Host:
    """One host of the catalogue."""
    row = host_tables().table(key)
    return Host(**row | {"key": key, "aliases": tuple(row.get("aliases", ()))})


def all_hosts() -> tuple[Host, ...]:
    """Every host, in the order of the file."""
    return tuple(read_host(key) for key in host_tables().texts)


def homes_of(gpu: Gpu) -> tuple[Host, ...]:
    """The hosts that a card is taken to sit in where none is named, the smallest first."""
    homes = _homes()
    return tuple(read_host(key) for key in homes.get(gpu.key) or homes[gpu.family])


@cache
def _homes() -> dict[str, list[str]]:
    return Tables.read(_DATA / "homes.toml").table("homes")
