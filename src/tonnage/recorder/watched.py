"""A timed log of what hooks saw, matched with PyTorch's events: phases, steps, modules and categories of every block.

PyTorch's events also have times, so the two are matched afterwards; this replaces the inference for snapshots
(`recording.snapshot.phases` and `categories`) with observed values. Writing an entry costs a third of a microsecond.
The log is bounded and drops its oldest entries, like PyTorch's.
"""

import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from tonnage.ledger import Category
from tonnage.recording.records import BY_PHASE, Allocation, Mark, MarkKind
from tonnage.recording.snapshot.phases import CUBLAS_BYTES, Guide, Origin

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


class LoggedPhases(Guide):
    """Follows the events; `phase` and `step` are the current ones, by the log."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        super().__init__("setup")
        self.modules: list[tuple[int, int]] = [(-1, 0)]
        self.found: list[tuple[int, Entry]] = []
        self._ahead = deque(entries)

    def reach(self, origin: Origin, time_us: int, sequence: int) -> None:
        """Process log entries from before the next event."""
        # Times of events are truncated to microseconds.
        while self._ahead and self._ahead[0].time_us < time_us + 1:
            self._take(self._ahead.popleft(), sequence)

    def finish(self, sequence: int) -> None:
        """Process the rest of the log after the last event."""
        while self._ahead:
            self._take(self._ahead.popleft(), sequence)

    def _take(self, entry: Entry, sequence: int) -> None:
        if entry.kind == "module":
            self.modules.append((sequence, entry.context))
        elif entry.kind == "category":
            self.found.append((sequence, entry))
        elif entry.kind == "step":
            self.step = int(entry.name)
            self.marks.append(Mark(sequence, "step", entry.name))
        else:
            self.phase = entry.name
            self.stack = (entry.line,) if entry.line else ()
            self.marks.append(Mark(sequence, "phase", entry.name))


def attribute(allocations: Sequence[Allocation], phases: LoggedPhases, contexts: Sequence[str]) -> None:
    """Set the module and category of every block."""
    starts = [sequence for sequence, _ in phases.modules]
    by_address: dict[int, list[Allocation]] = defaultdict(list)
    for allocation in allocations:
        context = phases.modules[bisect_right(starts, allocation.born) - 1][1]
        allocation.module = contexts[context] if allocation.phase != "backward" else ""
        allocation.category = BY_PHASE.get(allocation.phase, Category.OTHER)
        if allocation.died == allocation.born + 1:
            allocation.category = Category.WORKSPACE  # no event in between: inside one operator
        by_address[allocation.address].append(allocation)
    for sequence, entry in phases.found:
        for address in entry.addresses:
            block = _live_at(by_address.get(address, ()), sequence)
            if block and entry.category and (entry.only is None or block.category is entry.only):
                block.category = entry.category
    # cuBLAS's: the first block of its size in forward and in backward that was never freed.
    first: dict[str, Allocation] = {}
    for block in allocations:
        if block.died is None and block.requested_bytes in CUBLAS_BYTES and block.category is Category.ACTIVATIONS:
            first.setdefault(block.phase, block)
    for block in first.values():
        block.category = Category.WORKSPACE


def _live_at(blocks: Sequence[Allocation], sequence: int) -> Allocation | None:
    """Return the block at one address that was live then; blocks are in order of birth."""
    place = bisect_right(blocks, sequence - 1, key=lambda block: block.born) - 1
    if place < 0:
        return None
    block = blocks[place]
    return block if block.died is None or block.died >= sequence else None
