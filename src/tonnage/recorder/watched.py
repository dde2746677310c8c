"""Matches the hooks' log with PyTorch's events: phases, steps, modules and categories of every block.

It replaces the inference for snapshots (`recording.snapshot.phases` and `categories`) with observed values.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from tonnage.ledger import Category
from tonnage.recorder.log import Entry
from tonnage.recording.records import BY_PHASE, Allocation, Mark
from tonnage.recording.snapshot.origins import Origin


class LoggedPhases:
    """Follows the events; `phase` and `step` are the current ones, by the log."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.phase = "setup"
        self.step = 0
        self.stack: tuple[str, ...] = ()
        self.marks: list[Mark] = []
        self.modules: list[tuple[int, int]] = [(-1, 0)]
        self.found: list[tuple[int, Entry]] = []
        self._ahead = deque(entries)

    @property
    def line(self) -> str:
        """The script's line that called backward, while it runs."""
        return self.stack[0] if self.stack else ""

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


# cuBLAS's workspace for each thread that multiplies matrices: on Hopper and later, and before.
CUBLAS_BYTES = (32 << 20, 8519680)


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
    for block in _cublas(allocations):
        block.category = Category.WORKSPACE


def _cublas(allocations: Sequence[Allocation]) -> list[Allocation]:
    """Return the first block of that size in forward and in backward that was never freed."""
    first: dict[str, Allocation] = {}
    for block in allocations:
        if block.died is None and block.requested_bytes in CUBLAS_BYTES and block.category is Category.ACTIVATIONS:
            first.setdefault(block.phase, block)
    return list(first.values())


def _live_at(blocks: Sequence[Allocation], sequence: int) -> Allocation | None:
    """Return the block at one address that was live then; blocks are in order of birth."""
    place = bisect_right(blocks, sequence - 1, key=lambda block: block.born) - 1
    if place < 0:
        return None
    block = blocks[place]
    return block if block.died is None or block.died >= sequence else None
