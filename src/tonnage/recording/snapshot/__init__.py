"""Reads PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot(FILE)`) without executing the pickle.

A snapshot does not include the card, its size, or what the process held outside PyTorch; if a request failed, the
free bytes at that moment show the size.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tonnage.allocator import AllocatorSettings, BadAllocatorSettings
from tonnage.allocator.adopt import State
from tonnage.allocator.replay import Event, read_trace
from tonnage.errors import BadSnapshot, BadTrace
from tonnage.garbage import no_collection
from tonnage.recording.recording import Recording
from tonnage.recording.records import FailedRequest, Header, Note
from tonnage.recording.snapshot.history import Refusal, SnapshotHistory, Walk
from tonnage.recording.snapshot.phases import Guide, Origin, Phases, categorise, mark_turns, origin_of
from tonnage.recording.snapshot.schema import ACTIONS, Action, HeldSegment, Snapshot, Trace, flag, snapshot_of
from tonnage.recording.snapshot.start import start_of
from tonnage.recording.snapshot.stream import SnapshotLimits, Stream, opening
from tonnage.recording.snapshot.unpickle import kind, load
from tonnage.units import format_bytes
from tonnage.untrusted import open_file, printable

UNKNOWN_GPU = "GPU unknown"


def busiest_device(snapshot: Snapshot) -> int:
    """Return the device with the most events or, without any, the one that holds most."""
    held: Counter[int] = Counter()
    for segment in snapshot.segments:
        held[segment.device] += segment.size_bytes
    events = {device: len(trace) for device, trace in enumerate(snapshot.traces)}
    return max({*held, *events, 0}, key=lambda device: (events.get(device, 0), held[device], -device))


def recording_of(snapshot: Snapshot, device: int | None = None, guide: Guide | None = None) -> Recording:
    """Convert one device (None: the busiest); a `guide` supplies phases that must otherwise be inferred."""
    chosen = busiest_device(snapshot) if device is None else device
    trace, held = _device(snapshot, chosen)
    if device is not None and not len(trace) and not held:
        raise BadSnapshot(f"It has nothing of device {device}.")
    settings = settings_of(snapshot)
    origins = [origin_of(frames) for frames in snapshot.stacks]
    phases = guide or Phases([origins[number] for number in sorted(set(trace.stacks))], snapshot.annotations)
    walk = Walk(origins, phases, settings)
    walk.begin(start_of(trace, held, settings))
    walk.follow(trace)
    walk.end(held)
    history = walk.history
    if guide is None:
        found = [origins[number] for number in history.stacks]
        mark_turns(history.allocations[history.started :], found[history.started :], phases.marks)
        categorise(history.allocations, found, phases.marks, history.started)
    return Recording(
        header=_header(history, origins, settings),
        allocations=history.allocations,
        segments=history.segments,
        marks=phases.marks,
        notes=_notes(snapshot, chosen, trace, history),
        oom=_fatal(history),
    )


def _device(snapshot: Snapshot, device: int) -> tuple[Trace, list[HeldSegment]]:
    trace = snapshot.traces[device] if 0 <= device < len(snapshot.traces) else Trace()
    return trace, [segment for segment in snapshot.segments if segment.device == device]


def settings_of(snapshot: Snapshot) -> AllocatorSettings:
    """Return the allocator's settings, from the variable's text and the fields beside it."""
    fields = snapshot.settings
    text = next((fields[key] for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if fields.get(key)), "")
    if type(text) is not str:
        raise BadSnapshot(f"allocator_settings.PYTORCH_CUDA_ALLOC_CONF is {kind(text)}.")
    is_expandable = flag(fields, "expandable_segments", "allocator_settings")
    if not fields:  # as old versions write it
        is_expandable = any(segment.is_expandable for segment in snapshot.segments)
    try:
        settings = AllocatorSettings.parse(text)
        if is_expandable and not settings.expandable_segments:
            settings = settings.changed_by(",".join(filter(None, [text, "expandable_segments:True"])))
    except BadAllocatorSettings as error:
        raise BadSnapshot(f"Its allocator_settings make no sense: {printable(str(error)).rstrip('.')}.") from None
    return settings


def _header(history: SnapshotHistory, origins: Sequence[Origin], settings: AllocatorSettings) -> Header:
    fatal = _fatal(history)
    names = Counter(filter(None, (origins[number].script for number in history.stacks)))
    names = names or Counter(a.line.rpartition(":")[0] for a in history.allocations if a.line)
    return Header(
        gpu="",
        gpu_name=UNKNOWN_GPU,
        capacity_bytes=_capacity_bytes(history.refusals[-1]) if history.refusals else 0,
        torch_modelled="",
        torch_installed="",
        outcome="oom" if fatal else "ok",
        source="snapshot",
        settings=settings.text,
        script=names.most_common(1)[0][0] if names else "",
        exit_status=1 if fatal else 0,
        ooms_caught=len(history.refusals) - bool(fatal),
    )


def _fatal(history: SnapshotHistory) -> FailedRequest | None:
    """Return the last failed request, if nothing was allocated after it; otherwise the script caught the error."""
    born = history.allocations[-1].born if history.allocations else -1
    if not history.refusals or born >= history.refusals[-1].sequence:
        return None
    request = history.refusals[-1].request
    return replace(request, free_bytes=_capacity_bytes(history.refusals[-1]) - request.reserved_bytes)


def _is_limited(request: FailedRequest) -> bool:
    """Whether the device had room for the request, so that a limit of the process refused it."""
    return request.free_bytes >= AllocatorSettings().segment_bytes(request.requested_bytes)


def _capacity_bytes(refusal: Refusal) -> int:
    """Return the memory available to this process: by the device's figures, or at least its peak if it had a limit."""
    request = refusal.request
    return refusal.peak_reserved_bytes if _is_limited(request) else request.reserved_bytes + request.free_bytes


def _notes(snapshot: Snapshot, device: int, trace: Trace, history: SnapshotHistory) -> list[Note]:
    notes = []
    others = {number for number, other in enumerate(snapshot.traces) if len(other)} | {
        segment.device for segment in snapshot.segments
    }
    if len(others - {device}):
        notes.append(Note("assumption", f"device {device}", 1, f"the busiest of {len(others | {device})} in the file"))
    if history.started:
        held = sum(a.block_bytes for a in history.allocations[: history.started])
        words = f"{history.started:,} blocks ({format_bytes(held)}) are older than the first event"
        notes.append(Note("assumption", "live at the start", 1, words))
    if history.refusals and _is_limited(history.refusals[-1].request):
        free = format_bytes(history.refusals[-1].request.free_bytes)
        notes.append(Note("assumption", "its own limit", 1, f"refused it; the device had {free} free"))
    if history.strays:
        words = "lie in no segment that the file tells of; reserved memory counts them as they are"
        notes.append(Note("assumption", "blocks without a segment", history.strays, words))
    if history.overwritten:
        notes.append(Note("assumption", "blocks without an end", history.overwritten, "the address came again"))
    for name, count in trace.unknown_actions.items():
        if name != "snapshot":
            notes.append(Note("not_modelled", name, count, "an action that this version does not know"))
    return notes


@dataclass(frozen=True, slots=True)
class Traced:
    """Events, their allocator settings, the state before the first, and the recording of all that."""

    events: list[Event]
    settings: AllocatorSettings
    start: State
    recording: Recording


def is_snapshot(path: Path) -> bool:
    """Whether a file starts like a pickle, gzipped or not, whatever its name."""
    return opening(path, 1) == b"\x80"


def read_snapshot(path: Path, *, device: int | None = None, limits: SnapshotLimits | None = None) -> Recording:
    """Read one device's events as a recording (None: the busiest device's); raise BadSnapshot with the reason."""
    with _named(path):
        return recording_of(_read(path, limits or SnapshotLimits()), device)


def read_traced(path: Path) -> Traced:
    """Read the busiest device's events for `tonnage.allocator.replay`, from a snapshot or a JSON trace."""
    if not is_snapshot(path):
        return traced_of(snapshot_of_events(read_trace(path)))
    with _named(path):
        return traced_of(_read(path, SnapshotLimits()))


def traced_of(snapshot: Snapshot) -> Traced:
    """Convert the busiest device."""
    settings = settings_of(snapshot)
    trace, held = _device(snapshot, busiest_device(snapshot))
    events = [(ACTIONS[row[0]], 0 if row[0] == Action.OOM else row[1], row[2], row[3]) for row in trace.rows()]
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
    return Snapshot([trace], [], [], {"expandable_segments": Action.SEGMENT_MAP in trace.actions}, [()])


def _read(path: Path, limits: SnapshotLimits) -> Snapshot:
    with open_file(path) as file:
        return snapshot_of(load(Stream(file, limits), limits), limits)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        with no_collection():
            yield
    except BadSnapshot as error:
        raise BadSnapshot(f"{path} is not a snapshot that can be read: {error}") from None
    except MemoryError:
        raise BadSnapshot(f"{path} cannot be read: it takes more memory than there is.") from None
    except OSError as error:
        raise BadSnapshot(f"{path} cannot be read: {error.strerror}.") from None
