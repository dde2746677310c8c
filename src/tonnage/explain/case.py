"""A recording as the rules see it: the decisive moment (where it failed, else its peak) and what was alive then.

A device's limit is what the process could have had: the card's free bytes and its own, or less if the process set a
limit itself, which only PyTorch's message says.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from tonnage.allocator.segments import DRIVER_RESERVE_BYTES
from tonnage.recording import Allocation, ClusterSummary, Recording
from tonnage.recording.loops import turns
from tonnage.recording.replay import demand, until_refused
from tonnage.recording.timeline import name_at, spans
from tonnage.units import parse_bytes

# The note of a snapshot, which has no message.
OWN_LIMIT = "its own limit"
WORTH_SHARE = 0.05
# Phases in which a run does the work that it repeats.
_WORKING_PHASES = ("forward", "backward", "optimizer", "evaluation", "generation")
_LOADING_PHASES = ("model loading", "loading", "saving")
# Operators that make tensors of nothing, or of data from elsewhere.
_BRINGING = (
    "_to_copy to copy_ clone empty empty_like empty_strided zeros zeros_like ones ones_like full full_like "
    "arange tensor rand randn randint normal_ uniform_ randperm _pin_memory"
).split()
_SIZE = r"([0-9.]+ (?:bytes|KiB|MiB|GiB))"
_ALLOWED = re.compile(_SIZE + " allowed;")
_PROCESS = re.compile(r"this process has " + _SIZE)
_OTHER_PROCESS = re.compile(r"Process \d+ has " + _SIZE)


@dataclass(frozen=True, slots=True)
class Death:
    """The request that failed, and the memory at that time."""

    requested_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device_free_bytes: int
    process_bytes: int | None
    other_process_bytes: int

    @property
    def shortage_bytes(self) -> int:
        """Bytes that the device lacked."""
        return max(0, self.requested_bytes - self.free_bytes)

    @property
    def is_limited(self) -> bool:
        """Whether a limit of the process refused it although the card had room."""
        return self.free_bytes < self.device_free_bytes and self.requested_bytes <= self.device_free_bytes

    @property
    def unused_bytes(self) -> int:
        """Reserved bytes in no block."""
        return self.reserved_bytes - self.allocated_bytes


def death_of(recording: Recording) -> Death | None:
    """Return the memory at the failure; None if the run did not fail."""
    oom = recording.oom
    if oom is None:
        return None
    allowed, process = (
        _size(found[1]) if (found := pattern.search(oom.message)) else None for pattern in (_ALLOWED, _PROCESS)
    )
    free = oom.free_bytes
    if allowed is not None:
        free = min(free, max(0, allowed - oom.reserved_bytes))
    others = sum(_size(size) for size in _OTHER_PROCESS.findall(oom.message))
    sizes = (oom.requested_bytes, free, oom.allocated_bytes, oom.reserved_bytes, oom.free_bytes)
    return Death(*sizes, process, others)


def is_limited_by_itself(recording: Recording) -> bool:
    """Say whether the failed request met the process's own limit before the card's."""
    death = death_of(recording)
    return death is not None and (death.is_limited or any(note.operator == OWN_LIMIT for note in recording.notes))


def _works(a: Allocation) -> bool:
    """Say whether a block was made by work that a run repeats, not by bringing data or weights to the GPU."""
    if a.phase in _WORKING_PHASES:
        return True
    return a.phase not in _LOADING_PHASES and a.operator.removeprefix("aten::") not in _BRINGING


def _size(words: str) -> int:
    return parse_bytes(words.replace("bytes", "B"))


def needed_of(recording: Recording) -> Recording:
    """Return all that the run is known to need. If it exceeded a limit of its own, that limit counts as the card's."""
    needed, death = demand(recording), death_of(recording)
    if recording.whole is None or death is None or not death.is_limited:
        return needed
    limit = death.reserved_bytes + death.free_bytes + needed.header.overhead_bytes + DRIVER_RESERVE_BYTES
    return replace(needed, header=replace(needed.header, capacity_bytes=limit))


class Case:
    """What every rule asks of a recording, computed once."""

    def __init__(self, recording: Recording, cluster: ClusterSummary | None = None) -> None:
        self.recording = recording
        self.cluster = cluster  # of which the recording is one rank
        self.death = death_of(recording)

    @cached_property
    def needed(self) -> Recording:
        """All that the run is known to need: if it failed, including the failed request and what came after, if known."""
        return needed_of(self.recording)

    @cached_property
    def until_death(self) -> Recording:
        """What it needed until it failed, with the failed request last."""
        return until_refused(self.recording)

    @cached_property
    def moment(self) -> int:
        """The last event before the failure, else the event of the peak."""
        if self.recording.oom is None:
            return self.recording.timeline.peak_sequence
        return self.until_death.allocations[-1].born

    @cached_property
    def live(self) -> list[Allocation]:
        """The live blocks at that moment; if it failed, including the failed request."""
        return self.until_death.live_at(self.moment)

    @cached_property
    def turns(self) -> list[int]:
        """The first event of each iteration of the script's loop."""
        return turns(self.recording)

    @cached_property
    def comparable_turns(self) -> list[int]:
        """The first event of each iteration that does work like the others, so that their levels can be compared.

        One call of `generate` is one iteration, however many tokens it makes. Iterations that only bring data to the
        GPU, as a loop that loads a model does, are none.
        """
        starts = set(self.turns)
        for begin, end in self.spans_of(("generation",)):
            within = {start for start in starts if begin < start < end}
            if within:
                starts -= within
                starts.add(begin)
        ordered = sorted(starts)
        working = set()
        for a in self.recording.allocations:
            if _works(a):
                working.add(bisect_right(ordered, a.born) - 1)
        return [start for turn, start in enumerate(ordered) if turn in working]

    @property
    def peak_bytes(self) -> int:
        """Peak bytes until it failed or ended."""
        return max(1, self.until_death.peak_allocated_bytes)

    def spans_of(self, phases: Collection[str]) -> list[tuple[int, int]]:
        """Return (first event, event after the last) of each stretch of these phases."""
        length = len(self.needed.timeline.allocated_bytes)
        return [(start, end) for name, start, end in spans(self.recording.marks, "phase", length) if name in phases]

    def moment_of(self, phases: Collection[str]) -> int | None:
        """Return the decisive moment if it is in one of these phases, else their peak; None without them."""
        if name_at(self.recording.marks, "phase", self.moment) in phases:
            return self.moment
        levels = self.needed.timeline.allocated_bytes
        highest = [max(range(start, end), key=levels.__getitem__) for start, end in self.spans_of(phases)]
        return max(highest, key=levels.__getitem__, default=None)

    def live_in(self, phases: Collection[str]) -> list[Allocation]:
        """Return the blocks alive at the peak of these phases."""
        moment = self.moment_of(phases)
        return [] if moment is None else self.needed.live_at(moment)

    def is_worth(self, blocks: Iterable[Allocation], share: float = WORTH_SHARE) -> bool:
        """Say whether these blocks are a large share of all that the run needs."""
        return sum(a.block_bytes for a in blocks) >= share * self.peak_bytes

    def without(self, blocks: Iterable[Allocation]) -> list[Allocation]:
        """Return all that the run needs but these blocks."""
        gone = {a.index for a in blocks}
        return [a for a in self.needed.allocations if a.index not in gone]
