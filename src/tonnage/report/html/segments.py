"""The allocator's segments at the most relevant moment, with their blocks and holes, each drawn to scale."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

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


@dataclass(frozen=True, slots=True)
class DrawnSegment:
    """A segment of device memory that PyTorch reserved; blocks are in address order."""

    state: SegmentState
    stream: int
    blocks: list[Allocation]

    @property
    def size_bytes(self) -> int:
        """Size of the segment."""
        return self.state.size_bytes

    @property
    def unused_bytes(self) -> int:
        """Bytes in holes."""
        return self.state.unused_bytes


def segments_section(recording: Recording) -> str:
    """Return the largest segments, identical-looking ones as one row, and the rest in a sentence."""
    moment = moment_of(recording)
    segments = memory_map(recording, moment)
    kinds = _alike(segments)
    rows = [_cells(kind) for kind in kinds[:ROWS]]
    columns = ("size", "", "stream", "used", "largest hole", "from its first byte to its last")
    parts = [markup.table(columns, rows, name="segment-rows", numbers=(0, 1, 2, 3, 4))] if rows else []
    rest = [segment for kind in kinds[ROWS:] for segment in kind]
    if rest:
        held, unused = sum(s.size_bytes for s in rest), sum(s.unused_bytes for s in rest)
        parts.append(f'<p class="note">and {len(rest):,} smaller ones: {size(held)}, of it {size(unused)} unused</p>')
    return markup.section("Segments and their holes", *parts, name="segments", note=_note(recording, moment, segments))


def _note(recording: Recording, moment: int, segments: list[DrawnSegment]) -> str:
    if not segments:
        return "The recording has no segments."
    reserved, unused = sum(s.size_bytes for s in segments), sum(s.unused_bytes for s in segments)
    when = "When it ran out of memory" if recording.oom is not None else "When most was reserved"
    largest = max(segment.state.largest_hole_bytes for segment in segments)
    return (
        f"{when} (event {moment:,}), PyTorch held {size(reserved)} in {len(segments):,} "
        f'segment{"s" if len(segments) > 1 else ""}; <span id="unused">{size(unused)}</span> of it in holes, the largest '
        f'<span id="largest-hole">{size(largest)}</span>. What fits no hole of its stream takes more from the card.'
    )


def _alike(segments: list[DrawnSegment]) -> list[list[DrawnSegment]]:
    """Group segments that look the same: of one size, stream and category without a hole, or empty."""
    kinds: dict[tuple[object, ...], list[DrawnSegment]] = {}
    for segment in segments:
        categories = {block.category for block in segment.blocks}
        plain = len(categories) <= 1 and segment.unused_bytes in (0, segment.size_bytes)
        look = (*categories, segment.unused_bytes) if plain else (segment.state.address,)
        kinds.setdefault((segment.size_bytes, segment.stream, *look), []).append(segment)
    return list(kinds.values())


def _cells(alike: list[DrawnSegment]) -> tuple[str, ...]:
    segment = alike[0]
    hole = segment.state.largest_hole_bytes
    pieces = list(_pieces(segment))
    drawn = pieces if len(pieces) <= MOST_PIECES else list(_coarse(segment, pieces))
    boxes = "".join(_box(segment, piece) for piece in drawn)
    return (
        size(segment.size_bytes),
        f"× {len(alike):,}" if len(alike) > 1 else "",
        str(segment.stream),
        markup.share(segment.size_bytes - segment.unused_bytes, segment.size_bytes),
        size(hole) if hole else "–",
        f'<svg class="segment" viewBox="0 0 {_BAR_UNITS} 1" preserveAspectRatio="none" role="img">{boxes}</svg>',
    )


def _box(segment: DrawnSegment, piece: Piece) -> str:
    start, end, category = piece
    x, width = (_BAR_UNITS * value / segment.size_bytes for value in (start, end - start))
    return (
        f'<rect class="c-{category}" x="{x:.2f}" y="0" width="{width:.2f}" height="1">'
        f"<title>{category.replace('_', ' ')}, {format_bytes(end - start)}</title></rect>"
    )


def _pieces(segment: DrawnSegment) -> Iterator[Piece]:
    """Yield (start, end, category), merging neighbours of one category. Gaps between pieces are holes."""
    start = end = 0
    category = ""
    for block in segment.blocks:
        offset = block.address - segment.state.address
        if category == block.category and offset == end:
            end += block.block_bytes
            continue
        if category:
            yield start, end, category
        start, end, category = offset, offset + block.block_bytes, str(block.category)
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
    died = moment_of_failure(recording)
    if died is not None:
        return died
    timeline = recording.timeline
    peak = timeline.peak_reserved_bytes
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
    segments = [
        DrawnSegment(
            state,
            streams[known[bisect_right(known, state.address) - 1]],
            live[bisect_left(starts, state.address) : bisect_left(starts, state.address + state.size_bytes)],
        )
        for state in segments_at(recording, moment)
    ]
    return sorted(segments, key=lambda segment: -segment.size_bytes)
