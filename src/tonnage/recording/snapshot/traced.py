"""A device's events for the allocator's model, with their initial state, and as a recording."""

from dataclasses import dataclass

from tonnage.allocator import AllocatorSettings, State
from tonnage.allocator.replay import Event
from tonnage.errors import BadTrace
from tonnage.recording.recording import Recording
from tonnage.recording.snapshot.convert import busiest_device, recording_of, settings_of
from tonnage.recording.snapshot.limits import SnapshotLimits
from tonnage.recording.snapshot.schema import ACTIONS, OOM, SEGMENT_MAP, Snapshot, Trace
from tonnage.recording.snapshot.start import start_of


@dataclass(frozen=True, slots=True)
class Traced:
    """Events, their allocator settings, the state before the first, and the recording of all that."""

    events: list[Event]
    settings: AllocatorSettings
    start: State
    recording: Recording


def traced_of(snapshot: Snapshot) -> Traced:
    """Convert the busiest device."""
    device, settings = busiest_device(snapshot), settings_of(snapshot)
    trace = snapshot.traces[device] if device < len(snapshot.traces) else Trace()
    held = [segment for segment in snapshot.segments if segment.device == device]
    rows = trace.rows()
    events = [(ACTIONS[row[0]], 0 if row[0] == OOM else row[1], row[2], row[3]) for row in rows]
    return Traced(events, settings, start_of(trace, held, settings).state, recording_of(snapshot))


def snapshot_of_events(events: list[Event]) -> Snapshot:
    """Convert a bare trace to a snapshot without other data."""
    trace, codes = Trace(), {action: code for code, action in enumerate(ACTIONS)}
    most_bytes = SnapshotLimits().size_bytes
    for number, (action, address, size, stream) in enumerate(events):
        if not (0 <= address < 1 << 63 and 0 <= size < most_bytes and -(1 << 63) <= stream < 1 << 63):
            raise BadTrace(
                f"Event {number} of the trace makes no sense: {size:,} bytes at {address:#x}, stream {stream}."
            )
        if action in codes:
            trace.actions.append(codes[action])
            trace.addresses.append(address)
            trace.sizes.append(size)
            trace.streams.append(stream)
            trace.times_us.append(0)
            trace.stacks.append(0)
    return Snapshot([trace], [], [], {"expandable_segments": SEGMENT_MAP in trace.actions}, [()])
