"""The segments at the moment worth looking at, each with its blocks and holes. It does not know how they are drawn."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from tonnage.recording import Allocation, Recording
from tonnage.recording.failure import moment_of_failure
from tonnage.recording.holes import SegmentState, segments_at


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the device's memory that PyTorch held; blocks are by address."""

    state: SegmentState
    stream: int
    blocks: list[Allocation]

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.state.size_bytes

    @property
    def unused_bytes(self) -> int:
        """Bytes in holes."""
        return self.state.unused_bytes


def moment_of(recording: Recording) -> int:
    """The request that failed, else the fullest moment while most was reserved."""
    died = moment_of_failure(recording)
    if died is not None:
        return died
    timeline = recording.timeline
    peak = timeline.peak_reserved_bytes
    fullest = (at for at, reserved in enumerate(timeline.reserved_bytes) if reserved == peak)
    return max(fullest, key=lambda at: timeline.allocated_bytes[at])


def memory_map(recording: Recording, moment: int) -> list[Segment]:
    """What was reserved after an event, largest first."""
    live = [a for a in recording.allocations if a.born <= moment and (a.died is None or a.died > moment)]
    live.sort(key=lambda a: a.address)
    starts = [a.address for a in live]
    # A stretch of pages may begin within what was mapped at once: its stream is that of the mapping before.
    streams = {event.address: event.stream for event in recording.segments if event.sequence <= moment}
    known = sorted(streams)
    segments = [
        Segment(
            state,
            streams[known[bisect_right(known, state.address) - 1]],
            live[bisect_left(starts, state.address) : bisect_left(starts, state.address + state.size_bytes)],
        )
        for state in segments_at(recording, moment)
    ]
    return sorted(segments, key=lambda segment: -segment.size_bytes)
