"""The moment at which a run died, and the run up to it, without the frees as the script unwinds."""

from dataclasses import replace

from tonnage.recording.recording import Recording


def moment_of_failure(recording: Recording) -> int | None:
    """Return the last event before the failed request; None if none failed, or if the event cannot be found."""
    oom = recording.oom
    if oom is None:
        return None
    levels = recording.timeline
    wanted = (oom.allocated_bytes, oom.reserved_bytes)
    both = enumerate(zip(levels.allocated_bytes, levels.reserved_bytes, strict=True))
    return max((event for event, found in both if found == wanted), default=None)


def until_failure(recording: Recording) -> Recording:
    """Return the run without its unwinding: what was live when it died stays live."""
    moment = moment_of_failure(recording)
    if moment is None:
        return recording
    return replace(
        recording,
        allocations=[
            a if a.died is None or a.died <= moment else replace(a, died=None)
            for a in recording.allocations
            if a.born <= moment
        ],
        segments=[event for event in recording.segments if event.sequence <= moment],
        marks=[mark for mark in recording.marks if mark.sequence <= moment],
    )
