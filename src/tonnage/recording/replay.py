"""Replays a recording's events through the allocator, on another card or with other settings.

The requests stay the same, so the result does not hold for a script that adapts to its card or halves its batch.
Workspaces that kernels would choose differently are unchanged; memory outside the allocator counts from the start.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

from tonnage.allocator import AllocatorSettings, CachingAllocator, OutOfMemory, Shortage
from tonnage.allocator.blocks import Block
from tonnage.allocator.replay import BOUNDLESS_BYTES
from tonnage.allocator.segments import DRIVER_RESERVE_BYTES
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.recording.beyond import TO_ITS_END, demand_of, live_until, parted
from tonnage.recording.recording import Recording
from tonnage.recording.records import BY_PHASE, Allocation, FailedRequest, Header, Mark, SegmentEvent


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The result of a replay: the reserved peak, and the request that failed, if any."""

    peak_reserved_bytes: int
    failed: Allocation | None = None
    shortage: Shortage | None = None


def demand(recording: Recording) -> Recording:
    """Return all known requests of the run; if it died and did not continue, the failed request is the last."""
    return until_refused(recording) if recording.whole is None else demand_of(recording)


def until_refused(recording: Recording) -> Recording:
    """Return the run up to its failure, with the failed request as the last."""
    oom = recording.oom
    if oom is None:
        return recording
    # The last event before the failed request. After it are frees, as the script unwinds.
    levels = recording.timeline.allocated_bytes
    moment = next((i for i in range(len(levels) - 1, -1, -1) if levels[i] == oom.allocated_bytes), len(levels) - 1)
    # What an optimizer step is refused is most likely a state; its temporaries are freed within it.
    category = Category.OPTIMIZER_STATES if oom.phase == "optimizer" else BY_PHASE.get(oom.phase, Category.OTHER)
    index = 1 + max((a.index for a in recording.allocations), default=-1)
    size = oom.requested_bytes
    request = Allocation(index, 0, size, size, 0, moment, category=category, **_context(oom))
    kept = live_until(recording.allocations, moment)
    return replace(recording, allocations=[*kept, request], oom=None, whole=None)


def _context(request: Allocation | FailedRequest) -> dict[str, Any]:
    """Return what a block and a failed request have in common: what asked for memory, and where."""
    names = ("operator", "module", "phase", "step", "line", "stack", "shape", "dtype")
    return {name: getattr(request, name) for name in names}


def outcome_on(recording: Recording, gpu: Gpu | None = None, *, settings: str | None = None) -> Outcomes:
    """Replay all known requests on a card."""
    asked = demand(recording)
    return _play(asked, _header_on(asked.header, gpu, settings))


def least_bytes(recording: Recording) -> int:
    """Return the memory of the smallest card that holds the run, within 0.5 %, by bisection over replays."""
    asked = demand(recording)
    header = asked.header

    def holds(capacity_bytes: int) -> bool:
        return _play(asked, replace(header, capacity_bytes=capacity_bytes)).failed is None

    unlimited = _play(asked, replace(header, capacity_bytes=BOUNDLESS_BYTES)).peak_reserved_bytes
    outside = header.overhead_bytes + DRIVER_RESERVE_BYTES
    low, high = asked.peak_allocated_bytes + outside, unlimited + outside
    if low < high and holds(low):
        return low
    while high - low > high // 200:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def outside_on(recording: Recording, gpu: Gpu) -> int:
    """Return the bytes that the process holds outside the allocator on a card."""
    return _header_on(demand(recording).header, gpu).overhead_bytes


def as_its_card_saw_it(recording: Recording) -> Recording:
    """Split a run recorded without a limit at the request that its card refuses; its `whole` is the complete run."""
    outcomes = outcome_on(recording)
    oom = refused(outcomes)
    if oom is None or outcomes.failed is None:
        return recording
    acquired = {event.sequence for event in recording.segments if event.action in ("segment_alloc", "segment_map")}
    since = outcomes.failed.born - 1
    while since in acquired:  # segments taken for that request
        since -= 1
    return parted(recording, oom, since, recording.header.error or TO_ITS_END)


def replay_on(recording: Recording, gpu: Gpu | None = None) -> Recording:
    """Return the recording as it would be on a card (None: its own), up to the request that fails there."""
    asked = demand(recording)
    header, tape = _header_on(asked.header, gpu), _Tape(asked)
    outcomes = _play(asked, header, tape)
    whole = recording.whole or (recording if recording.oom is None else None)
    ended = (whole or recording).header.outcome
    header.outcome = "ok" if ended == "oom" else ended
    if outcomes.failed is not None:
        header.outcome = "oom"
    else:
        tape.reach(sys.maxsize)  # marks after the last event
    return replace(
        recording,
        header=header,
        allocations=tape.allocations,
        segments=tape.segments,
        marks=tape.marks,
        oom=refused(outcomes),
        whole=whole if outcomes.failed else None,
        captured=recording.captured or (whole.captured if whole else None),
    )


def _header_on(header: Header, gpu: Gpu | None, settings: str | None = None) -> Header:
    changed = replace(header, settings=header.settings if settings is None else settings)
    if gpu is None:
        return changed
    parts = {
        part: gpu.overheads[part.split()[0]].size_bytes if part.split()[0] in gpu.overheads else size_bytes
        for part, size_bytes in header.overhead_parts.items()
    }
    overhead_bytes = sum(parts.values()) if parts else header.overhead_bytes
    return replace(
        changed, gpu=gpu.key, gpu_name=gpu.name, capacity_bytes=gpu.memory_bytes, overhead_bytes=overhead_bytes,
        overhead_parts=parts,
    )  # fmt: skip


def _play(recording: Recording, header: Header, tape: "_Tape | None" = None) -> Outcomes:
    # A snapshot does not include the size of its card.
    capacity_bytes, settings = header.capacity_bytes or BOUNDLESS_BYTES, AllocatorSettings.parse(header.settings)
    allocator = CachingAllocator(capacity_bytes, settings, header.overhead_bytes, tape.on_segment if tape else None)
    blocks: dict[tuple[int, int], Block] = {}
    failed = shortage = None
    for sequence, action, allocation in recording.events():
        if tape:
            tape.reach(sequence)
        if allocation is None:
            allocator.empty_cache()
            continue
        if action == "free":
            allocator.free(blocks.pop((allocation.index, allocation.born)))
            if tape:
                tape.on_free(allocation)
            continue
        try:
            block = allocator.malloc(allocation.requested_bytes, allocation.stream)
        except OutOfMemory as error:
            failed, shortage = allocation, error.shortage
            break
        blocks[allocation.index, allocation.born] = block
        if tape:
            tape.on_alloc(allocation, block.address, block.size)
    return Outcomes(allocator.memory_stats()["reserved_bytes.all.peak"], failed, shortage)


class _Tape:
    """A recording of a replay, with its own sequence numbers."""

    def __init__(self, recording: Recording) -> None:
        self.allocations: list[Allocation] = []
        self.segments: list[SegmentEvent] = []
        self.marks: list[Mark] = []
        self._waiting = sorted(recording.marks, key=lambda mark: mark.sequence)[::-1]
        self._by_origin: dict[tuple[int, int], Allocation] = {}
        self._next = 0

    def _take(self) -> int:
        self._next += 1
        return self._next - 1

    def reach(self, sequence: int) -> None:
        """Add marks from before this event, with the number of the next one."""
        while self._waiting and self._waiting[-1].sequence <= sequence:
            self.marks.append(replace(self._waiting.pop(), sequence=self._next))

    def on_segment(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        if action != "oom":
            self.segments.append(SegmentEvent(self._take(), action, address, size_bytes, stream))  # type: ignore[arg-type]

    def on_alloc(self, origin: Allocation, address: int, block_bytes: int) -> None:
        again = replace(origin, address=address, block_bytes=block_bytes, born=self._take(), died=None)
        self._by_origin[origin.index, origin.born] = again
        self.allocations.append(again)

    def on_free(self, origin: Allocation) -> None:
        self._by_origin.pop((origin.index, origin.born)).died = self._take()


def refused(outcomes: Outcomes) -> FailedRequest | None:
    """Convert the failed request of a replay to a run's record."""
    failed, shortage = outcomes.failed, outcomes.shortage
    if failed is None or shortage is None:
        return None
    names = ("requested_bytes", "free_bytes", "allocated_bytes", "reserved_bytes")
    sizes = {name: getattr(shortage, name) for name in names}
    return FailedRequest(**sizes, message=shortage.message, **_context(failed))
