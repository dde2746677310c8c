"""Converts a snapshot to a recording of one device, with inferred phases and categories.

A snapshot does not include the card, its size, or what the process held outside PyTorch; if a request failed, the
free bytes at that moment show the size.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tonnage.allocator import AllocatorSettings, BadAllocatorSettings
from tonnage.errors import BadSnapshot
from tonnage.recording.recording import Recording
from tonnage.recording.records import FailedRequest, Header, Note
from tonnage.recording.snapshot.categories import categorise
from tonnage.recording.snapshot.history import Refusal, SnapshotHistory, Walk
from tonnage.recording.snapshot.origins import Origin, origin_of
from tonnage.recording.snapshot.phases import Guide, Phases, mark_turns
from tonnage.recording.snapshot.schema import Snapshot, Trace, flag
from tonnage.recording.snapshot.start import start_of
from tonnage.recording.snapshot.unpickle import kind
from tonnage.units import format_bytes
from tonnage.untrusted import printable

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
    trace = snapshot.traces[chosen] if 0 <= chosen < len(snapshot.traces) else Trace()
    held = [segment for segment in snapshot.segments if segment.device == chosen]
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
