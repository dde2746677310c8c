"""A run that ran out of memory and went on without a limit: what the card saw of it, and the whole.

`Recording.whole` is the run with all its events. The recording itself ends with the last event before the request that failed,
as that of a run which died there. In a file the events are kept once, with a mark "beyond" where the two part.
"""

from dataclasses import replace
from itertools import accumulate

from tonnage.recording.recording import Recording
from tonnage.recording.records import Mark, OutOfMemory

# How a run ended that went on; anything else is the error that ended it.
TO_ITS_END, REPEATS, PATIENCE = "ended", "repeats", "patience"


def parted(whole: Recording, oom: OutOfMemory, since: int, ending: str) -> Recording:
    """What the card saw of a run, up to the event `since`; its `whole` is all of it."""
    # Libraries that were first used later held nothing yet.
    outside_bytes = max(0, whole.header.capacity_bytes - oom.free_bytes - oom.reserved_bytes)
    sums = accumulate(whole.header.overhead_parts.values())
    parts = dict(
        item for item, held in zip(whole.header.overhead_parts.items(), sums, strict=True) if held <= outside_bytes
    )
    died = replace(
        whole.header,
        outcome="oom",
        exit_status=1,
        error=oom.message,
        overhead_bytes=outside_bytes,
        overhead_parts=parts,
    )
    kept = [mark for mark in whole.marks if mark.kind != "beyond"]
    beyond = Mark(since + 1, "beyond", ending)
    position = next((i for i, mark in enumerate(kept) if mark.sequence > since), len(kept))
    whole = replace(whole, marks=[*kept[:position], beyond, *kept[position:]], oom=None)
    return replace(
        whole,
        header=died,
        allocations=[
            a if a.died is None or a.died <= since else replace(a, died=None)
            for a in whole.allocations
            if a.born <= since
        ],
        segments=[event for event in whole.segments if event.sequence <= since],
        marks=[mark for mark in kept if mark.sequence <= since],
        oom=oom,
        captured=None,
        whole=whole,
    )


def as_kept(recording: Recording) -> Recording:
    """The one sequence of events that a file holds."""
    whole = recording.whole
    if whole is None:
        return recording
    return replace(demand_of(recording), marks=whole.marks, oom=recording.oom)


def demand_of(recording: Recording) -> Recording:
    """All requests of a run that went on, and what it held outside the allocator, as a run of the card that it died on."""
    whole = recording.whole
    assert whole is not None
    outside = {key: getattr(whole.header, key) for key in ("overhead_bytes", "overhead_parts")}
    marks = [mark for mark in whole.marks if mark.kind != "beyond"]
    return replace(whole, header=replace(recording.header, **outside), marks=marks)


def as_read(kept: Recording) -> Recording:
    """The recording of a file, parted where its run went on."""
    beyond = next((mark for mark in kept.marks if mark.kind == "beyond"), None)
    if beyond is None or kept.oom is None:
        return kept
    ended = beyond.name in (TO_ITS_END, REPEATS, PATIENCE)
    header = replace(kept.header, outcome="ok" if ended else "error", error="" if ended else beyond.name)
    return parted(replace(kept, header=header), kept.oom, beyond.sequence - 1, beyond.name)


def ending_of(recording: Recording) -> str:
    """How the whole of it ended."""
    marks = recording.whole.marks if recording.whole else ()
    return next((mark.name for mark in marks if mark.kind == "beyond"), TO_ITS_END)
