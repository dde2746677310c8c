"""Out-of-memory messages of other programs (`data/words.toml`): who prints them, and what they mean."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tonnage.explain.text.log import Episode
from tonnage.units import GIB

Certainty = Literal["certain", "likely", "possible"]
_DATA = Path(__file__).parent / "data" / "words.toml"


@dataclass(frozen=True, slots=True)
class Said:
    """One entry that matches a text, with the text's own figures filled in."""

    id: str
    speaker: str
    cause: str
    certainty: Certainty
    says: str
    unproved: str
    steps: tuple[str, ...]
    is_alone: bool


def said_in(episode: Episode) -> list[Said]:
    """Return every entry that matches an episode, in the order of the file: the more specific first."""
    text = episode.text
    found = []
    for pattern, row in _entries():
        if row.get("whole_line"):
            match = next((m for line in episode.lines if (m := pattern.fullmatch(line.strip()))), None)
        else:
            match = pattern.search(text)
        if match:
            figures = {name: _figure(name, value) for name, value in match.groupdict().items() if value}
            steps = (filled for step in row["steps"] if (filled := _filled(step, figures)))
            says = _filled(row["says"], figures) or row.get(
                "says_plainly", row["says"].replace("{", "").replace("}", "")
            )
            found.append(
                Said(
                    id=row["id"],
                    speaker=row["speaker"],
                    cause=row["cause"],
                    certainty=row["certainty"],
                    says=says,
                    unproved=row["unproved"],
                    steps=tuple(steps),
                    is_alone=row.get("alone", False),
                )
            )
    return found


def _figure(name: str, value: str) -> str:
    if name.endswith("_count") and value.replace(",", "").isdigit():
        number = int(value.replace(",", "")[:20])
        return f"{number / GIB:.2f} GiB ({number:,} bytes)" if name.startswith("bytes") else f"{number:,}"
    return value[:40]


def _filled(words: str, figures: dict[str, str]) -> str:
    """Fill figures into a sentence; empty if one of them is unknown."""
    try:
        return words.format_map(figures)
    except KeyError:
        return ""


@cache
def _entries() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    return [(re.compile(row["pattern"]), row) for row in tomllib.loads(_DATA.read_text("utf-8"))["words"]]
