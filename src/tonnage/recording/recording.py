"""One run's memory events, and the queries on them, whose results are cached: it must be complete before the first."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from math import isfinite
from typing import TYPE_CHECKING, Literal

from tonnage.clock.captured import CapturedStep
from tonnage.errors import UnknownGpu
from tonnage.garbage import no_collection
from tonnage.hardware import find_gpu
from tonnage.hardware.cluster import Cluster, read_host
from tonnage.ledger import Category, Ledger
from tonnage.recording.groups import BlockGroup, group_alike
from tonnage.recording.host import HostPeaks
from tonnage.recording.records import Allocation, Dependence, FailedRequest, Header, Mark, Note, SegmentEvent, StandIn
from tonnage.recording.timeline import MemoryTimeline, PhasePeak, StepPeak, peaks_by_phase, peaks_by_step
from tonnage.recording.writes import ScriptWrites

if TYPE_CHECKING:
    from tonnage.clock.step import SteadyStep

# Settings of a step on a cluster: "2x8" for hosts × cards, and the kind of host.
HOSTS, HOST = "hosts", "host"
_COPIES = ("_to_copy", "to", "copy_", "empty_strided")
_ACQUIRING = ("segment_alloc", "segment_map")
Event = tuple[int, Literal["alloc", "free", "empty_cache"], Allocation | None]


def is_copied_batch(a: Allocation) -> bool:
    """Whether a block is a model input that was copied from the host."""
    return a.category is Category.INPUTS and a.operator.removeprefix("aten::") in _COPIES


@dataclass
class Recording:
    """One run. All byte counts are of blocks, as in the allocator's own statistics."""

    header: Header
    allocations: list[Allocation] = field(default_factory=list)
    segments: list[SegmentEvent] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    stand_ins: list[StandIn] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    oom: FailedRequest | None = None
    captured: CapturedStep | None = None
    # For a run that ran out of memory and continued, the whole run without a limit (`recording.beyond`).
    whole: "Recording | None" = None
    host: HostPeaks | None = None
    writes: ScriptWrites | None = None
    dependence: Dependence | None = None  # why the outcome is "depends"

    @cached_property
    def step_time(self) -> "SteadyStep | None":
        """The duration of the captured step; None if the run does not fit, or no plausible step was captured."""
        if self.captured is None or self.fits is False:
            return None
        from tonnage.clock.step import step_time

        try:
            gpu, settings, collective_s = find_gpu(self.header.gpu), self.captured.settings, None
            if HOSTS in settings:
                from tonnage.budget.time.collectives import collective_seconds  # imports numpy

                hosts, cards = (int(number) for number in settings[HOSTS].split("x"))
                collective_s = collective_seconds(Cluster(gpu, cards, hosts, read_host(settings[HOST])))
            with no_collection():
                found = step_time(self.captured, gpu, collective_s)
        except (UnknownGpu, ArithmeticError, LookupError, TypeError, ValueError):
            return None  # a file may contain any numbers
        return found if isfinite(found.high_s) and found.step_s > 0 else None

    @cached_property
    def timeline(self) -> MemoryTimeline:
        """Allocated and reserved bytes after each event."""
        return MemoryTimeline.of(self.allocations, self.segments)

    @cached_property
    def begins_at(self) -> int:
        """The first recorded event. Earlier ones only describe the state at the start."""
        return next((mark.sequence for mark in self.marks if mark.kind == "begin"), 0)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes that blocks held at once."""
        return max(self.timeline.allocated_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the allocator reserved at once."""
        return max(self.timeline.reserved_bytes)

    @cached_property
    def own_peak_reserved_bytes(self) -> int:
        """The reserved peak at this recording's own requests: cache from before it may be of an earlier peak."""
        if not self.begins_at:
            return self.peak_reserved_bytes
        own = (e.sequence for e in self.segments if e.sequence >= self.begins_at and e.action in _ACQUIRING)
        return max((self.timeline.reserved_bytes[moment] for moment in own), default=0)

    @property
    def peak_process_bytes(self) -> int:
        """Reserved bytes plus what the process holds outside the allocator (context, libraries)."""
        return self.peak_reserved_bytes + self.header.overhead_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the run fitted; None if the script ended for another reason before its end."""
        return {"ok": True, "oom": False}.get(self.header.outcome)

    @property
    def unused_at_peak_bytes(self) -> int:
        """Bytes reserved but in no block at the reserved peak: fragmentation and cache."""
        moment, timeline = self.reserved_peak_sequence, self.timeline
        return 0 if moment is None else timeline.reserved_bytes[moment] - timeline.allocated_bytes[moment]

    @property
    def reserved_peak_sequence(self) -> int | None:
        """The event of the reserved peak; for a recording that began mid-run, of its own requests."""
        peak = self.own_peak_reserved_bytes or self.peak_reserved_bytes
        return self.timeline.best_used(peak, since=max(self.begins_at - 1, 0))

    @cached_property
    def live_at_peak(self) -> list[Allocation]:
        """The blocks that make up the peak."""
        return self.live_at(self.timeline.peak_sequence)

    def live_at(self, moment: int) -> list[Allocation]:
        """Return the live blocks after an event."""
        return [a for a in self.allocations if a.born <= moment and (a.died is None or a.died > moment)]

    @property
    def peak_allocation(self) -> Allocation | None:
        """The allocation that reached the peak: its phase, step and line are the peak's."""
        return max(self.live_at_peak, key=lambda a: a.born, default=None)

    def ledger(self) -> Ledger:
        """Return the bytes by category at the peak. They sum to `peak_allocated_bytes` exactly."""
        entries = ((a.category, a.block_bytes) for a in self.live_at_peak)
        return Ledger.of(entries, measured=self.header.source != "virtual")

    def largest(self, count: int = 10) -> list[BlockGroup]:
        """Return the largest tensors at the peak; those alike (the same in every layer) are one group."""
        return group_alike(self.live_at_peak)[:count]

    @cached_property
    def phases(self) -> list[PhasePeak]:
        """The peak of each phase over the whole run, in order of first appearance; the arrival of batches comes last."""
        arriving = [self.timeline.allocated_bytes[a.born] for a in self.allocations if is_copied_batch(a)]
        data = [PhasePeak("data", max(arriving))] if arriving else []
        return [*peaks_by_phase(self.timeline, self.marks), *data]

    @cached_property
    def steps(self) -> list[StepPeak]:
        """The peak of each step; step 0 is what ran before the first."""
        return peaks_by_step(self.timeline, self.marks)

    def events(self) -> Iterator[Event]:
        """Return allocations, frees and cache emptyings in order, as needed for a replay."""
        born: Iterator[Event] = ((a.born, "alloc", a) for a in sorted(self.allocations, key=lambda a: a.born))
        dead = sorted((a.died, a.index, a) for a in self.allocations if a.died is not None)
        died: Iterator[Event] = ((moment, "free", a) for moment, _, a in dead)
        emptied: Iterator[Event] = ((m.sequence, "empty_cache", None) for m in self.marks if m.kind == "empty_cache")
        return merge(emptied, died, born, key=lambda event: event[0])
