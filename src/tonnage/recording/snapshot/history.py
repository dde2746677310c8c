"""Converts events to allocations, in bytes of blocks (which die when their free is requested), and segments."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from tonnage.allocator import AllocatorSettings
from tonnage.errors import BadSnapshot
from tonnage.recording.records import Allocation, FailedRequest, Mark, SegmentAction, SegmentEvent
from tonnage.recording.snapshot.phases import Guide, Origin
from tonnage.recording.snapshot.schema import ACTIONS, Action, HeldSegment, Trace
from tonnage.recording.snapshot.start import MOST_RANGES, Ground, Start

_RELEASING = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that failed, and the memory figures at that moment."""

    sequence: int
    peak_reserved_bytes: int
    request: FailedRequest  # its `free_bytes` are the device's


@dataclass(slots=True)
class SnapshotHistory:
    """The result of the walk; `stacks` has the number of each allocation's stack."""

    allocations: list[Allocation] = field(default_factory=list)
    stacks: "array[int]" = field(default_factory=lambda: array("q"))
    segments: list[SegmentEvent] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    started: int = 0
    overwritten: int = 0
    strays: int = 0


class Walk:
    """Processes one device's events in order."""

    def __init__(self, origins: Sequence[Origin], phases: Guide, settings: AllocatorSettings) -> None:
        self.history = SnapshotHistory()
        self._origins, self._phases = origins, phases
        self._ground = Ground(settings)
        self._live: dict[int, Allocation] = {}
        self._strays: frozenset[int] = frozenset()
        self._segments: dict[int, int] = {}
        self._sequence = 0
        self._released_at: int | None = None
        self._is_asked = False
        self._allocated_bytes = 0
        self._reserved_bytes = 0
        self._peak_reserved_bytes = 0

    def begin(self, start: Start) -> None:
        """Add the state before the first event."""
        self._strays = start.strays
        for segment in start.segments:
            action = Action.SEGMENT_MAP if segment.is_expandable else Action.SEGMENT_ALLOC
            self._segment(action, segment.address, segment.size_bytes, segment.stream)
        for block in reversed(start.blocks):  # a block's size depends on the next one
            self._ground.lay(block.address, block.requested_bytes)
        blocks = [block for block in start.blocks if not block.is_pending]
        for block in blocks:
            self._allocate(block.address, block.requested_bytes, block.size_bytes, block.stream, block.stack)
        self.history.started = len(blocks)
        if self._sequence:
            self._phases.marks.append(Mark(self._sequence, "begin"))

    def follow(self, trace: Trace) -> None:
        """Process every event in order."""
        origins, phases = self._origins, self._phases
        for action, address, size, stream, time_us, stack in trace.rows():
            if self._released_at is not None and action not in _RELEASING:
                self._end_release(action)
            if action == Action.FREE_COMPLETED:
                self._ground.lift(address)
                if address not in self._live:
                    continue
            origin = origins[stack]
            # A history may have been recorded with stacks of allocations only.
            if origin.about != "engine" or action not in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
                phases.reach(origin, time_us, self._sequence)
            if action == Action.ALLOC:
                if address in self._live:
                    self.history.overwritten += 1
                    self._free(address)
                self._allocate(address, size, self._ground.lay(address, size), stream, stack)
            elif action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
                self._free(address)
            elif action == Action.OOM:
                request = FailedRequest(
                    origin.line or phases.line, size, address, self._allocated_bytes, self._reserved_bytes,
                    origin.operator, phase=phases.phase, step=phases.step, stack=origin.stack or phases.stack,
                )  # fmt: skip
                self.history.refusals.append(Refusal(self._sequence, self._peak_reserved_bytes, request))
            else:
                if action in _RELEASING and self._released_at is None:
                    self._released_at, self._is_asked = self._sequence, origin.operator == "empty_cache"
                self._segment(action, address, size, stream)
        if self._released_at is not None:
            self._end_release(None)

    def end(self, held: Sequence[HeldSegment]) -> None:
        """Take the sizes of blocks in use at the end from the snapshot itself."""
        for segment in held:
            for block in segment.blocks:
                a = self._live.get(block.address)
                if a is not None and a.requested_bytes == block.requested_bytes:
                    a.block_bytes = block.size_bytes

    def _end_release(self, action: int | None) -> None:
        """Mark that the cache was emptied, unless it was because the device was full, which the next event shows."""
        if self._is_asked or action not in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP, Action.OOM):
            assert self._released_at is not None
            self._phases.marks.append(Mark(self._released_at, "empty_cache"))
        self._released_at = None

    def _take(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _allocate(self, address: int, requested: int, size: int, stream: int, stack: int) -> None:
        origin, phases, history = self._origins[stack], self._phases, self.history
        if address in self._strays:
            self._segment(Action.SEGMENT_ALLOC, address, size, stream)
            history.strays += 1
        allocation = Allocation(
            len(history.allocations), address, requested, size, stream, self._take(), None,
            operator=origin.operator, phase=phases.phase, step=phases.step,
            line=origin.line or phases.line, stack=origin.stack or phases.stack,
        )  # fmt: skip
        self._live[address] = allocation
        history.allocations.append(allocation)
        history.stacks.append(stack)
        self._allocated_bytes += size

    def _free(self, address: int) -> None:
        allocation = self._live.pop(address, None)
        if allocation is not None:
            allocation.died = self._take()
            self._allocated_bytes -= allocation.block_bytes
            if address in self._strays:
                self._segment(Action.SEGMENT_FREE, address, allocation.block_bytes, allocation.stream)

    def _segment(self, action: int, address: int, size: int, stream: int) -> None:
        gives = action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
        if action == Action.SEGMENT_ALLOC:
            if address in self._segments:  # the event that freed it was lost
                self._segment(Action.SEGMENT_FREE, address, self._segments[address], stream)
            self._segments[address] = size
            self._ground.add_segment(address, size)
            if len(self._segments) > MOST_RANGES:
                raise BadSnapshot(f"It has more than {MOST_RANGES:,} segments at once.")
        elif action == Action.SEGMENT_FREE:
            if address not in self._segments:
                return
            size = self._segments.pop(address)
            self._ground.remove_segment(address)
        self._reserved_bytes += size if gives else -size
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self._reserved_bytes)
        name: SegmentAction = ACTIONS[action]  # type: ignore[assignment]
        self.history.segments.append(SegmentEvent(self._take(), name, address, size, stream))
