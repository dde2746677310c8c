"""Find a card by the names people use for it. The cards are data (`data/gpus/`); no probing happens here.

| asked                                   | found                            |
|-----------------------------------------|----------------------------------|
| "h100"                                  | H100 SXM 80 GB                   |
| "a100-80", "a100 80gb"                  | A100 80 GB                       |
| "4090", "rtx-4090", "RTX 4090"          | RTX 4090                         |
| "NVIDIA H200"                           | H200                             |
| "a100-40:1g.5gb", "m4-max:64gb"         | a part of a card                 |
| "my-card.toml", "cards/mine.toml"       | the card that the file describes |
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tonnage.errors import UnknownGpu
from tonnage.hardware.gpu import Gpu, Overhead
from tonnage.hardware.tables import Tables, close_keys, plain

_DATA = Path(__file__).parent / "data"
# Families in the order of the list that people read; each is a file.
FAMILIES = ("data-centre", "instinct", "workstation", "geforce", "laptop", "apple")
# What most cards do not have.
_ABSENT: dict[str, Any] = {
    "l3_bytes": 0,
    "l3_bytes_per_s": 0.0,
    "link": "",
    "nvlink_bytes_per_s": 0.0,
    "c2c_bytes_per_s": 0.0,
}


def find_gpu(name: str) -> Gpu:
    """The card of that name or in that file; case, spaces, dashes and the maker's name do not matter."""
    if is_file(name):
        from tonnage.hardware.custom import read_gpu

        return read_gpu(Path(name))
    whole, colon, part = name.partition(":")
    if colon:
        from tonnage.hardware.parts import part_of

        return part_of(find_gpu(whole), part)
    key = gpu_tables().keys_by_name.get(plain(name))
    if key is None:
        close, known = ", ".join(close_keys(name, gpu_tables())), ", ".join(gpu_tables().texts)
        hint = f"Did you mean one of: {close}?" if close else f"Known cards: {known}."
        raise UnknownGpu(f"There is no GPU called {name!r} in the catalogue.", hint=hint)
    return _card(key)


def find_cuda_gpu(name: str) -> Gpu:
    """The same, for the virtual GPU, which knows CUDA alone."""
    card = find_gpu(name)
    check_cuda(card)
    return card


def check_cuda(card: Gpu) -> None:
    """Refuse a card that the virtual GPU cannot stand in for."""
    if not card.runs_cuda:
        hint = f"Name a card of NVIDIA's; `tonnage plan` knows {card.key} too."
        raise UnknownGpu(f"The virtual GPU stands in for CUDA's cards alone: {card.name} is {card.maker}'s.", hint=hint)


def all_gpus() -> tuple[Gpu, ...]:
    """Every card of the catalogue, in the order of the files."""
    return tuple(_card(key) for key in gpu_tables().texts)


def common_cards() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys of cards that people commonly have or rent, each with the numbers of them that are usual."""
    table = Tables.read(_DATA / "common.toml").table("common")
    yield from ((key, (1,)) for key in table["cards"])
    yield from ((key, (1, 2, 4, 8)) for key in table["multiples"])


def is_file(name: str) -> bool:
    """Whether a name means a file of one's own."""
    return name.strip().lower().endswith(".toml")


@cache
def gpu_tables() -> Tables:
    """The cards, unparsed."""
    return Tables.read(*(_DATA / "gpus" / f"{family}.toml" for family in FAMILIES))


@cache
def architecture_tables() -> Tables:
    """What cards of an architecture share, unparsed."""
    return Tables.read(_DATA / "architectures.toml")


@cache
def shared_by(architecture: str) -> dict[str, Any]:
    """What the cards of an architecture have in common."""
    return architecture_tables().table(architecture)


def build(key: str, row: dict[str, Any]) -> Gpu:
    """A card is its architecture's row overlaid with its own."""
    merged = _ABSENT | shared_by(row["architecture"]) | row
    overheads = shared_by("overhead") | merged.pop("overhead", {})
    return Gpu(
        **merged
        | {
            "key": key,
            "aliases": tuple(merged["aliases"]),
            "compute_capability": tuple(merged["compute_capability"]),
            "rates": MappingProxyType(merged["rates"]),
            "overheads": MappingProxyType({library: Overhead(**values) for library, values in overheads.items()}),
        }
    )


@cache
def _card(key: str) -> Gpu:
    tables = gpu_tables()
    return build(key, tables.table(key) | {"family": tables.sources[key]})
