"""Collectives on the card, told to whoever captures a step: what was called, and who waits for it.

A group's collectives run on a stream of its own, and its messages with each peer on another, as NCCL has it.
"""

from collections.abc import Callable

from tonnage.script import profiler
from tonnage.virtual.cluster.calls import Group


class Notes:
    """Of one rank."""

    def __init__(self) -> None:
        self._count = 0
        self._lanes: dict[tuple[Group, tuple[int, ...]], int] = {}

    def called(
        self, group: Group, operation: str, card_bytes: int, among: tuple[int, ...] | None = None
    ) -> "Noted | None":
        """A collective with so many bytes in all, among these ranks of the group or all of them; None of host tensors."""
        if not card_bytes:
            return None
        ranks = among or group.ranks
        apart = -(-(ranks[-1] - ranks[0]) // (len(ranks) - 1)) if len(ranks) > 1 else 1
        self._count += 1
        lane = self._lanes.setdefault((group, among or ()), len(self._lanes) + 1)
        profiler.note("collective", operation, self._count, card_bytes, len(ranks), apart, lane)
        return Noted(self._count)


class Noted:
    """One collective that was noted."""

    def __init__(self, number: int) -> None:
        self.waited: Callable[[], None] = lambda: profiler.note("stream", "wait_collective", number)
        self.promised: Callable[[], None] = lambda: profiler.note("stream", "future_collective", number)
