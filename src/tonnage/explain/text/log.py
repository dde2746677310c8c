"""Find where memory ran out in a text of any length: a pasted message, or megabytes of log, streamed line by line.

Messages within a few hundred lines (ranks of one run, an exception and its consequences) form an episode. Of several
episodes the last one counts, and its first message.
"""

import codecs
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

from tonnage.explain.text.tables import events

_LONGEST_LINE = 16_384
_AROUND, _LONGEST_FRAME = 3000, 500
_BEFORE_LINES, _AFTER_LINES, _MOST_LINES = 300, 150, 800
_MOST_CHARACTERS = 200_000
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Episode:
    """The lines around the last place where memory ran out, where they begin, and the number of such places."""

    lines: tuple[str, ...]
    first_line: int
    count: int

    @cached_property
    def text(self) -> str:
        """The whole text, with runs of white space and box borders collapsed to one space."""
        return re.sub(r"[\s│┃|╭╮╰╯─❱]+", " ", " ".join(self.lines))


def text_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield the lines of a stream as text: UTF-8, or what a byte-order mark says; carriage returns end lines too."""
    head = stream.readline(_LONGEST_LINE)
    encoding = "utf-8-sig" if head.startswith(codecs.BOM_UTF8) else "utf-8"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    rest, piece = "", head
    while piece:
        rest += decoder.decode(piece)
        *whole, rest = re.split(r"\r\n|\r|\n", rest)
        yield from whole
        if len(rest) > _LONGEST_LINE:
            yield rest
            rest = ""
        piece = stream.readline(_LONGEST_LINE)
    yield rest + decoder.decode(b"", final=True)


def find_episode(lines: Iterable[str], is_shortage: Callable[[Episode], bool]) -> Episode | None:
    """Return the last episode that `is_shortage` accepts; None if there is none."""
    before: deque[str] = deque(maxlen=_BEFORE_LINES)
    kept: list[str] = []
    start = quiet = count = characters = 0
    found: Episode | None = None

    def close() -> None:
        nonlocal found, count
        episode = Episode(tuple(kept), start, count + 1)
        if kept and is_shortage(episode):
            found, count = episode, count + 1

    known_events = events()
    # Log entries may hold a traceback on one line, with escaped newlines.
    single = (part for line in lines for part in (line.split("\\n") if "Traceback" in line else [line]))
    for number, raw in enumerate(single, 1):
        lower = raw.lower()
        at = next((lower.find(event) for event in known_events if event in lower), -1)
        is_event = at >= 0
        # Of a long line, keep the surroundings of a message or frame.
        piece = raw[max(0, at - _AROUND) : at + _AROUND] if is_event else raw[:_LONGEST_FRAME]
        line = (_ANSI.sub("", piece) if "\x1b" in piece else piece).rstrip()
        if not kept and not is_event:
            before.append(line)
            continue
        if not kept:
            start = number
            kept = [*before]
        quiet = 0 if is_event else quiet + 1
        kept.append(line)
        characters += len(line)
        if quiet >= _AFTER_LINES or len(kept) >= _BEFORE_LINES + _MOST_LINES or characters > _MOST_CHARACTERS:
            close()
            before.clear()
            before.extend(kept[-_BEFORE_LINES:])
            kept, quiet, characters = [], 0, 0
    close()
    return found
