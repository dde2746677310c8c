"""Replay a recorded sequence of allocator events through the model.

The trace decides what the program requested and what the device released; the model decides everything else: where
each block is, when a segment is needed and how large it is. Every such decision that is also in the trace is
compared, so a replay without differences validates the model. A trace does not say who allocated, or why.

A trace may start in mid-run: the model then starts with the known state. Contradictions (a block allocated twice, a
free of an unknown block) are counted, and the replay continues.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tonnage.allocator.adopt import Segment, State
from tonnage.allocator.blocks import ALLOCATED, Block
from tonnage.allocator.caching import CachingAllocator
from tonnage.allocator.oom import OutOfMemory
from tonnage.allocator.settings import AllocatorSettings
from tonnage.allocator.stats import AllocatorCounters
from tonnage.errors import BadTrace
from tonnage.units import format_bytes
from tonnage.untrusted import Unreadable, parse_json, read_bytes

Event = tuple[str, int, int, int]
ACQUIRING = ("segment_alloc", "segment_map")
RELEASING = ("segment_free", "segment_unmap")
ACTIONS = frozenset(("alloc", "free_requested", "free_completed", "oom", "snapshot", *ACQUIRING, *RELEASING))
# A trace does not record the device's size, and a replay never needs more than the device once provided.
BOUNDLESS_BYTES = 2**44
# Above all GPU addresses: the model's own segments, which are not in the trace, are placed here.
_OWN_ADDRESSES = 2**47
_MOST_BYTES = 128 * 2**20
_HINT = "A trace is a JSON list of [action, address, size, stream], as torch.cuda.memory._snapshot() names them."


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The reserved bytes at one moment, by use."""

    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int
    rounding_bytes: int

    @classmethod
    def of(cls, counters: AllocatorCounters) -> Occupancy:
        """Return the current occupancy."""
        small, large = counters.small, counters.large
        pending = small.pending_bytes + large.pending_bytes
        requested = small.requested_bytes + large.requested_bytes
        allocated = counters.allocated_bytes
        return cls(counters.reserved_bytes, allocated, pending, allocated + pending - requested)

    @property
    def unused_bytes(self) -> int:
        """Bytes reserved and not in use."""
        return self.reserved_bytes - self.allocated_bytes - self.pending_bytes

    def as_json(self) -> dict[str, int]:
        """Return it in plain types."""
        return asdict(self) | {"unused_bytes": self.unused_bytes}


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A decision of the model that the trace contradicts."""

    event: int
    words: str


@dataclass(slots=True)
class ReplayResult:
    """The result of replaying a trace."""

    events: int = 0
    allocations: int = 0
    ooms: int = 0
    older_blocks: int = 0
    older_bytes: int = 0
    unknown_frees: int = 0
    lost_frees: int = 0
    stats: dict[str, int] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    at_peak_allocated: Occupancy = Occupancy(0, 0, 0, 0)
    at_peak_reserved: Occupancy = Occupancy(0, 0, 0, 0)
    differences: list[Contradiction] = field(default_factory=list)

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak bytes of blocks that the program held."""
        return self.stats["allocated_bytes.all.peak"]

    @property
    def peak_reserved_bytes(self) -> int:
        """Peak bytes of segments."""
        return self.stats["reserved_bytes.all.peak"]

    def as_json(self) -> dict[str, Any]:
        """Return the result in plain types."""
        counts = "older_blocks older_bytes unknown_frees lost_frees peak_allocated_bytes peak_reserved_bytes".split()
        return {
            **{name: getattr(self, name) for name in ("events", "allocations", "ooms")},
            "exact": not self.differences,
            "differences": [asdict(each) for each in self.differences],
            **{name: getattr(self, name) for name in counts},
            "peak_active_bytes": self.stats["active_bytes.all.peak"],
            "peak_requested_bytes": self.stats["requested_bytes.all.peak"],
            "fragmentation": {
                "at_peak_allocated": self.at_peak_allocated.as_json(),
                "at_peak_reserved": self.at_peak_reserved.as_json(),
            },
            "segments": [asdict(segment) for segment in self.segments],
            "stats": self.stats,
        }


def read_trace(path: Path) -> list[Event]:
    """Read the events of a file: a JSON list of [action, address, size, stream], optionally gzipped."""
    try:
        rows = parse_json(read_bytes(path, _MOST_BYTES, inflate=True))
    except Unreadable as error:
        raise BadTrace(f"{path} holds no trace: it {error}.", hint=_HINT) from None
    if not isinstance(rows, list):
        raise BadTrace(f"{path} holds no trace: it is no list.", hint=_HINT)
    wrong = next((number for number, row in enumerate(rows) if not _is_event(row)), None)
    if wrong is not None:
        raise BadTrace(f"{path} holds no trace: its event {wrong} is {reprlib.repr(rows[wrong])}.", hint=_HINT)
    return [tuple(row) for row in rows]


def _is_event(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 4 or not all(type(number) is int for number in row[1:]):
        return False
    action, address, size, stream = row
    known = isinstance(action, str) and action in ACTIONS
    return known and 0 <= address < 2**63 and 0 <= size < BOUNDLESS_BYTES and -(2**63) <= stream < 2**63


def replay(
    events: Sequence[Event], settings: AllocatorSettings | None = None, start: State | None = None
) -> ReplayResult:
    """Run events, from a state if they start in mid-run. Without settings, segments expand if the trace maps pages."""
    if settings is None:
        settings = AllocatorSettings(expandable_segments=any(event[0] == "segment_map" for event in events))
    try:
        return _Replay(events, settings, start or State()).run()
    except OutOfMemory as error:
        asked = format_bytes(error.shortage.requested_bytes)
        raise BadTrace(f"It cannot be replayed: it asks for {asked} more than it frees, beyond any GPU.") from None


class _Replay:
    """The state of one replay: the model, and how many of the trace's segments are used."""

    def __init__(self, events: Sequence[Event], settings: AllocatorSettings, start: State) -> None:
        self._events = events
        self._given = [(index, event) for index, event in enumerate(events) if event[0] in ACQUIRING]
        self._used = 0
        self._now = 0
        self._own_bytes = 0
        self._result = ReplayResult(events=len(events), segments=list(start.segments))
        self._allocator = CachingAllocator(BOUNDLESS_BYTES, settings, observer=self._observe, placement=self._placed)
        self._blocks: dict[int, Block] = self._allocator.adopt(start)
        self._result.older_blocks = len(self._blocks)
        self._result.older_bytes = self._allocator.counters.allocated_bytes
        self._keep_peaks()

    def run(self) -> ReplayResult:
        steps = {
            "alloc": self._alloc,
            "free_requested": self._request_free,
            "free_completed": self._complete_free,
            **dict.fromkeys(RELEASING, self._release),
        }
        for index, (action, address, size, stream) in enumerate(self._events):
            self._now = index
            self._result.ooms += action == "oom"
            if action in steps:
                steps[action](address, size, stream)
        self._now = len(self._events)
        self._pass_unneeded()
        self._result.stats = self._allocator.memory_stats()
        return self._result

    def _alloc(self, address: int, size: int, stream: int) -> None:
        self._result.allocations += 1
        if address in self._blocks:
            self._result.lost_frees += 1
            self._complete_free(address, size, stream)
        block = self._blocks[address] = self._allocator.malloc(size, stream)
        if block.address != address:
            self._differ(self._now, f"{size} B lie at {block.address:#x} in the model, at {address:#x} in the trace")
        self._pass_unneeded()
        self._keep_peaks()

    def _keep_peaks(self) -> None:
        counters, result = self._allocator.counters, self._result
        if counters.allocated_bytes > result.at_peak_allocated.allocated_bytes:
            result.at_peak_allocated = Occupancy.of(counters)
        # Among moments with equally much reserved, the fullest shows how much of it was needed.
        reserved, fullest = (counters.reserved_bytes, counters.allocated_bytes), result.at_peak_reserved
        if reserved > (fullest.reserved_bytes, fullest.allocated_bytes):
            result.at_peak_reserved = Occupancy.of(counters)

    def _request_free(self, address: int, size: int, stream: int) -> None:
        block = self._blocks.get(address)
        if block is not None and block.state == ALLOCATED:
            self._allocator.request_free(block)
        else:
            self._result.unknown_frees += 1

    def _complete_free(self, address: int, size: int, stream: int) -> None:
        block = self._blocks.pop(address, None)
        if block is not None:
            (self._allocator.free if block.state == ALLOCATED else self._allocator.complete_free)(block)

    def _release(self, address: int, size: int, stream: int) -> None:
        if not self._allocator.release_segment(address):
            self._differ(self._now, f"the trace gives {address:#x} back, which is in use or unknown in the model")

    def _next_given(self) -> Event | None:
        """Return the segment that the trace allocated for the current request, if any."""
        index, event = self._given[self._used] if self._used < len(self._given) else (self._now, None)
        return event if index < self._now else None

    def _placed(self, size: int) -> int:
        """Return the address of the trace's matching segment, or one of the model's own."""
        event = self._next_given()
        is_it = event is not None and (event[2] == size or event[0] == "segment_map")
        if event is not None and is_it and event[1] + event[2] <= _OWN_ADDRESSES:
            return event[1]
        address = _OWN_ADDRESSES + self._own_bytes % _OWN_ADDRESSES
        self._own_bytes += size
        return address

    def _observe(self, action: str, address: int, size: int, stream: int) -> None:
        if action == "oom":
            return
        if action in RELEASING:
            if (action, address, size, stream) != tuple(self._events[self._now]):
                self._differ(self._now, f"the model has {_words((action, address, size, stream))} here")
            return
        self._result.segments.append(Segment(address, size, stream, action == "segment_map"))
        event = self._next_given()
        if event is None or tuple(event) != (action, address, size, stream):
            self._differ(self._now, f"the model has {_words((action, address, size, stream))} here")
        self._used += event is not None

    def _pass_unneeded(self) -> None:
        """Report segments that the trace allocated before the current event and the model did not."""
        while (event := self._next_given()) is not None:
            index = self._given[self._used][0]
            self._differ(index, f"the trace has {_words(event)}, which the model never needed")
            self._used += 1

    def _differ(self, event: int, words: str) -> None:
        self._result.differences.append(Contradiction(event, words))


def _words(event: Event) -> str:
    action, address, size, stream = event
    return f"{action} of {size} B at {address:#x} on stream {stream}"
