"""Which bytes a block holds, from the addresses that the events tell.

The allocator gives a request the whole free block at its address, or splits it; which of both follows from how far the
next block in use is. No placement is guessed: this holds for a trace that begins in mid-run as well, as long as what was
in use before is laid down first.
"""

from bisect import bisect_left, bisect_right, insort

from tonnage.allocator import AllocatorSettings
from tonnage.allocator.settings import SMALL_BYTES


class Ground:
    """The segments of one device and the large blocks in them. Small and expandable blocks are as they are rounded."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._settings = settings
        self._rounded: dict[int, int] = {}
        self._bases: list[int] = []
        self._ends: dict[int, int] = {}
        self._starts: dict[int, list[int]] = {}
        self._base_of: dict[int, int] = {}

    def add_segment(self, address: int, size_bytes: int) -> None:
        """The device gave this."""
        if address not in self._ends:
            insort(self._bases, address)
            self._starts[address] = []
        self._ends[address] = address + size_bytes

    def remove_segment(self, address: int) -> None:
        """The device has it back."""
        if self._ends.pop(address, None) is not None:
            del self._bases[bisect_left(self._bases, address)]
            for start in self._starts.pop(address):
                self._base_of.pop(start, None)

    def lay(self, address: int, requested_bytes: int, end: int | None = None) -> int:
        """A block begins here: the bytes that it holds. Where another was seen to begin behind it, `end` says so."""
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
        """The block that begins here is free."""
        base = self._base_of.pop(address, None)
        if base is not None:
            starts = self._starts[base]
            del starts[bisect_left(starts, address)]
