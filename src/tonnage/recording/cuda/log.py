"""What hooks saw, with the time: PyTorch's events carry times too, so the two can be laid side by side afterwards.

Writing an entry costs a third of a microsecond. The log is bounded; its oldest entries go first, as PyTorch's events do.
"""

import time
from collections import deque
from typing import Literal, NamedTuple

from tonnage.ledger import Category
from tonnage.recording.records import MarkKind

MOST_ENTRIES = 2_000_000
Kind = MarkKind | Literal["module", "category"]


class Entry(NamedTuple):
    """At `time_us` (of the clock on the wall) this began: a phase or step, a module's number, or blocks got a category."""

    time_us: float
    kind: Kind
    name: str = ""
    context: int = 0
    category: Category | None = None
    addresses: tuple[int, ...] = ()
    only: Category | None = None
    line: str = ""


class Log:
    """A sink of the attribution; `held_line` is what backward was called from, while it runs."""

    def __init__(self, most_entries: int = MOST_ENTRIES) -> None:
        self.entries: deque[Entry] = deque(maxlen=most_entries)
        self.held_line = ""
        self._last: dict[Category, tuple[int, ...]] = {}

    def mark(self, kind: MarkKind, name: str) -> None:
        """A phase or step begins."""
        self.entries.append(Entry(_now_us(), kind, name, line=self.held_line if name == "backward" else ""))

    def at_module(self, context: int) -> None:
        """Another module is at work."""
        self.entries.append(Entry(_now_us(), "module", context=context))

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None:
        """What these blocks turned out to be for."""
        found = tuple(addresses)
        last = self._last.get(category)
        if found == last:
            found = last  # steps repeat themselves: one tuple serves them all
        self._last[category] = found
        self.entries.append(Entry(_now_us(), "category", category=category, addresses=found, only=only))


def _now_us() -> float:
    return time.time_ns() / 1000
