"""Out-of-memory messages of other programs (`data/words.toml`): who prints them, and what they mean."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from tonnage.explain.text.log import Episode, table
from tonnage.units import GIB

Certainty = Literal["certain", "likely", "possible"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cause, its certainty, the evidence in a sentence, what remains open, and what to do."""

    cause: str
    certainty: Certainty
    sentence: str
    unproved: str = ""
    steps: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The cause in words."""
        title: str = table("causes")[self.cause]["title"]
        return title


class Said(NamedTuple):
    """One entry that matches a text, and its cause with the text's own figures filled in."""

    id: str
    speaker: str
    is_alone: bool
    suspect: Suspect


def said_in(episode: Episode) -> list[Said]:
    """Return every entry that matches an episode, in the order of the file: the more specific first."""
    found = []
    for pattern, row in _entries():
        if row.get("whole_line"):
            match = next((m for line in episode.lines if (m := pattern.fullmatch(line.strip()))), None)
        else:
            match = pattern.search(episode.text)
        if match is None:
            continue
        figures = {name: value[:40] for name, value in match.groupdict().items() if value}
        for name, value in match.groupdict().items():
            if value and name.endswith("_count") and (digits := value.replace(",", "")).isdigit():
                number = int(digits[:20])
                size = f"{number / GIB:.2f} GiB ({number:,} bytes)"
                figures[name] = size if name.startswith("bytes") else f"{number:,}"
        steps = tuple(filter(None, (_filled(step, figures) for step in row["steps"])))
        plainly = row.get("says_plainly", row["says"].replace("{", "").replace("}", ""))
        says = _filled(row["says"], figures) or plainly
        suspect = Suspect(row["cause"], row["certainty"], says, row["unproved"], steps)
        found.append(Said(row["id"], row["speaker"], row.get("alone", False), suspect))
    return found


def _filled(words: str, figures: dict[str, str]) -> str:
    """Fill figures into a sentence; empty if one of them is unknown."""
    try:
        return words.format_map(figures)
    except KeyError:
        return ""


@cache
def _entries() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    return [(re.compile(row["pattern"]), row) for row in table("words")["words"]]
