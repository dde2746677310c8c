"""Reconstructs the size of each block from the addresses of events.

The allocator gives a request the whole free block at its address, or splits it; which of the two follows from the
distance to the next block in use. This also works for a trace that begins mid-run, if the blocks in use before are
added first.
"""

from bisect import bisect_left, bisect_right, insort

from tonnage.allocator import AllocatorSettings
from tonnage.allocator.settings import SMALL_BYTES


class Ground:
    """The segments of one device and the large blocks in them. Small and expandable blocks have their rounded size."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._settings = settings
        self._rounded: dict[int, int] = {}
        self._bases: list[int] = []
        self._ends: dict[int, int] = {}
        self._starts: dict[int, list[int]] = {}
        self._base_of: dict[int, int] = {}

    def add_segment(self, address: int, size_bytes: int) -> None:
        """Add a segment."""
        if address not in self._ends:
            insort(self._bases, address)
            self._starts[address] = []
        self._ends[address] = address + size_bytes

    def remove_segment(self, address: int) -> None:
        """Remove a segment."""
        if self._ends.pop(address, None) is not None:
            del self._bases[bisect_left(self._bases, address)]
            for start in self._starts.pop(address):
                self._base_of.pop(start, None)

    def lay(self, address: int, requested_bytes: int, end: int | None = None) -> int:
        """Add a block and return its size. `end` is the start of a later block, if one was seen."""
        rounded = self._rounded.get(requested_bytes)
        if rounded is None:
            rounded = self._rounded[requested_bytes] = self._settings.rounded_bytes(requested_bytes)
        if rounded <= SMALL_BYTES:
            return rounded
        segment = bisect_right(self._bases, address) - 1
        if segment < 0 or address >= self._ends[self._bases[segment]]:
            return rounded
        base = self._bases[segment]
        starts = self._starts[base]
        place = bisect_right(starts, address)
        room = min(starts[place] if place < len(starts) else self._ends[base], end or self._ends[base]) - address
        if not place or starts[place - 1] != address:
            starts.insert(place, address)
        self._base_of[address] = base
        splits = room - rounded > SMALL_BYTES and rounded < self._settings.max_split_bytes
        return rounded if splits or room < rounded else room

    def lift(self, address: int) -> None:
        """Free the block at this address."""
        base = self._base_of.pop(address, None)
        if base is not None:
            starts = self._starts[base]
            del starts[bisect_left(starts, address)]
