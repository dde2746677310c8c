"""A snapshot's data as typed columns: fields are validated once; others are dropped, and absent ones are empty."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

from tonnage.errors import BadSnapshot
from tonnage.recording.snapshot.stream import SnapshotLimits
from tonnage.recording.snapshot.unpickle import SharedKeysDict, Value, kind
from tonnage.untrusted import printable

ACTIONS = "alloc free_requested free_completed oom segment_alloc segment_free segment_map segment_unmap".split()
_CODES = {action: code for code, action in enumerate(ACTIONS)}
_EVENT_KEYS = ("action", "addr", "size", "stream", "time_us", "frames", "device_free")
_WORDS_PAST = 64


class Action:
    """The codes of actions, as indices of `ACTIONS`."""

    ALLOC, FREE_REQUESTED, FREE_COMPLETED, OOM = 0, 1, 2, 3
    SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP = 4, 5, 6, 7


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    name: str
    filename: str
    line: int


@dataclass(slots=True)
class Trace:
    """One device's events, in order; `stacks` index `Snapshot.stacks`. An oom's address is the free bytes."""

    actions: bytearray = field(default_factory=bytearray)
    addresses: "array[int]" = field(default_factory=lambda: array("q"))
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    streams: "array[int]" = field(default_factory=lambda: array("q"))
    times_us: "array[int]" = field(default_factory=lambda: array("q"))
    stacks: "array[int]" = field(default_factory=lambda: array("q"))
    unknown_actions: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.actions)

    def rows(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Return (action, address, size, stream, time, stack) of each event."""
        return zip(self.actions, self.addresses, self.sizes, self.streams, self.times_us, self.stacks, strict=True)


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block that was in use when the snapshot was taken."""

    address: int
    size_bytes: int
    requested_bytes: int
    is_allocated: bool
    stack: int


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """Memory that the allocator held when the snapshot was taken, and its blocks in use."""

    device: int
    address: int
    size_bytes: int
    stream: int
    is_expandable: bool
    blocks: list[HeldBlock]


@dataclass(frozen=True, slots=True)
class Annotation:
    """The start or end of a region annotated by the profiler."""

    time_us: int
    name: str
    is_start: bool


@dataclass(slots=True)
class Snapshot:
    """All data of a snapshot. Stack 0 has no frames; frames are innermost first."""

    traces: list[Trace]
    segments: list[HeldSegment]
    annotations: list[Annotation]
    settings: dict[str, Value]
    stacks: list[tuple[Frame, ...]]


def snapshot_of(root: Value, limits: SnapshotLimits) -> Snapshot:
    """Validate and convert unpickled data; raise BadSnapshot with the wrong field."""
    return _Reader(limits).snapshot(root)


def plain(table: SharedKeysDict) -> dict[str, Value]:
    """Convert a table to a dict; for duplicate keys, the last value counts."""
    return dict(zip(table.keys, table.values, strict=True))


class _Reader:
    """Numbers frames and stacks by object identity as it reads them."""

    def __init__(self, limits: SnapshotLimits) -> None:
        self._limits = limits
        self._frames: dict[int, Frame] = {}
        self._frames_seen: dict[Frame, Frame] = {}
        self._numbers: dict[int, int] = {}
        self._contents: list[tuple[Frame, ...]] = [()]
        self._blocks = 0
        self._events = 0

    def snapshot(self, root: Value) -> Snapshot:
        fields = _fields(root, "the snapshot")
        if "segments" not in fields or "device_traces" not in fields:
            _wrong("the snapshot", "lacks `segments` or `device_traces`")
        segments = self._segments(_list(fields["segments"], "segments"))
        traces = _list(fields["device_traces"], "device_traces")
        if len(traces) > self._limits.devices:
            _wrong("device_traces", f"has {len(traces):,} devices; {self._limits.devices:,} are read")
        settings = fields.get("allocator_settings")
        return Snapshot(
            traces=[self._trace(trace, device) for device, trace in enumerate(traces)],
            segments=segments,
            annotations=self._annotations(fields.get("external_annotations")),
            settings={} if settings is None else _fields(settings, "allocator_settings"),
            stacks=self._contents,
        )

    def _trace(self, value: Value, device: int) -> Trace:
        where = f"device_traces[{device}]"
        rows = _list(value, where)
        trace, by_shape = Trace(), dict[int, list[int]]()
        self._count_events(len(rows), where)
        for number, table in enumerate(rows):
            if type(table) is not SharedKeysDict:
                _wrong(f"{where}[{number}]", f"is {kind(table)}, not a dict")
            keys, values = table.keys, table.values
            if type(keys) is tuple:
                # The positions of the fields are looked up once for each shape of dict.
                places = by_shape.get(id(keys))
                if places is None:
                    at = {key: place for place, key in enumerate(keys)}
                    places = by_shape[id(keys)] = [at.get(key, -1) for key in _EVENT_KEYS]
                found = [values[place] if place >= 0 else None for place in places]
            else:
                found = [plain(table).get(key) for key in _EVENT_KEYS]
            self._event(trace, found, f"{where}[{number}]")
        return trace

    def _count_events(self, count: int, where: str) -> None:
        self._events += count
        if self._events > self._limits.events:
            _wrong(where, f"has events past the {self._limits.events:,} that are read")

    def _event(self, trace: Trace, values: list[Value], where: str) -> None:
        action, address, size, stream, time_us, frames, device_free = values
        code = _CODES.get(action) if type(action) is str else _wrong(f"{where}.action", f"is {kind(action)}")
        if code is None:
            name = printable(action)[:_WORDS_PAST]
            if name in trace.unknown_actions or len(trace.unknown_actions) < _WORDS_PAST:
                trace.unknown_actions[name] = trace.unknown_actions.get(name, 0) + 1
            return
        address = device_free if code == Action.OOM else address
        if type(address) is not int or not 0 <= address < 1 << 63:
            _wrong(f"{where}.addr", f"is {_shown(address)}")
        if type(size) is not int or not 0 <= size < self._limits.size_bytes:
            _wrong(f"{where}.size", f"is {_shown(size)}")
        trace.actions.append(code)
        trace.addresses.append(address)
        trace.sizes.append(size)
        trace.streams.append(_integer(stream, where, "stream"))
        trace.times_us.append(_integer(time_us, where, "time_us"))
        trace.stacks.append(self._stack(frames, where))

    def _stack(self, frames: Value, where: str) -> int:
        if frames is None:
            return 0
        rows = _list(frames, f"{where}.frames")
        number = self._numbers.get(id(frames), 0)
        if number or not rows:
            return number
        if len(rows) > self._limits.stack_depth:
            _wrong(f"{where}.frames", f"has {len(rows):,} frames; {self._limits.stack_depth:,} are read")
        members = tuple(self._frames.get(id(row)) or self._frame(row, where) for row in rows)
        number = self._numbers[id(frames)] = len(self._contents)
        self._contents.append(members)
        return number

    def _frame(self, row: Value, where: str) -> Frame:
        fields = _fields(row, f"{where}.frames")
        name, filename, line = (fields.get(key) for key in ("name", "filename", "line"))
        if type(name) is not str or type(filename) is not str or type(line) is not int:
            _wrong(f"{where}.frames", "has a frame without name, filename and line")
        frame = Frame(printable(name), printable(filename), line)
        frame = self._frames[id(row)] = self._frames_seen.setdefault(frame, frame)
        return frame

    def _segments(self, rows: list[Value]) -> list[HeldSegment]:
        """Read the segments first, then their blocks, so that a list that repeats one segment is rejected early."""
        tables = [_fields(row, f"segments[{number}]") for number, row in enumerate(rows)]
        segments = []
        for number, fields in enumerate(tables):
            where = f"segments[{number}]"
            segment = HeldSegment(
                device=_integer(fields.get("device"), where, "device"),
                address=self._size(fields, "address", where, 1 << 63),
                size_bytes=self._size(fields, "total_size", where, self._limits.size_bytes),
                stream=_integer(fields.get("stream"), where, "stream"),
                is_expandable=flag(fields, "is_expandable", where),
                blocks=[],
            )
            segments.append(segment)
        # Memory is in one segment at a time.
        for low, high in pairwise(sorted(segments, key=lambda held: (held.device, held.address))):
            if low.device == high.device and low.address + low.size_bytes > high.address:
                _wrong("segments", f"has two that overlap at {high.address:#x}")
        for number, (segment, fields) in enumerate(zip(segments, tables, strict=True)):
            where = f"segments[{number}]"
            segment.blocks.extend(self._held(_list(fields.get("blocks"), f"{where}.blocks"), segment, where))
        return segments

    def _held(self, rows: list[Value], segment: HeldSegment, where: str) -> Iterator[HeldBlock]:
        """Return the blocks in use. Old versions do not write addresses: blocks follow each other."""
        self._blocks += len(rows)
        if self._blocks > self._limits.blocks:
            _wrong(where, f"has blocks past the {self._limits.blocks:,} that are read")
        address, end = segment.address, segment.address + segment.size_bytes
        for number, row in enumerate(rows):
            at = f"{where}.blocks[{number}]"
            fields = _fields(row, at)
            size = self._size(fields, "size", at, self._limits.size_bytes)
            if self._size(fields, "address", at, 1 << 63, address) != address or not 0 < size <= end - address:
                _wrong(at, "does not lie after the one before it, within its segment")
            state = fields.get("state")
            if type(state) is not str:
                _wrong(f"{at}.state", f"is {kind(state)}")
            if state.startswith("active"):
                requested = self._size(fields, "requested_size", at, self._limits.size_bytes, size)
                stack = self._stack(fields.get("frames"), at)
                yield HeldBlock(address, size, requested, state == "active_allocated", stack)
            address += size

    def _size(self, fields: dict[str, Value], key: str, where: str, limit: int, absent: int | None = None) -> int:
        value = fields.get(key, absent)
        if type(value) is not int or not 0 <= value < limit:
            _wrong(f"{where}.{key}", f"is {_shown(value)}")
        return value

    def _annotations(self, value: Value) -> list[Annotation]:
        rows = [] if value is None else _list(value, "external_annotations")
        self._count_events(len(rows), "external_annotations")
        found = []
        for number, row in enumerate(rows):
            where = f"external_annotations[{number}]"
            fields = _fields(row, where)
            name, stage = fields.get("name"), fields.get("stage")
            if type(name) is not str or type(stage) is not str:
                _wrong(where, "has no name or stage")
            time_us = _integer(fields.get("time_us"), where, "time_us")
            found.append(Annotation(time_us, printable(name), stage == "START"))
        return sorted(found, key=lambda annotation: annotation.time_us)


def _fields(value: Value, where: str) -> dict[str, Value]:
    if type(value) is not SharedKeysDict:
        _wrong(where, f"is {kind(value)}, not a dict")
    return plain(value)


def _list(value: Value, where: str) -> list[Value]:
    if type(value) is not list:
        _wrong(where, f"is {kind(value)}, not a list")
    return value


def _integer(value: Value, where: str, key: str) -> int:
    """Return a 64-bit integer; 0 if a version did not write it."""
    if value is None:
        return 0
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        _wrong(f"{where}.{key}", f"is {_shown(value)}")
    return value


def flag(fields: dict[str, Value], key: str, where: str) -> bool:
    """Return a flag; False if a version did not write it."""
    value = fields.get(key, False)
    if type(value) is not bool:
        _wrong(f"{where}.{key}", f"is {_shown(value)}")
    return value


def _shown(value: Value) -> str:
    return f"{value:,}" if type(value) in (int, float) else kind(value)


def _wrong(where: str, problem: str) -> NoReturn:
    raise BadSnapshot(f"{where} {problem}.")
