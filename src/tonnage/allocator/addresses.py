"""Place segments in the virtual address space of a simulated device.

The order of addresses decides which of two equally large free blocks is taken, so segments are placed as NVIDIA's
driver on Linux was observed to place them: in ranges of a multiple of 32 MiB, from the top of the address space
down; the rest of a range serves later and smaller requests, newest range first. Other mappings of the process are
unknown here; a replay takes its addresses from the trace.
"""

RANGE_BYTES = 32 * 2**20
TOP = 0x7F80_0000_0000


class _Range:
    """A range of addresses and the holes in it, by address."""

    __slots__ = ("holes", "start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.holes = [(start, stop)]

    def take(self, size: int) -> int | None:
        for index, (start, stop) in enumerate(self.holes):
            if stop - start >= size:
                self.holes[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        self.holes = _merged([*self.holes, (start, start + size)])

    @property
    def is_empty(self) -> bool:
        return self.holes == [(self.start, self.stop)]


class AddressSpace:
    """Allocates and frees address ranges."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []
        self._gaps: list[tuple[int, int]] = []
        self._bottom = TOP

    def take(self, size_bytes: int) -> int:
        """Return the start of a free range."""
        for each in reversed(self._ranges):
            address = each.take(size_bytes)
            if address is not None:
                return address
        length = -(-size_bytes // RANGE_BYTES) * RANGE_BYTES
        start = self._reserve(length)
        self._ranges.append(_Range(start, start + length))
        self._ranges[-1].take(size_bytes)
        return start

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a range; an empty one is dropped."""
        index = next(i for i, each in enumerate(self._ranges) if each.start <= address < each.stop)
        found = self._ranges[index]
        found.give_back(address, size_bytes)
        if found.is_empty:
            del self._ranges[index]
            self._gaps = _merged([*self._gaps, (found.start, found.stop)])

    def _reserve(self, length: int) -> int:
        for index in reversed(range(len(self._gaps))):
            start, stop = self._gaps[index]
            if stop - start >= length:
                self._gaps[index : index + 1] = [(start, stop - length)] if stop - start > length else []
                return stop - length
        self._bottom -= length
        return self._bottom


def _merged(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(stretches):
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged
