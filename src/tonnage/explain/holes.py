"""Whose the free room is that lay inside the allocator's memory at a moment.

Of a segment in use in part it is the fault of the blocks in the way; of an empty one, of the block that it was taken for.
Where the holes are is `recording.holes`'s to say.
"""

from bisect import bisect_right
from dataclasses import dataclass

from tonnage.explain.case import live_at
from tonnage.recording import Allocation, Recording
from tonnage.recording.holes import segments_at


@dataclass(frozen=True, slots=True)
class Holes:
    """A segment that is not full: its free room, the largest piece of it, and the blocks that answer for it."""

    free_bytes: int
    largest_bytes: int
    blocks: tuple[Allocation, ...]
    is_empty: bool = False


def holes_at(recording: Recording, moment: int) -> list[Holes]:
    """The segments with free room after an event, most room first."""
    segments = segments_at(recording, moment)
    starts = [segment.address for segment in segments]
    inside: dict[int, list[Allocation]] = {start: [] for start in starts}
    for a in live_at(recording, moment):
        place = bisect_right(starts, a.address) - 1
        if place >= 0:
            inside[starts[place]].append(a)
    first = _first_blocks(recording, {start for start in starts if not inside[start]}, moment)
    found = [
        Holes(
            s.unused_bytes,
            s.largest_hole_bytes,
            tuple(inside[s.address] or first.get(s.address, ())),
            not inside[s.address],
        )
        for s in segments
        if s.unused_bytes
    ]
    return sorted(found, key=lambda holes: -holes.free_bytes)


def _first_blocks(recording: Recording, starts: set[int], moment: int) -> dict[int, list[Allocation]]:
    """The largest block that each of these segments had at its start: what it was taken for."""
    found: dict[int, list[Allocation]] = {}
    for a in recording.allocations:
        if a.address in starts and a.born <= moment:
            best = found.get(a.address)
            if best is None or a.block_bytes > best[0].block_bytes:
                found[a.address] = [a]
    return found
