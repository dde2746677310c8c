"""The layout of a recording's memory at one moment, by addresses: segments, blocks, and holes (some awaiting streams)."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from tonnage.recording.recording import Recording


@dataclass(frozen=True, slots=True)
class Hole:
    """Reserved memory between blocks."""

    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentState:
    """Contiguous reserved memory, and its unused parts."""

    address: int
    size_bytes: int
    holes: tuple[Hole, ...]

    @property
    def unused_bytes(self) -> int:
        """The total size of the holes."""
        return sum(hole.size_bytes for hole in self.holes)

    @property
    def largest_hole_bytes(self) -> int:
        """The largest request that fits here."""
        return max((hole.size_bytes for hole in self.holes), default=0)


def segments_at(recording: Recording, sequence: int | None = None) -> list[SegmentState]:
    """Return the segments after an event (None: at the end), by address; adjacent pages are merged."""
    moment = len(recording.timeline.allocated_bytes) if sequence is None else sequence
    # Fixed segments never merge; mapped pages do.
    fixed: dict[int, int] = {}
    mapped = Ranges()
    for event in recording.segments:
        if event.sequence > moment:
            break
        low, high = event.address, event.address + event.size_bytes
        match event.action:
            case "segment_alloc":
                fixed[low] = high
            case "segment_free":
                fixed.pop(low, None)
            case "segment_map":
                mapped.add(low, high)
            case "segment_unmap":
                mapped.remove(low, high)
    blocks = sorted((a.address, a.address + a.block_bytes) for a in recording.live_at(moment))
    starts = [low for low, _ in blocks]
    states = []
    for low, high in sorted([*fixed.items(), *mapped.pairs()]):
        inside = blocks[bisect_left(starts, low) : bisect_right(starts, high - 1)]
        gaps = zip([low, *(end for _, end in inside)], [*(start for start, _ in inside), high], strict=True)
        holes = tuple(Hole(end, start - end) for end, start in gaps if start > end)
        states.append(SegmentState(low, high - low, holes))
    return states


class Ranges:
    """A set of addresses as ranges that do not touch."""

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._highs: list[int] = []

    def __len__(self) -> int:
        return len(self._lows)

    def pairs(self) -> list[tuple[int, int]]:
        """Return (first address, address after the last) of each range."""
        return list(zip(self._lows, self._highs, strict=True))

    def add(self, low: int, high: int) -> None:
        """Add a range."""
        first = bisect_left(self._highs, low)
        last = bisect_left(self._lows, high + 1)
        if first < last:
            low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
        self._put(first, last, [(low, high)] if low < high else [])

    def remove(self, low: int, high: int) -> None:
        """Remove a range."""
        first = bisect_left(self._highs, low + 1)
        last = bisect_left(self._lows, high)
        if first >= last or low >= high:
            return
        ends = [(self._lows[first], low), (high, self._highs[last - 1])]
        self._put(first, last, [(a, b) for a, b in ends if a < b])

    def _put(self, first: int, last: int, pairs: list[tuple[int, int]]) -> None:
        self._lows[first:last] = [low for low, _ in pairs]
        self._highs[first:last] = [high for _, high in pairs]
