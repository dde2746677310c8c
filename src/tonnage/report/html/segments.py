"""The allocator's segments at the most relevant moment, with their blocks and holes, each drawn to scale."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from tonnage.recording import Allocation, Recording
from tonnage.recording.beyond import moment_of_failure
from tonnage.recording.holes import SegmentState, segments_at
from tonnage.report.html import markup
from tonnage.report.html.markup import size
from tonnage.units import format_bytes

ROWS = 40
MOST_PIECES = 300
_BAR_UNITS = 1000

Piece = tuple[int, int, str]


def segments_section(recording: Recording) -> str:
    """Return the largest segments, identical-looking ones as one row, and the rest in a sentence."""
    moment = moment_of(recording)
    segments = memory_map(recording, moment)
    # Those that look the same: of one size, stream and category without a hole, or empty.
    alike: dict[tuple[object, ...], list[DrawnSegment]] = {}
    for segment in segments:
        categories = {block.category for block in segment.blocks}
        plain = len(categories) <= 1 and segment.unused_bytes in (0, segment.size_bytes)
        look = (*categories, segment.unused_bytes) if plain else (segment.state.address,)
        alike.setdefault((segment.size_bytes, segment.stream, *look), []).append(segment)
    kinds = list(alike.values())
    rows = [_cells(kind) for kind in kinds[:ROWS]]
    columns = ("size", "", "stream", "used", "largest hole", "from its first byte to its last")
    parts = [markup.table(columns, rows, name="segment-rows", numbers=(0, 1, 2, 3, 4))] if rows else []
    rest = [segment for kind in kinds[ROWS:] for segment in kind]
    if rest:
        held, unused = sum(s.size_bytes for s in rest), sum(s.unused_bytes for s in rest)
        parts.append(f'<p class="note">and {len(rest):,} smaller ones: {size(held)}, of it {size(unused)} unused</p>')
    note = "The recording has no segments."
    if segments:
        held, unused = sum(s.size_bytes for s in segments), sum(s.unused_bytes for s in segments)
        when = "When it ran out of memory" if recording.oom is not None else "When most was reserved"
        largest = max(segment.state.largest_hole_bytes for segment in segments)
        note = (
            f"{when} (event {moment:,}), PyTorch held {size(held)} in {len(segments):,} "
            f'segment{"s" if len(segments) > 1 else ""}; <span id="unused">{size(unused)}</span> of it in holes, the '
            f'largest <span id="largest-hole">{size(largest)}</span>. What fits no hole of its stream takes more from the card.'
        )
    return markup.section("Segments and their holes", *parts, name="segments", note=note)


class DrawnSegment(NamedTuple):
    """A segment of device memory that PyTorch reserved; blocks are in address order."""

    state: SegmentState
    stream: int
    blocks: list[Allocation]
    size_bytes: int
    unused_bytes: int


def _cells(alike: list[DrawnSegment]) -> tuple[str, ...]:
    segment = alike[0]
    whole, hole = segment.size_bytes, segment.state.largest_hole_bytes
    pieces = list(_pieces(segment))
    boxes = []
    for start, end, category in pieces if len(pieces) <= MOST_PIECES else _coarse(segment, pieces):
        x, width = (_BAR_UNITS * value / whole for value in (start, end - start))
        boxes.append(
            f'<rect class="c-{category}" x="{x:.2f}" y="0" width="{width:.2f}" height="1">'
            f"<title>{category.replace('_', ' ')}, {format_bytes(end - start)}</title></rect>"
        )
    return (
        size(whole),
        f"× {len(alike):,}" if len(alike) > 1 else "",
        str(segment.stream),
        markup.share(whole - segment.unused_bytes, whole),
        size(hole) if hole else "–",
        f'<svg class="segment" viewBox="0 0 {_BAR_UNITS} 1" preserveAspectRatio="none" role="img">{"".join(boxes)}</svg>',
    )


def _pieces(segment: DrawnSegment) -> Iterator[Piece]:
    """Yield (start, end, category), merging neighbours of one category. Gaps between pieces are holes."""
    start, end, category = 0, 0, ""
    for block in segment.blocks:
        offset = block.address - segment.state.address
        if category and (category != block.category or offset != end):
            yield start, end, category
        if category != block.category or offset != end:
            start = offset
        end, category = offset + block.block_bytes, str(block.category)
    if category:
        yield start, end, category


def _coarse(segment: DrawnSegment, pieces: list[Piece]) -> Iterator[Piece]:
    """Yield a grid for segments with too many pieces: each cell shows what is at its middle."""
    step = segment.size_bytes / MOST_PIECES
    kinds = []
    position = 0
    for cell in range(MOST_PIECES):
        middle = (cell + 0.5) * step
        while position < len(pieces) and pieces[position][1] <= middle:
            position += 1
        inside = position < len(pieces) and pieces[position][0] <= middle
        kinds.append(pieces[position][2] if inside else "")
    for category, cells in groupby(range(MOST_PIECES), key=kinds.__getitem__):
        found = list(cells)
        if category:
            yield int(found[0] * step), int((found[-1] + 1) * step), category


def moment_of(recording: Recording) -> int:
    """Return the request that failed, else the moment with most allocated while most was reserved."""
    if (died := moment_of_failure(recording)) is not None:
        return died
    timeline, peak = recording.timeline, recording.peak_reserved_bytes
    fullest = (at for at, reserved in enumerate(timeline.reserved_bytes) if reserved == peak)
    return max(fullest, key=lambda at: timeline.allocated_bytes[at])


def memory_map(recording: Recording, moment: int) -> list[DrawnSegment]:
    """Return what was reserved after an event, largest first."""
    live = [a for a in recording.allocations if a.born <= moment and (a.died is None or a.died > moment)]
    live.sort(key=lambda a: a.address)
    starts = [a.address for a in live]
    # A range of pages may begin inside one mapping: its stream is that of the preceding mapping.
    streams = {event.address: event.stream for event in recording.segments if event.sequence <= moment}
    known = sorted(streams)
    segments = []
    for state in segments_at(recording, moment):
        stream = streams[known[bisect_right(known, state.address) - 1]]
        first, end = (bisect_left(starts, at) for at in (state.address, state.address + state.size_bytes))
        segments.append(DrawnSegment(state, stream, live[first:end], state.size_bytes, state.unused_bytes))
    return sorted(segments, key=lambda segment: -segment.size_bytes)
