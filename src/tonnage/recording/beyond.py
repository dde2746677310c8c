"""A run that ran out of memory and continued without a limit: the part up to the failure, and the whole.

`Recording.whole` has all events; the recording itself ends with the last one before the failed request. A file stores
them once, with a mark "beyond" between the two parts.
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any

from tonnage.recording.recording import Recording
from tonnage.recording.records import Allocation, FailedRequest, Mark

# How a continued run ended; any other value is the error that ended it.
TO_ITS_END, REPEATS, PATIENCE = "ended", "repeats", "patience"


def parted(whole: Recording, oom: FailedRequest, since: int, ending: str) -> Recording:
    """Split a run at the event `since`: returns the part up to it, whose `whole` is the complete run."""
    # Libraries first used later held nothing yet.
    outside_bytes = max(0, whole.header.capacity_bytes - oom.free_bytes - oom.reserved_bytes)
    sums = accumulate(whole.header.overhead_parts.values())
    parts = dict(
        item for item, held in zip(whole.header.overhead_parts.items(), sums, strict=True) if held <= outside_bytes
    )
    outside: dict[str, Any] = {"overhead_bytes": outside_bytes, "overhead_parts": parts}
    died = replace(whole.header, outcome="oom", exit_status=1, error=oom.message, **outside)
    kept = [mark for mark in whole.marks if mark.kind != "beyond"]
    beyond = Mark(since + 1, "beyond", ending)
    position = next((i for i, mark in enumerate(kept) if mark.sequence > since), len(kept))
    whole = replace(whole, marks=[*kept[:position], beyond, *kept[position:]], oom=None)
    marks = [mark for mark in kept if mark.sequence <= since]
    return replace(up_to(whole, since), header=died, marks=marks, oom=oom, captured=None, whole=whole)


def as_kept(recording: Recording) -> Recording:
    """Return the single sequence of events that a file stores."""
    whole = recording.whole
    if whole is None:
        return recording
    return replace(demand_of(recording), marks=whole.marks, oom=recording.oom)


def demand_of(recording: Recording) -> Recording:
    """Return all requests of a continued run, with its memory outside the allocator, as a run on its own card."""
    whole = recording.whole
    assert whole is not None
    outside = {key: getattr(whole.header, key) for key in ("overhead_bytes", "overhead_parts")}
    marks = [mark for mark in whole.marks if mark.kind != "beyond"]
    return replace(whole, header=replace(recording.header, **outside), marks=marks)


def as_read(kept: Recording) -> Recording:
    """Split the recording of a file where its run continued past the failure."""
    beyond = next((mark for mark in kept.marks if mark.kind == "beyond"), None)
    if beyond is None or kept.oom is None:
        return kept
    ended = beyond.name in (TO_ITS_END, REPEATS, PATIENCE)
    header = replace(kept.header, outcome="ok" if ended else "error", error="" if ended else beyond.name)
    return parted(replace(kept, header=header), kept.oom, beyond.sequence - 1, beyond.name)


def ending_of(recording: Recording) -> str:
    """Return how the whole run ended."""
    marks = recording.whole.marks if recording.whole else ()
    return next((mark.name for mark in marks if mark.kind == "beyond"), TO_ITS_END)


# Where a run died


def live_until(allocations: list[Allocation], moment: int) -> list[Allocation]:
    """Return the blocks made up to an event; what was live then stays live."""
    return [a if a.died is None or a.died <= moment else replace(a, died=None) for a in allocations if a.born <= moment]


def up_to(recording: Recording, moment: int) -> Recording:
    """Return the run up to an event."""
    return replace(
        recording,
        allocations=live_until(recording.allocations, moment),
        segments=[event for event in recording.segments if event.sequence <= moment],
        marks=[mark for mark in recording.marks if mark.sequence <= moment],
    )


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
    """Return the run without the frees as the script unwinds: what was live when it died stays live."""
    moment = moment_of_failure(recording)
    return recording if moment is None else up_to(recording, moment)
