"""Find a card by the names people use for it. The cards are data (`data/gpus.toml`); no probing happens here.

| asked                                   | found          |
|-----------------------------------------|----------------|
| "h100"                                  | H100 SXM 80 GB |
| "a100-80", "a100 80gb"                  | A100 80 GB     |
| "4090", "rtx-4090", "RTX 4090"          | RTX 4090       |
| "NVIDIA H200"                           | H200           |
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tonnage.errors import UnknownGpu
from tonnage.hardware.gpu import Gpu, Overhead

_DATA = Path(__file__).parent / "data" / "gpus.toml"
# Words that a name may carry or leave out.
_NOISE = re.compile(r"nvidia|geforce|tesla|graphics|gpu|[^a-z0-9]")


def find_gpu(name: str) -> Gpu:
    """The card of that name; case, spaces, dashes and the maker's name do not matter."""
    card = _by_name().get(_plain(name))
    if card is None:
        raise UnknownGpu(f"There is no GPU called {name!r} in the catalogue.", hint=_hint(name))
    return card


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every card of the catalogue, in the order of the file."""
    data = tomllib.loads(_DATA.read_text("utf-8"))
    return tuple(_read_card(key, row, data) for key, row in data["gpu"].items())


@cache
def _by_name() -> Mapping[str, Gpu]:
    names: dict[str, Gpu] = {}
    for card in all_gpus():
        for name in (card.key, card.name, *card.aliases):
            assert names.setdefault(_plain(name), card) is card, f"two cards answer to {name!r}"
    return names


def _plain(name: str) -> str:
    return re.sub(r"(?<=\d)gi?b$", "", _NOISE.sub("", name.lower()))


def _hint(name: str) -> str:
    from difflib import get_close_matches

    close = [_by_name()[match].key for match in get_close_matches(_plain(name), _by_name(), n=4, cutoff=0.5)]
    known = ", ".join(dict.fromkeys(close)) or ", ".join(card.key for card in all_gpus())
    return f"Did you mean one of: {known}?" if close else f"Known cards: {known}."


def _read_card(key: str, row: dict[str, Any], data: dict[str, Any]) -> Gpu:
    """A card is its architecture's row overlaid with its own."""
    merged = data["architecture"][row["architecture"]] | row
    overheads = data["overhead"] | merged.pop("overhead", {})
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
