"""Fragmentation: reserved memory far beyond allocated, in pieces too small for the next request.

A run failed of it if its request would have fitted had all reserved, unused memory been one piece. For a run that
completed, only large amounts are reported: healthy runs reserve up to 1.58 times what they allocate.
"""

from bisect import bisect_right
from dataclasses import dataclass

from tonnage.allocator import AllocatorSettings
from tonnage.explain.case import Case
from tonnage.explain.fixes import Finding, Guilty, allocator_fix, lines_words
from tonnage.recording import Allocation, Recording
from tonnage.recording.holes import segments_at
from tonnage.units import MIB, format_bytes

_FATAL_SHARE = 0.1
_LARGE_SHARE = 0.4
_LARGE_BYTES = 128 * MIB
_LINES = 5
_CONFIGURATIONS = (
    "expandable_segments:True",
    "max_split_size_mb:256",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:128",
)


@dataclass(frozen=True, slots=True)
class Holes:
    """A segment that is not full: its free bytes, the largest hole, and the blocks that pin it."""

    free_bytes: int
    largest_bytes: int
    blocks: tuple[Allocation, ...]
    is_empty: bool = False


def fragmentation(case: Case) -> Finding | None:
    """Return the unused bytes, the largest hole, the lines whose blocks pin them, and the setting that helps."""
    # Unused bytes count if they caused the failure or are large.
    death, moment = case.death, None
    if death:
        reserved, unused = death.reserved_bytes, death.unused_bytes
        if death.requested_bytes <= death.free_bytes + unused and unused >= _FATAL_SHARE * reserved:
            moment = case.moment
    elif reserved := case.recording.own_peak_reserved_bytes:
        timeline = case.recording.timeline
        moment = timeline.best_used(reserved, since=case.recording.begins_at)
        unused = 0 if moment is None else reserved - timeline.allocated_bytes[moment]
        if unused < max(_LARGE_SHARE * reserved, _LARGE_BYTES):
            return None
    if moment is None:
        return None
    segments = holes_at(case.recording, moment)
    hole = max((holes.largest_bytes for holes in segments), default=0)
    # The lines whose blocks pin segments; a segment's free bytes are shared by all its blocks.
    room: dict[tuple[str, bool], float] = {}
    count: dict[tuple[str, bool], int] = {}
    for holes in segments:
        for block in holes.blocks:
            key = (block.line, holes.is_empty)
            room[key] = room.get(key, 0) + holes.free_bytes / len(holes.blocks)
            count[key] = count.get(key, 0) + 1
    ranked = sorted(room, key=lambda key: -room[key])[:_LINES]
    words = {True: "taken for it, and empty now", False: "free beside its blocks"}
    lines = tuple(Guilty(key[0], round(room[key]), count[key], words[key[1]]) for key in ranked)
    pieces = f"{format_bytes(unused)} of the {format_bytes(reserved)} reserved lay unused in pieces"
    because = f", because of blocks made{where}" if (where := lines_words(lines)) else ""
    largest = f"the largest hole {format_bytes(hole)}{because}" if hole else ""
    asked = f" when {format_bytes(death.requested_bytes)} was asked for" if death else ""
    sentence = ", ".join(filter(None, [f"{pieces}{asked}", largest]))
    # The first allocator setting that helps, tested by replay.
    present = case.recording.header.settings
    useless = ("max_split",) if AllocatorSettings.parse(present).expandable_segments else ()
    untried = (each for each in _CONFIGURATIONS if each.split(":")[0] not in present and not each.startswith(useless))
    fix = next(filter(None, (allocator_fix(case.recording, configuration) for configuration in untried)), None)
    return Finding("fragmentation", sentence, unused, "fragmentation", unused, lines, (fix,) if fix else ())


def holes_at(recording: Recording, moment: int) -> list[Holes]:
    """Return the segments with holes after an event, most free bytes first."""
    segments = segments_at(recording, moment)
    starts = [segment.address for segment in segments]
    inside: dict[int, list[Allocation]] = {start: [] for start in starts}
    for a in recording.live_at(moment):
        place = bisect_right(starts, a.address) - 1
        if place >= 0:
            inside[starts[place]].append(a)
    # The largest initial block of each empty segment, for which it was reserved.
    first: dict[int, Allocation] = {}
    for a in recording.allocations:
        if not inside.get(a.address, [a]) and a.born <= moment:
            first[a.address] = max(first.get(a.address, a), a, key=lambda block: block.block_bytes)
    found = []
    for s in segments:
        blocks = inside[s.address] or [block for block in [first.get(s.address)] if block]
        if s.unused_bytes:
            found.append(Holes(s.unused_bytes, s.largest_hole_bytes, tuple(blocks), not inside[s.address]))
    return sorted(found, key=lambda holes: -holes.free_bytes)
