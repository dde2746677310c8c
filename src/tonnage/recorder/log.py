"""A timed log of what hooks saw. PyTorch's events also have times, so the two are matched afterwards.

Writing an entry costs a third of a microsecond. The log is bounded and drops its oldest entries, like PyTorch's.
"""

import time
from collections import deque
from typing import Literal, NamedTuple

from tonnage.ledger import Category
from tonnage.recording.records import MarkKind

MOST_ENTRIES = 2_000_000
Kind = MarkKind | Literal["module", "category"]


class Entry(NamedTuple):
    """A change at `time_us` (wall clock): a phase or step began, another module ran, or blocks got a category."""

    time_us: float
    kind: Kind
    name: str = ""
    context: int = 0
    category: Category | None = None
    addresses: tuple[int, ...] = ()
    only: Category | None = None
    line: str = ""


class Log:
    """Receives events of the attribution; `held_line` is the line that called backward, while it runs."""

    def __init__(self, most_entries: int = MOST_ENTRIES) -> None:
        self.entries: deque[Entry] = deque(maxlen=most_entries)
        self.held_line = ""
        self._last: dict[Category, tuple[int, ...]] = {}

    def mark(self, kind: MarkKind, name: str) -> None:
        """Record that a phase or step begins."""
        self.entries.append(Entry(_now_us(), kind, name, line=self.held_line if name == "backward" else ""))

    def at_module(self, context: int) -> None:
        """Record that another module runs."""
        self.entries.append(Entry(_now_us(), "module", context=context))

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None:
        """Record the category of these blocks."""
        found = tuple(addresses)
        last = self._last.get(category)
        if found == last:
            found = last  # steps repeat, so they share one tuple
        self._last[category] = found
        self.entries.append(Entry(_now_us(), "category", category=category, addresses=found, only=only))


def _now_us() -> float:
    return time.time_ns() / 1000
