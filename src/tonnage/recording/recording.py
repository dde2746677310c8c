"""One run's memory events, and the questions that everything which shows or explains memory asks of them.

A recording is complete when it is asked its first question: answers are computed once and kept. It does not know the
allocator; `recording.replay` runs its events through one again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from math import isfinite
from typing import TYPE_CHECKING, Literal

from tonnage.clock.captured import CapturedStep
from tonnage.errors import UnknownGpu
from tonnage.garbage import no_collection
from tonnage.hardware import Gpu, find_gpu
from tonnage.hardware.cluster import Cluster
from tonnage.hardware.host import read_host
from tonnage.ledger import Category, Ledger
from tonnage.recording.groups import Group, group_alike
from tonnage.recording.host import HostMemory
from tonnage.recording.records import Allocation, Header, Mark, Note, OutOfMemory, SegmentEvent, StandIn
from tonnage.recording.timeline import PhasePeak, StepPeak, Timeline, peaks_by_phase, peaks_by_step

if TYPE_CHECKING:
    from tonnage.clock.step import StepTime
    from tonnage.clock.streams import CollectiveSeconds

# Settings of a step that a rank of a cluster called: "2x8" for hosts × cards, and the kind of host.
HOSTS, HOST = "hosts", "host"
_COPIES = ("_to_copy", "to", "copy_", "empty_strided")
_ACQUIRING = ("segment_alloc", "segment_map")
Event = tuple[int, Literal["alloc", "free", "empty_cache"], Allocation | None]


def is_copied_batch(a: Allocation) -> bool:
    """Whether a block is an input of a model that came from the host."""
    return a.category is Category.INPUTS and a.operator.removeprefix("aten::") in _COPIES


@dataclass
class Recording:
    """One run. Every byte count is of blocks, as the allocator's own statistics count them."""

    header: Header
    allocations: list[Allocation] = field(default_factory=list)
    segments: list[SegmentEvent] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    stand_ins: list[StandIn] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    oom: OutOfMemory | None = None
    captured: CapturedStep | None = None
    # Of a run that ran out of memory, all of it on a card without a limit, where that is known (`recording.beyond`).
    whole: "Recording | None" = None
    host: HostMemory | None = None

    @cached_property
    def step_time(self) -> "StepTime | None":
        """How long the captured step takes on the card; None where it does not fit, or no step that makes sense was captured."""
        if self.captured is None or self.fits is False:
            return None
        from tonnage.clock.step import step_time

        try:
            gpu = find_gpu(self.header.gpu)
            with no_collection():
                found = step_time(self.captured, gpu, self._collective_s(gpu))
        except (UnknownGpu, ArithmeticError, LookupError, TypeError, ValueError):
            return None  # a file may hold any numbers
        return found if isfinite(found.high_s) and found.step_s > 0 else None

    def _collective_s(self, gpu: Gpu) -> "CollectiveSeconds | None":
        """How long collectives take on the cluster that a rank ran on."""
        settings = self.captured.settings if self.captured else {}
        if HOSTS not in settings:
            return None
        from tonnage.budget.links import collective_seconds  # with numpy behind it

        hosts, cards = (int(number) for number in settings[HOSTS].split("x"))
        return collective_seconds(Cluster(gpu, cards, hosts, read_host(settings[HOST])))

    @cached_property
    def timeline(self) -> Timeline:
        """Allocated and reserved bytes after each event."""
        return Timeline.of(self.allocations, self.segments)

    @cached_property
    def begins_at(self) -> int:
        """The first event that was recorded. Of what stands before it only the result is known, not how it came to be."""
        return next((mark.sequence for mark in self.marks if mark.kind == "begin"), 0)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes that blocks held at once."""
        return self.timeline.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the allocator held from the device at once."""
        return self.timeline.peak_reserved_bytes

    @cached_property
    def own_peak_reserved_bytes(self) -> int:
        """The most that was reserved when this recording's own requests took memory.

        What was held before it began may be the cache of an older and higher peak, which nobody knows.
        """
        if not self.begins_at:
            return self.peak_reserved_bytes
        own = (e.sequence for e in self.segments if e.sequence >= self.begins_at and e.action in _ACQUIRING)
        return max((self.timeline.reserved_bytes[moment] for moment in own), default=0)

    @property
    def peak_process_bytes(self) -> int:
        """Reserved bytes and what the process holds beside them (context, libraries)."""
        return self.peak_reserved_bytes + self.header.overhead_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the run fitted; None where the script failed for reasons of its own, so nobody knows."""
        return {"ok": True, "oom": False, "error": None}[self.header.outcome]

    @property
    def unused_at_peak_bytes(self) -> int:
        """Bytes that were reserved but in no block, when most was reserved: fragmentation and cache."""
        moment, timeline = self.reserved_peak_sequence, self.timeline
        return 0 if moment is None else timeline.reserved_bytes[moment] - timeline.allocated_bytes[moment]

    @property
    def reserved_peak_sequence(self) -> int | None:
        """The event at which most was reserved; of a recording that began in mid-run, by its own requests."""
        peak = self.own_peak_reserved_bytes or self.peak_reserved_bytes
        return self.timeline.best_used(peak, since=max(self.begins_at - 1, 0))

    @cached_property
    def live_at_peak(self) -> list[Allocation]:
        """The blocks that make up the peak."""
        moment = self.timeline.peak_sequence
        return [a for a in self.allocations if a.born <= moment and (a.died is None or a.died > moment)]

    @property
    def peak_allocation(self) -> Allocation | None:
        """The allocation that made the peak: its phase, step and line are the peak's."""
        return max(self.live_at_peak, key=lambda a: a.born, default=None)

    def ledger(self) -> Ledger:
        """Bytes by category at the peak. They sum to `peak_allocated_bytes` exactly."""
        entries = ((a.category, a.block_bytes) for a in self.live_at_peak)
        return Ledger.of(entries, measured=self.header.source != "virtual")

    def largest(self, count: int = 10) -> list[Group]:
        """The largest tensors at the peak; alike ones (the same in every layer) are one group."""
        return group_alike(self.live_at_peak)[:count]

    @cached_property
    def phases(self) -> list[PhasePeak]:
        """The peak of each phase over the whole run, in order of first appearance; last, of batches on their way."""
        arriving = [self.timeline.allocated_bytes[a.born] for a in self.allocations if is_copied_batch(a)]
        data = [PhasePeak("data", max(arriving))] if arriving else []
        return [*peaks_by_phase(self.timeline, self.marks), *data]

    @cached_property
    def steps(self) -> list[StepPeak]:
        """The peak of each step; step 0 is what ran before the first."""
        return peaks_by_step(self.timeline, self.marks)

    def events(self) -> Iterator[Event]:
        """Allocations, frees and emptyings of the cache in order: what an allocator needs to live it again."""
        born: Iterator[Event] = ((a.born, "alloc", a) for a in sorted(self.allocations, key=lambda a: a.born))
        dead = sorted((a.died, a.index, a) for a in self.allocations if a.died is not None)
        died: Iterator[Event] = ((moment, "free", a) for moment, _, a in dead)
        emptied: Iterator[Event] = ((m.sequence, "empty_cache", None) for m in self.marks if m.kind == "empty_cache")
        return merge(emptied, died, born, key=lambda event: event[0])
