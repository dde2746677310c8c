"""Allocated and reserved bytes after each event (sequence numbers are dense), and their peaks by phase and step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tonnage.recording.records import Allocation, Mark, MarkKind, SegmentEvent

# Phases that count even if they allocate nothing: their peak is what exists while they run.
_EVEN_IF_EMPTY = ("saving", "loading", "model loading")
_SIGN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Bytes after the event of each sequence number."""

    allocated_bytes: list[int]
    reserved_bytes: list[int]

    @classmethod
    def of(cls, allocations: Sequence[Allocation], segments: Sequence[SegmentEvent]) -> "MemoryTimeline":
        """Sum up the events."""
        born = max((a.born for a in allocations), default=0)
        died = max((a.died for a in allocations if a.died is not None), default=0)
        length = 1 + max(born, died, max((e.sequence for e in segments), default=0))
        blocks, reserved = [0] * length, [0] * length
        for a in allocations:
            blocks[a.born] += a.block_bytes
            if a.died is not None:
                blocks[a.died] -= a.block_bytes
        for event in segments:
            reserved[event.sequence] += _SIGN[event.action] * event.size_bytes
        return cls(list(accumulate(blocks)), list(accumulate(reserved)))

    @property
    def peak_sequence(self) -> int:
        """The first event at which the most was allocated."""
        return self.allocated_bytes.index(max(self.allocated_bytes))

    def best_used(self, reserved_bytes: int, since: int = 0) -> int | None:
        """Return the first event from `since` on with this much reserved and the most of it allocated."""
        reserved = enumerate(self.reserved_bytes[since:], since)
        moments = (moment for moment, size in reserved if size == reserved_bytes)
        return max(moments, key=self.allocated_bytes.__getitem__, default=None)

    def peak_between(self, start: int, end: int) -> int:
        """Return the most bytes allocated from just before event `start` until before event `end`."""
        return max(self.allocated_bytes[max(start - 1, 0) : max(end, 1)], default=0)


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most bytes allocated in a phase."""

    name: str
    peak_allocated_bytes: int


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The most bytes allocated in a step, and in each of its phases."""

    step: int
    peak_allocated_bytes: int
    phases: tuple[PhasePeak, ...]


def peaks_by_step(timeline: MemoryTimeline, marks: Sequence[Mark]) -> list[StepPeak]:
    """Return the peak of each step, in order; a step that recurs (such as 0 after an evaluation) counts as one."""
    found: dict[int, StepPeak] = {}
    for name, start, end in spans(marks, "step", len(timeline.allocated_bytes)):
        step = int(name or 0)
        phases = peaks_by_phase(timeline, marks, start, end)
        here = StepPeak(step, timeline.peak_between(start, end), tuple(phases))
        best = found.get(step)
        if best is None or here.peak_allocated_bytes > best.peak_allocated_bytes:
            found[step] = here
    return list(found.values())


def peaks_by_phase(
    timeline: MemoryTimeline, marks: Sequence[Mark], start: int = 0, end: int | None = None
) -> list[PhasePeak]:
    """Return the peak of each phase, over all its occurrences between two events."""
    peaks: dict[str, int] = {}
    end = len(timeline.allocated_bytes) if end is None else end
    for name, first, last in _stretches(marks, "phase", len(timeline.allocated_bytes)):
        is_empty = first == last and name in _EVEN_IF_EMPTY and start < first <= end
        first, last = max(first, start), min(last, end)
        peak = timeline.peak_between(first, last)
        if first < last or (is_empty and peak):
            phase = name or "setup"
            peaks[phase] = max(peaks.get(phase, 0), peak)
    return [PhasePeak(phase, peak) for phase, peak in peaks.items()]


def spans(marks: Sequence[Mark], kind: MarkKind, length: int) -> Iterator[tuple[str, int, int]]:
    """Return (name, first event, event after the last) of each span between marks of a kind; "" before the first."""
    return (stretch for stretch in _stretches(marks, kind, length) if stretch[1] < stretch[2])


def _stretches(marks: Sequence[Mark], kind: MarkKind, length: int) -> Iterator[tuple[str, int, int]]:
    turns = sorted((m for m in marks if m.kind == kind), key=lambda m: m.sequence)
    starts = [("", 0), *((m.name, m.sequence) for m in turns), ("", length)]
    return ((name, start, end) for (name, start), (_, end) in pairwise(starts))


def name_at(marks: Sequence[Mark], kind: MarkKind, sequence: int) -> str:
    """Return the phase or step that runs at an event; "" before the first."""
    return next((name for name, start, end in spans(marks, kind, sequence + 1) if start <= sequence < end), "")
