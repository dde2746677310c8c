"""Reads PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot(FILE)`) without executing the pickle."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tonnage.allocator import AllocatorSettings, State, read_trace
from tonnage.allocator.replay import Event
from tonnage.errors import BadSnapshot, BadTrace
from tonnage.garbage import no_collection
from tonnage.recording.recording import Recording
from tonnage.recording.snapshot.convert import busiest_device, recording_of, settings_of
from tonnage.recording.snapshot.schema import ACTIONS, OOM, SEGMENT_MAP, Snapshot, Trace, snapshot_of
from tonnage.recording.snapshot.start import start_of
from tonnage.recording.snapshot.stream import SnapshotLimits, Stream, opening
from tonnage.recording.snapshot.unpickle import load
from tonnage.untrusted import open_file

__all__ = ["Traced", "is_snapshot", "read_snapshot", "read_traced"]

_PICKLE_MAGIC = 0x80


@dataclass(frozen=True, slots=True)
class Traced:
    """Events, their allocator settings, the state before the first, and the recording of all that."""

    events: list[Event]
    settings: AllocatorSettings
    start: State
    recording: Recording


def is_snapshot(path: Path) -> bool:
    """Whether a file starts like a pickle, gzipped or not, whatever its name."""
    return opening(path, 1)[:1] == bytes([_PICKLE_MAGIC])


def read_snapshot(path: Path, *, device: int | None = None, limits: SnapshotLimits | None = None) -> Recording:
    """Read one device's events as a recording (None: the busiest device's); raise BadSnapshot with the reason."""
    with _named(path), no_collection():
        return recording_of(_read(path, limits or SnapshotLimits()), device)


def read_traced(path: Path) -> Traced:
    """Read the busiest device's events for `tonnage.allocator.replay`, from a snapshot or a JSON trace."""
    if not is_snapshot(path):
        return traced_of(snapshot_of_events(read_trace(path)))
    with _named(path), no_collection():
        return traced_of(_read(path, SnapshotLimits()))


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


def _read(path: Path, limits: SnapshotLimits) -> Snapshot:
    with open_file(path) as file:
        return snapshot_of(load(Stream(file, limits), limits), limits)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except BadSnapshot as error:
        raise BadSnapshot(f"{path} is not a snapshot that can be read: {error}") from None
    except MemoryError:
        raise BadSnapshot(f"{path} cannot be read: it takes more memory than there is.") from None
    except OSError as error:
        raise BadSnapshot(f"{path} cannot be read: {error.strerror}.") from None
