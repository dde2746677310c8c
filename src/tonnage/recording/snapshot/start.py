"""The state before a trace began: blocks and segments that its events never allocate.

A snapshot has the state at its end and the last events. Whatever is freed, or exists at the end, without having been
allocated existed at the start. Where the end contradicts the events, as recording stopped before, the events count.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tonnage.allocator import AllocatorSettings
from tonnage.allocator.adopt import LiveBlock, Segment, State
from tonnage.allocator.settings import SMALL_BYTES
from tonnage.errors import BadSnapshot
from tonnage.recording.holes import Ranges
from tonnage.recording.snapshot.schema import Action, HeldSegment, Trace

MOST_RANGES = 1 << 17
_ACQUIRING = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)


@dataclass(frozen=True, slots=True)
class StartBlock(LiveBlock):
    """A block that was already in use, with the number of its stack."""

    stack: int = 0


@dataclass(slots=True)
class Start:
    """The state before the first event; `strays` are addresses of allocations outside all segments in the file."""

    segments: list[Segment] = field(default_factory=list)
    blocks: list[StartBlock] = field(default_factory=list)
    strays: frozenset[int] = frozenset()

    @property
    def state(self) -> State:
        """The initial state for the allocator's model."""
        return State(self.segments, self.blocks)


class Ground:
    """The segments of one device and the large blocks in them, from which each block's size follows.

    The allocator gives a request the whole free block at its address, or splits it; which of the two follows from the
    distance to the next block in use. This also works for a trace that begins mid-run, if the blocks in use before are
    added first. Small and expandable blocks have their rounded size.
    """

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


def start_of(trace: Trace, held: list[HeldSegment], settings: AllocatorSettings) -> Start:
    """Return the state from which a device's events lead to what it holds at the end."""
    # Memory is in one segment at a time: overlapping ones are dropped.
    segments: list[Segment] = []
    found = [*_fixed_segments(trace, held), *_mapped_ranges(trace, held)]
    for segment in sorted(found, key=lambda segment: segment.address):
        if not segments or segment.address >= segments[-1].end:
            segments.append(segment)
    freed, ends = _freed_only(trace)
    blocks = sorted([*freed, *_held_only(trace, held)], key=lambda block: block.address)
    ground = Ground(settings)
    for segment in segments:
        if not segment.is_expandable:
            ground.add_segment(segment.address, segment.size_bytes)
    # From the highest address down: a block's size depends on the next one.
    sizes = {b.address: ground.lay(b.address, b.requested_bytes, ends.get(b.address)) for b in reversed(blocks)}
    sized = [block if block.size_bytes else replace(block, size_bytes=sizes[block.address]) for block in blocks]
    return Start(segments, sized, _strays(trace, segments, blocks))


def _freed_only(trace: Trace) -> tuple[list[StartBlock], dict[int, int]]:
    """Return blocks that are freed but never allocated, and the start of the next block seen before that."""
    found: dict[int, StartBlock] = {}
    ends: dict[int, int] = {}
    starts: list[int] = []
    seen: set[int] = set()
    live: set[int] = set()
    waiting: set[int] = set()
    requests = Action.FREE_REQUESTED in trace.actions
    for action, address, size, stream, _, _ in trace.rows():
        if action == Action.ALLOC:
            live.add(address)
            if address not in seen:
                seen.add(address)
                insort(starts, address)
        elif action == Action.FREE_REQUESTED or (action == Action.FREE_COMPLETED and address not in waiting):
            # A free that is only completed was requested before the trace began.
            if address not in live and address not in seen and address not in found:
                found[address] = StartBlock(address, 0, size, stream, action == Action.FREE_COMPLETED and requests)
                place = bisect_right(starts, address)
                ends |= {address: starts[place]} if place < len(starts) else {}
            live.discard(address)
            if action == Action.FREE_REQUESTED:
                waiting.add(address)
        elif action == Action.FREE_COMPLETED:
            waiting.discard(address)
    return list(found.values()), ends


def _held_only(trace: Trace, held: list[HeldSegment]) -> list[StartBlock]:
    """Return blocks in use at the end that no event allocates or frees, or allocates within."""
    touched = {
        address
        for action, address in zip(trace.actions, trace.addresses, strict=True)
        if action in (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
    }
    starts = sorted(touched)
    return [
        StartBlock(b.address, b.size_bytes, b.requested_bytes, segment.stream, not b.is_allocated, b.stack)
        for segment in held
        for b in segment.blocks
        if bisect_left(starts, b.address) == bisect_left(starts, b.address + b.size_bytes)
    ]


def _strays(trace: Trace, segments: list[Segment], blocks: list[StartBlock]) -> frozenset[int]:
    given = {(low, low + size) for action, low, size, *_ in trace.rows() if action in _ACQUIRING}
    pairs = sorted(given | {(segment.address, segment.end) for segment in segments})
    starts = [low for low, _ in pairs]
    reach = list(accumulate((high for _, high in pairs), max))

    def is_stray(address: int) -> bool:
        place = bisect_right(starts, address) - 1
        return place < 0 or address >= reach[place]

    made = {address for action, address in zip(trace.actions, trace.addresses, strict=True) if action == Action.ALLOC}
    return frozenset(filter(is_stray, made | {block.address for block in blocks}))


def _fixed_segments(trace: Trace, held: list[HeldSegment]) -> list[Segment]:
    """Return segments whose first event frees them, and those at the end that have none."""
    first: dict[int, tuple[int, Segment]] = {}
    for action, address, size, stream, _, _ in trace.rows():
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE):
            first.setdefault(address, (action, Segment(address, size, stream, False)))
    freed = [segment for action, segment in first.values() if action == Action.SEGMENT_FREE]
    fixed = [Segment(s.address, s.size_bytes, s.stream, False) for s in held if not s.is_expandable]
    return freed + [segment for segment in fixed if segment.address not in first]


def _mapped_ranges(trace: Trace, held: list[HeldSegment]) -> list[Segment]:
    """Return pages mapped at the start: those at the end, with the events undone in reverse order."""
    ranges = Ranges()
    streams: dict[int, int] = {}
    for segment in held:
        if segment.is_expandable:
            ranges.add(segment.address, segment.address + segment.size_bytes)
            streams[segment.address] = segment.stream
    for place in range(len(trace) - 1, -1, -1):
        action = trace.actions[place]
        if action in (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP):
            low = trace.addresses[place]
            change = ranges.remove if action == Action.SEGMENT_MAP else ranges.add
            change(low, low + trace.sizes[place])
            if len(ranges) > MOST_RANGES:
                raise BadSnapshot(f"Its memory lies in more than {MOST_RANGES:,} ranges.")
    return [Segment(low, high - low, streams.get(low, 0), True) for low, high in ranges.pairs()]
