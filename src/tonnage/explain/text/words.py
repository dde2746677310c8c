"""Out-of-memory messages of other programs (`data/words.toml`): who prints them, and what they mean."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tonnage.explain.text.log import Episode, table
from tonnage.units import GIB

Certainty = Literal["certain", "likely", "possible"]


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
            steps = tuple(filter(None, (_filled(step, figures) for step in row["steps"])))
            plainly = row.get("says_plainly", row["says"].replace("{", "").replace("}", ""))
            says, alone = _filled(row["says"], figures) or plainly, row.get("alone", False)
            known = (row["id"], row["speaker"], row["cause"], row["certainty"])
            found.append(Said(*known, says, row["unproved"], steps, alone))
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
    return [(re.compile(row["pattern"]), row) for row in table("words")["words"]]
