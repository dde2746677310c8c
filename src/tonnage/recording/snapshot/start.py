"""What there was before a trace began: blocks and segments that its events never make.

A snapshot has the state at its end and, as often as not, only the last of the events. Whatever is freed without having
been allocated, or is there at the end without having been allocated, was there at the start.
"""

from dataclasses import dataclass, field

from tonnage.errors import BadSnapshot
from tonnage.recording.holes import Ranges
from tonnage.recording.snapshot.schema import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    HeldBlock,
    HeldSegment,
    Trace,
)

MOST_RANGES = 1 << 17


@dataclass(frozen=True, slots=True)
class StartSegment:
    """Memory that the allocator held already."""

    address: int
    size_bytes: int
    stream: int
    is_expandable: bool


@dataclass(frozen=True, slots=True)
class StartBlock:
    """A block that was in use already; `size_bytes` is known where it is in use at the end too."""

    address: int
    requested_bytes: int
    stream: int
    stack: int = 0
    size_bytes: int | None = None


@dataclass(slots=True)
class Start:
    """The state before the first event."""

    segments: list[StartSegment] = field(default_factory=list)
    blocks: list[StartBlock] = field(default_factory=list)


def start_of(trace: Trace, held: list[HeldSegment]) -> Start:
    """The state from which the events of a device lead to what it holds at the end."""
    blocks = _freed_only(trace) + _held_only(trace, held)
    segments = _fixed_segments(trace, held) + _mapped_ranges(trace, held)
    return Start(segments, sorted(blocks, key=lambda block: block.address))


def _freed_only(trace: Trace) -> list[StartBlock]:
    found = []
    live: set[int] = set()
    waiting: set[int] = set()
    for action, address, size, stream, _, _ in trace.rows():
        if action == ALLOC:
            live.add(address)
        elif action == FREE_REQUESTED or (action == FREE_COMPLETED and address not in waiting):
            if address not in live:
                found.append(StartBlock(address, size, stream))
            live.discard(address)
            if action == FREE_REQUESTED:
                waiting.add(address)
        elif action == FREE_COMPLETED:
            waiting.discard(address)
    return list({block.address: block for block in reversed(found)}.values())


def _held_only(trace: Trace, held: list[HeldSegment]) -> list[StartBlock]:
    """In use at the end, and no event allocated it last."""
    last: dict[int, int] = {}
    for action, address in zip(trace.actions, trace.addresses, strict=True):
        if action in (ALLOC, FREE_REQUESTED, FREE_COMPLETED):
            last[address] = action
    return [
        StartBlock(block.address, block.requested_bytes, segment.stream, block.stack, block.size_bytes)
        for segment in held
        for block in _allocated(segment)
        if block.address not in last
    ]


def _allocated(segment: HeldSegment) -> list[HeldBlock]:
    return [block for block in segment.blocks if block.is_allocated]


def _fixed_segments(trace: Trace, held: list[HeldSegment]) -> list[StartSegment]:
    found = []
    given: set[int] = set()
    for action, address, size, stream, _, _ in trace.rows():
        if action == SEGMENT_ALLOC:
            given.add(address)
        elif action == SEGMENT_FREE:
            if address not in given:
                found.append(StartSegment(address, size, stream, False))
            given.discard(address)
    kept = [s for s in held if not s.is_expandable and s.address not in given]
    return found + [StartSegment(s.address, s.size_bytes, s.stream, False) for s in kept]


def _mapped_ranges(trace: Trace, held: list[HeldSegment]) -> list[StartSegment]:
    """Pages that were mapped at the start: those at the end, with the events taken back, last first."""
    ranges = Ranges()
    streams: dict[int, int] = {}
    for segment in held:
        if segment.is_expandable:
            ranges.add(segment.address, segment.address + segment.size_bytes)
            streams[segment.address] = segment.stream
    for place in range(len(trace) - 1, -1, -1):
        action = trace.actions[place]
        if action in (SEGMENT_MAP, SEGMENT_UNMAP):
            low = trace.addresses[place]
            change = ranges.remove if action == SEGMENT_MAP else ranges.add
            change(low, low + trace.sizes[place])
            if len(ranges) > MOST_RANGES:
                raise BadSnapshot(f"Its memory lies in more than {MOST_RANGES:,} ranges.")
    return [StartSegment(low, high - low, streams.get(low, 0), True) for low, high in ranges.pairs()]
