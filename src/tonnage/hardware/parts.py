"""A part of a GPU, named after a colon: a MIG instance, or an Apple chip with less than the maximum memory.

| asked             | found                                                                   |
|-------------------|-------------------------------------------------------------------------|
| "a100-40:1g.5gb"  | 14 SMs, 4.75 GiB, an eighth of the bandwidth and of the L2, no NVLink   |
| "h100:3g.40gb"    | 60 SMs, 39.5 GiB, half the bandwidth                                    |
| "m4-max:64gb"     | the chip with 64 GB, of which Metal gives a process three quarters      |
"""

import re
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from tonnage.errors import UnknownGpu
from tonnage.hardware.catalogue import DATA, DataTables
from tonnage.hardware.gpu import Gpu
from tonnage.units import GIB

_MEMORY = re.compile(r"(\d+)\s*(?:gi?b)?")
# Up to this many GB, Metal recommends two thirds to one process, and three quarters beyond.
_SMALL_GB = 32


def part_of(card: Gpu, words: str) -> Gpu:
    """Return the part of that name; one object for each, as with whole GPUs."""
    return (_with_memory if card.maker == "Apple" else _instance)(card, words.strip().lower())


@cache
def _instance(card: Gpu, profile: str) -> Gpu:
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


@cache
def _with_memory(card: Gpu, words: str) -> Gpu:
    found = _MEMORY.fullmatch(words)
    most = int(card.aliases[0].rpartition("-")[2])
    if found is None or not 8 <= int(found[1]) <= most:
        hint = f"Write its memory, 8 to {most} GB: {card.key}:{most}gb."
        raise UnknownGpu(f"{card.name} has no {words!r}.", hint=hint)
    size = int(found[1])
    share, said = (2 / 3, "two thirds") if size <= _SMALL_GB else (3 / 4, "three quarters")
    source = f"derived from Metal's share: {said} of {size} GB"
    key = f"{card.key}:{size}gb"
    return replace(card, key=key, aliases=(), memory_bytes=int(size * GIB * share), memory_source=source)
