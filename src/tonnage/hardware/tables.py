"""TOML files of many tables, read one table at a time.

`tonnage run` waits for the catalogue, and the standard parser takes half a millisecond per GPU: so a file is split at
its headings, names are found by regex, and only the requested table is parsed. Every table starts with `[key]` on a
line of its own; `name` and `aliases` take one line each.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

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
