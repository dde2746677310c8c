"""Fragmentation: reserved memory far beyond allocated, in pieces too small for the next request.

A run failed of it if its request would have fitted had all reserved, unused memory been one piece. For a run that
completed, only large amounts are reported: healthy runs reserve up to 1.58 times what they allocate.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.allocator import AllocatorSettings
from tonnage.explain.case import Case, live_at
from tonnage.explain.findings import Finding, Guilty, lines_words
from tonnage.explain.fixes import Fix, allocator_fix
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
    moment = case.moment if case.death else _reserved_peak(case)
    unused = None if moment is None else _unused_bytes(case, moment)
    if moment is None or unused is None:
        return None
    segments = holes_at(case.recording, moment)
    hole = max((holes.largest_bytes for holes in segments), default=0)
    lines = _guilty_lines(segments)
    return Finding(
        "fragmentation",
        _sentence(case, unused, hole, lines),
        unused,
        "fragmentation",
        unused,
        lines,
        tuple(_fixes(case)),
    )


def _unused_bytes(case: Case, moment: int) -> int | None:
    """Return the unused bytes, if they caused the failure or are large."""
    death = case.death
    if death is None:
        timeline = case.recording.timeline
        reserved = timeline.reserved_bytes[moment]
        unused = reserved - timeline.allocated_bytes[moment]
        return unused if unused >= max(_LARGE_SHARE * reserved, _LARGE_BYTES) else None
    would_fit = death.requested_bytes <= death.free_bytes + death.unused_bytes
    return death.unused_bytes if would_fit and death.unused_bytes >= _FATAL_SHARE * death.reserved_bytes else None


def _reserved_peak(case: Case) -> int | None:
    """Return the moment of the reserved peak at which most was allocated; None if nothing was reserved."""
    timeline, peak = case.recording.timeline, case.recording.own_peak_reserved_bytes
    since = range(case.recording.begins_at, len(timeline.reserved_bytes))
    moments = [moment for moment in since if peak and timeline.reserved_bytes[moment] == peak]
    return max(moments, key=timeline.allocated_bytes.__getitem__, default=None)


def _sentence(case: Case, unused: int, hole: int, lines: tuple[Guilty, ...]) -> str:
    death = case.death
    reserved = death.reserved_bytes if death else case.recording.own_peak_reserved_bytes
    pieces = f"{format_bytes(unused)} of the {format_bytes(reserved)} reserved lay unused in pieces"
    because = f", because of blocks made{where}" if (where := lines_words(lines)) else ""
    largest = f"the largest hole {format_bytes(hole)}{because}" if hole else ""
    asked = f" when {format_bytes(death.requested_bytes)} was asked for" if death else ""
    return ", ".join(filter(None, [f"{pieces}{asked}", largest]))


def _guilty_lines(segments: list[Holes]) -> tuple[Guilty, ...]:
    """Return the lines whose blocks pin segments; a segment's free bytes are shared by all its blocks."""
    room: dict[tuple[str, bool], float] = {}
    count: dict[tuple[str, bool], int] = {}
    for holes in segments:
        for block in holes.blocks:
            key = (block.line, holes.is_empty)
            room[key] = room.get(key, 0) + holes.free_bytes / len(holes.blocks)
            count[key] = count.get(key, 0) + 1
    ranked = sorted(room, key=lambda key: -room[key])[:_LINES]
    words = {True: "taken for it, and empty now", False: "free beside its blocks"}
    return tuple(Guilty(key[0], round(room[key]), count[key], words[key[1]]) for key in ranked)


def _fixes(case: Case) -> Iterator[Fix]:
    """Yield the first allocator setting that helps, tested by replay."""
    present = case.recording.header.settings
    for configuration in _CONFIGURATIONS:
        if configuration.split(":")[0] in present:
            continue
        if AllocatorSettings.parse(present).expandable_segments and configuration.startswith("max_split"):
            continue
        if fix := allocator_fix(case.recording, configuration):
            yield fix
            return


def holes_at(recording: Recording, moment: int) -> list[Holes]:
    """Return the segments with holes after an event, most free bytes first."""
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
    """Return the largest initial block of each segment, for which it was reserved."""
    found: dict[int, list[Allocation]] = {}
    for a in recording.allocations:
        if a.address in starts and a.born <= moment:
            best = found.get(a.address)
            if best is None or a.block_bytes > best[0].block_bytes:
                found[a.address] = [a]
    return found
