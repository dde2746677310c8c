"""Find a GPU by the names people use for it. The GPUs are data (`data/gpus/`); the machine is not probed.

| asked                                   | found                            |
|-----------------------------------------|----------------------------------|
| "h100"                                  | H100 SXM 80 GB                   |
| "a100-80", "a100 80gb"                  | A100 80 GB                       |
| "4090", "rtx-4090", "RTX 4090"          | RTX 4090                         |
| "NVIDIA H200"                           | H200                             |
| "a100-40:1g.5gb", "h100:3g.40gb"        | a MIG instance                   |
| "m4-max:64gb"                           | an Apple chip with less memory   |
| "my-card.toml", "cards/mine.toml"       | the GPU that the file describes  |

`tonnage run` waits for the catalogue, and the standard parser takes half a millisecond per GPU: so a file is split at
its headings, names are found by regex, and only the requested table is parsed. Every table starts with `[key]` on a
line of its own; `name` and `aliases` take one line each.
"""

import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tonnage.errors import UnknownGpu
from tonnage.hardware.gpu import Gpu, Overhead
from tonnage.units import GIB

DATA = Path(__file__).parent / "data"
# Families in the order in which they are listed; each is a file.
FAMILIES = ("data-centre", "instinct", "workstation", "geforce", "laptop", "apple")
# Defaults for what most GPUs lack.
_ABSENT = {"l3_bytes": 0, "l3_bytes_per_s": 0.0, "link": "", "nvlink_bytes_per_s": 0.0, "c2c_bytes_per_s": 0.0}
_HEADING = re.compile(r'^\["?([^"\]]+)"?\]', re.MULTILINE)
_NAMES = re.compile(r"^(?:name|aliases) = (.+)$", re.MULTILINE)
_QUOTED = re.compile(r'"([^"]+)"')
# Words that a name may include or omit.
_NOISE = re.compile(r"nvidia|geforce|tesla|graphics|gpu|amd|instinct|[^a-z0-9]")


@dataclass(frozen=True)
class DataTables:
    """The tables of some files, in order, by key; and the stem of the file that each is from."""

    texts: Mapping[str, str]
    sources: Mapping[str, str]

    @classmethod
    def read(cls, *paths: Path) -> "DataTables":
        """Split files at their headings."""
        texts: dict[str, str] = {}
        sources: dict[str, str] = {}
        for path in paths:
            _, *parts = _HEADING.split(path.read_text("utf-8"))
            texts.update(zip(parts[::2], parts[1::2], strict=True))
            sources.update(dict.fromkeys(parts[::2], path.stem))
        return cls(texts, sources)

    def table(self, key: str) -> dict[str, Any]:
        """Return one parsed table."""
        return tomllib.loads(self.texts[key])

    @cached_property
    def keys_by_name(self) -> Mapping[str, str]:
        """Every normalized name of each table."""
        names: dict[str, str] = {}
        for key, text in self.texts.items():
            for name in (key, *(name for line in _NAMES.findall(text) for name in _QUOTED.findall(line))):
                assert names.setdefault(plain(name), key) == key, f"two tables answer to {name!r}"
        return names


def close_keys(name: str, *many: DataTables) -> list[str]:
    """Return keys with similar names, the closest first."""
    from difflib import get_close_matches

    known = {name: key for tables in many for name, key in tables.keys_by_name.items()}
    matches = get_close_matches(plain(name), known, n=8, cutoff=0.5)
    return list(dict.fromkeys(known[match] for match in matches))[:5]


@cache
def plain(name: str) -> str:
    """Normalize a name: drop case, spaces, dashes, the vendor's name and the unit of its memory."""
    return re.sub(r"(?<=\d)gi?b$", "", _NOISE.sub("", name.lower()))


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name or in that file, ignoring case, spaces, dashes and the vendor's name."""
    if is_file(name):
        from tonnage.hardware.custom import read_gpu

        return read_gpu(Path(name))
    whole, colon, part = name.partition(":")
    if colon:
        return part_of(find_gpu(whole), part)
    key = gpu_tables().keys_by_name.get(plain(name))
    if key is None:
        close, known = ", ".join(close_keys(name, gpu_tables())), ", ".join(gpu_tables().texts)
        hint = f"Did you mean one of: {close}?" if close else f"Known cards: {known}."
        raise UnknownGpu(f"There is no GPU called {name!r} in the catalogue.", hint=hint)
    return _card(key)


def find_cuda_gpu(name: str) -> Gpu:
    """Like `find_gpu`, but only for GPUs that run CUDA, as the virtual GPU needs."""
    card = find_gpu(name)
    check_cuda(card)
    return card


def check_cuda(card: Gpu) -> None:
    """Raise for a GPU that the virtual GPU cannot emulate."""
    if not card.runs_cuda:
        hint = f"Name a card of NVIDIA's; `tonnage plan` knows {card.key} too."
        raise UnknownGpu(f"The virtual GPU stands in for CUDA's cards alone: {card.name} is {card.maker}'s.", hint=hint)


def all_gpus() -> tuple[Gpu, ...]:
    """Return every GPU of the catalogue, in the order of the files."""
    return tuple(_card(key) for key in gpu_tables().texts)


def cuda_cards(more_than_bytes: int = 0) -> list[Gpu]:
    """Return the cards that run CUDA and have more memory than this, the smallest first."""
    cards = (card for card in all_gpus() if card.runs_cuda and card.memory_bytes > more_than_bytes)
    return sorted(cards, key=lambda card: card.memory_bytes)


def first_that_holds(cards: list[Gpu], holds: Callable[[Gpu], bool]) -> Gpu | None:
    """Return the first card that holds something, of cards in order of memory."""
    # What fits a card fits larger ones, so bisecting saves most tries.
    first = bisect_left(cards, True, key=holds)
    return cards[first] if first < len(cards) else None


def common_cards() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield keys of GPUs that are commonly owned or rented, each with the usual counts."""
    table = DataTables.read(DATA / "common.toml").table("common")
    yield from ((key, (1,)) for key in table["cards"])
    yield from ((key, (1, 2, 4, 8)) for key in table["multiples"])


def is_file(name: str) -> bool:
    """Say whether a name is a user's own TOML file."""
    return name.strip().lower().endswith(".toml")


@cache
def gpu_tables() -> DataTables:
    """Return the GPUs, unparsed."""
    return DataTables.read(*(DATA / "gpus" / f"{family}.toml" for family in FAMILIES))


@cache
def architecture_tables() -> DataTables:
    """Return what GPUs of an architecture share, unparsed."""
    return DataTables.read(DATA / "architectures.toml")


@cache
def shared_by(architecture: str) -> dict[str, Any]:
    """Return what the GPUs of an architecture share."""
    return architecture_tables().table(architecture)


def build(key: str, row: dict[str, Any]) -> Gpu:
    """Build a GPU from its architecture's row overlaid with its own."""
    merged: dict[str, Any] = _ABSENT | shared_by(row["architecture"]) | row
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


_MEMORY = re.compile(r"(\d+)\s*(?:gi?b)?")
# Up to this many GB, Metal recommends two thirds to one process, and three quarters beyond.
_SMALL_GB = 32


@cache
def part_of(card: Gpu, words: str) -> Gpu:
    """Return the part of that name; one object for each, as with whole GPUs."""
    profile = words.strip().lower()
    if profile != words:
        return part_of(card, profile)
    if card.maker == "Apple":
        found, most = _MEMORY.fullmatch(words), int(card.aliases[0].rpartition("-")[2])
        if found is None or not 8 <= int(found[1]) <= most:
            hint = f"Write its memory, 8 to {most} GB: {card.key}:{most}gb."
            raise UnknownGpu(f"{card.name} has no {words!r}.", hint=hint)
        size = int(found[1])
        share, said = (2 / 3, "two thirds") if size <= _SMALL_GB else (3 / 4, "three quarters")
        source, memory_bytes = f"derived from Metal's share: {said} of {size} GB", int(size * GIB * share)
        return replace(card, key=f"{card.key}:{size}gb", aliases=(), memory_bytes=memory_bytes, memory_source=source)
    tables = DataTables.read(DATA / "mig.toml")
    table = tables.table("cards").get(card.key)
    if table is None:
        raise UnknownGpu(f"{card.name} is not cut into MIG instances.", hint=f"Write {card.key}.")
    known = tables.table(table)
    if profile not in known:
        hint = f"Its instances: {', '.join(f'{card.key}:{name}' for name in known)}."
        raise UnknownGpu(f"{card.name} has no MIG instance {profile!r}.", hint=hint)
    row = known[profile]
    share, sms = row["eighths"] / 8, row["sm_count"] / card.sm_count
    listed = "memory_gib" in row
    return replace(
        card,
        key=f"{card.key}:{profile}",
        name=f"{card.name} MIG {profile}",
        aliases=(),
        memory_bytes=int(row["memory_gib"] * GIB) if listed else int(card.memory_bytes * share),
        memory_source="known from nvidia-smi" if listed else f"derived as {row['eighths']} eighths of the card's",
        sm_count=row["sm_count"],
        l2_bytes=int(card.l2_bytes * share),
        bandwidth_bytes_per_s=card.bandwidth_bytes_per_s * share,
        rates=MappingProxyType({name: rate * sms for name, rate in card.rates.items()}),
        link="",
        nvlink_bytes_per_s=0.0,
    )
