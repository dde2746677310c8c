"""Converts what torch's profiler recorded to calls in the order in which they began.

The profiler's tree has tensors with shapes, strides, types and devices, also those in lists; its flat events have
numbers, flags and lists of numbers. A virtual GPU computes some small values on the host within an operator; such
calls are left out. Our own notes describe streams, events and collectives: `script.profiler` and the groups of a virtual
cluster write them, and `clock.streams` interprets them.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tonnage.clock.captured import READS_BACK, CallKind, CapturedCall, CapturedStep
from tonnage.clock.operators import shapeless

Note = tuple[CallKind, str, tuple[str, ...]]  # kind, name, numbers
_STREAM_AT = {"set_stream": 0, "synchronize_stream": 0, "record_event": 1, "wait_event": 1}
_FIRST_OWN = 1_000_000  # events that autograd's engine records


class NoteReader:
    """Reads notes and replaces raw ids by small numbers.

    Streams are numbered as they appear. Events and collectives are numbered from the start of each step, so that one
    waited for in the next step has the same number there.
    """

    def __init__(self, earlier: Iterable[str] = ()) -> None:
        """Start after the notes of the previous step."""
        self._streams = {"0": 0}
        self._numbers: dict[tuple[str, str], int] = {}
        self._counts: Counter[str] = Counter()
        for words in earlier:
            self.read(words)
        self._counts.clear()

    def read(self, words: str) -> Note | None:
        """Return kind, name and numbers; None if the event or collective was never seen."""
        kind, name, *numbers = words.split()
        if name in _STREAM_AT:
            at = _STREAM_AT[name]
            numbers[at] = str(self._streams.setdefault(numbers[at], len(self._streams)))
        what = "event" if name.endswith("_event") else "collective"
        if kind == "collective" or name == "record_event":
            self._counts[what] += 1
            self._numbers[what, numbers[0]] = self._counts[what]
        if kind == "collective" or name.endswith(("_event", "_collective")):
            number = self._numbers.get((what, numbers[0]))
            if number is None:
                return None
            numbers[0] = str(number)
        return ("collective" if kind == "collective" else "stream"), name, tuple(numbers)


class BackwardStreams:
    """Tracks on which stream autograd's engine runs a node: that of the operator that created it, after earlier work.

    The engine switches streams natively, so that is not noted, and the profiler must record nodes. After backward,
    the caller's stream waits for the last one.
    """

    def __init__(self, main: int) -> None:
        """Track a step of this thread."""
        self._main = main
        self.current: dict[int, int] = {}  # by thread; empty until something runs on a stream that is not the first
        self._makers: dict[int, int] = {}  # streams of operators, by sequence number; stream 0 is left out
        self._ahead: set[int] = set()  # streams of nodes that the main thread has not waited for
        self._events = _FIRST_OWN

    def noted(self, thread: int, note: Note) -> None:
        if note[1] == "set_stream":
            self.current[thread] = int(note[2][0])

    def runs(self, thread: int, made_by: int, *, is_node: bool) -> Iterator[Note]:
        """Return the notes to add before a call; `made_by` is the sequence number that links an operator to its node."""
        current = self.current.get(thread, 0)
        if not is_node:
            if made_by >= 0 and (current or made_by in self._makers):
                self._makers[made_by] = current  # the last operator with this number counts
            if thread == self._main:
                ahead, self._ahead = self._ahead - {current}, set()
                for stream in sorted(ahead):
                    yield from self._waits(current, stream)
            return
        wanted = self._makers.get(made_by, 0) if made_by >= 0 else current
        if wanted:
            self._ahead.add(wanted)
        if wanted != current:
            self.current[thread] = wanted
            yield from self._waits(wanted, current)
            yield "stream", "set_stream", (str(wanted),)

    def _waits(self, stream: int, other: int) -> Iterator[Note]:
        self._events += 1
        yield "stream", "record_event", (str(self._events), str(other))
        yield "stream", "wait_event", (str(self._events), str(stream))


MARK = "tonnage: "
RECOMPUTE = "recompute"
STRETCH = "traced "
_MAKES_STATES = frozenset(("aten::zeros_like", "aten::zeros", "aten::full", "aten::full_like", "aten::tensor"))
_COPY = "aten::copy_"
_OURS = "tonnage::"  # operators of the virtual GPU
NODE = "autograd::engine::evaluate_function: "
_TYPES = {
    "float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16", "int64": "long int",
    "int32": "int", "int16": "short int", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
    "complex64": "c10::complex<float>", "complex128": "c10::complex<double>", "float8_e4m3fn": "c10::Float8_e4m3fn",
    "float8_e5m2": "c10::Float8_e5m2",
}  # fmt: skip
_SCALARS = {bool: "Scalar", int: "Scalar", float: "Scalar", complex: "Scalar", list: "ScalarList"}
MOST_WORDS = 400
_NOTES = ("stream ", "collective ")
Argument = tuple[tuple[Any, ...], tuple[Any, ...], str, str, str]  # shape, stride, type, words, device
_NOTHING: Argument = ((), (), "", "", "")


@dataclass(slots=True)
class Event:
    """A call as the profiler recorded it, or with `arguments`, as torch's execution trace did.

    `mark` has the rest of the name of our own marks.
    """

    call: Any
    name: str  # cached, because the profiler builds it on each access
    depth: int
    began_ns: int
    thread: int
    mark: str = ""
    arguments: list[Argument] | None = None


class ProfilerResults:
    """The profiler's results."""

    def __init__(self, results: Any, stretch: Callable[[Event], Iterable[Event]]) -> None:
        """Read the profiler's results; `stretch` gives the calls that were traced instead after a mark."""
        self._stretch = stretch
        self._roots = results.experimental_event_tree()
        # Only the flat events have lists of numbers, and they are fast to scan.
        self.flat: dict[int, Any] = {}
        self._marks: list[int] = []
        self._notes: list[tuple[int, str]] = []
        for event in results.events():
            self.flat[event.correlation_id()] = event
            name = event.name()
            if not name.startswith(MARK):
                continue
            if name == MARK + "step":
                self._marks.append(event.start_ns())
            elif name.startswith(_NOTES, len(MARK)):
                self._notes.append((event.start_ns(), name.removeprefix(MARK)))
        self._marks.sort()
        self._notes.sort()

    def notes_before(self, step: int) -> list[str]:
        first_ns, end_ns = self._marks[max(step - 1, 0)], self._marks[step]
        return [words for began_ns, words in self._notes if first_ns <= began_ns < end_ns]

    def events(self, step: int) -> list[Event]:
        """Return the calls and marks of one step by start time. Threads that wait for each other do not overlap."""
        first_ns, end_ns = self._marks[step : step + 2]
        found: list[Event] = []
        todo = [(root, 0) for root in reversed(self._roots)]
        while todo:
            event, depth = todo.pop()
            began_ns = event.start_time_ns
            if began_ns >= end_ns:
                continue
            if began_ns >= first_ns:
                name = event.name
                mark = name.removeprefix(MARK) if name.startswith(MARK) else ""
                found.append(Event(event, name, depth, began_ns, event.start_tid, mark))
            elif depth == 0 and event.end_time_ns < first_ns:
                continue
            depth += 1
            for child in reversed(event.children):
                todo.append((child, depth))
        found.sort(key=lambda event: event.began_ns)
        whole: list[Event] = []
        for event in found:
            whole.append(event)
            if event.mark.startswith(STRETCH):
                whole += self._stretch(event)
        return whole


_Key = tuple[str, tuple[Any, ...], tuple[Any, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]


class DistinctCalls:
    """Distinct calls, numbered in order of appearance."""

    def __init__(self, flat: Mapping[int, Any], notes: NoteReader) -> None:
        self._flat, self._notes = flat, notes
        self._shapeless = {f"aten::{name}" for name in shapeless() - READS_BACK}
        self._numbers: dict[_Key | tuple[str, ...], int] = {}
        self.distinct: list[CapturedCall] = []
        self._tensor = sys.modules["torch"]._C._profiler._TensorMetadata

    def sequence(self, events: Sequence[Event]) -> Iterator[tuple[int, Event]]:
        """Yield the number of each call of the script, without marks and the virtual GPU's own work."""
        within: dict[int, list[tuple[bool, bool]]] = {}  # by thread, for each open call: on the card, left out
        streams = BackwardStreams(events[0].thread)
        for event in events:
            if event.mark:
                if event.mark.startswith(_NOTES) and (note := self._notes.read(event.mark)):
                    streams.noted(event.thread, note)
                    yield self._noted(note), event
                continue
            if event.name.startswith(_OURS):
                continue
            if streams.current:
                made_by = -1 if event.arguments is not None else getattr(event.call.typed[1], "sequence_number", -1)
                for note in streams.runs(event.thread, made_by, is_node=event.name.startswith(NODE)):
                    yield self._noted(note), event
            above = within.setdefault(event.thread, [])
            del above[event.depth :]
            on_card, dropped = above[-1] if above else (False, False)
            if not dropped:
                key = self._key(event)
                is_cuda = "cuda" in key[-1]
                dropped = on_card and not is_cuda and any(key[-1])
                on_card = on_card or (is_cuda and _kind(event.name) == "operator")
            # A call whose callers began before this step has a gap above it.
            above.extend([(on_card, dropped)] * (event.depth + 1 - len(above)))
            if not dropped:
                yield self._number(key), event

    def _noted(self, note: Note) -> int:
        kind, name, values = note
        number = self._numbers.setdefault((name, *values), len(self.distinct))
        if number == len(self.distinct):
            self.distinct.append(CapturedCall(name=name, kind=kind, values=values))
        return number

    def _number(self, key: _Key) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.distinct)
            name, shapes, strides, types, values, devices = key
            call = CapturedCall(
                name=name.removeprefix("aten::").removeprefix(NODE), kind=_kind(name), shapes=shapes, strides=strides,
                types=types, values=values, devices=devices,
            )  # fmt: skip
            self.distinct.append(call)
        return number

    def _key(self, event: Event) -> _Key:
        name = event.name
        if _kind(name) in ("node", "region"):
            return name, (), (), (), (), ()
        if name in self._shapeless:  # the most frequent case
            return name, (), (), (), (), (self._first_device(event),)
        arguments = self._arguments(event) if event.arguments is None else event.arguments
        shapes, strides, types, values, devices = zip(*arguments, strict=True) if arguments else ((),) * 5
        if name == _COPY and {"cpu", "cuda"} == set(devices[:2]) and event.arguments is None:
            at = devices.index("cpu")
            pinned = "pinned" if _is_pinned(event.call.extra_fields.inputs[at].storage_data_ptr) else "cpu"
            devices = (*devices[:at], pinned, *devices[at + 1 :])
        return name, shapes, strides, types, values, devices

    def _first_device(self, event: Event) -> str:
        if event.arguments is not None:
            return next((device for *_, device in event.arguments if device), "")
        given = getattr(event.call.extra_fields, "inputs", ())
        return next((_device(value.device) for value in given if isinstance(value, self._tensor)), "")

    def _arguments(self, event: Event) -> list[Argument]:
        given = getattr(event.call.extra_fields, "inputs", ())
        arguments: list[Argument] = []
        concrete: list[Any] = []
        for at, value in enumerate(given):
            if isinstance(value, self._tensor):
                told = tuple(value.sizes), tuple(value.strides), _type(value.dtype), "", _device(value.device)
            elif isinstance(value, list):
                # An argument that is a list of tensors.
                kinds = {t.dtype for t in value}
                kind = f"{_type(kinds.pop())}[]" if len(kinds) == 1 else "TensorList"
                device = "cuda" if any(t.device.type == "cuda" for t in value) else "cpu" if value else ""
                told = (tuple(tuple(t.sizes) for t in value), tuple(tuple(t.strides) for t in value), kind, "", device)
            else:
                if value is None:
                    if not concrete:
                        flat = self._flat.get(event.call.correlation_id)
                        concrete = flat.concrete_inputs() if flat is not None else []
                        concrete += [None] * (len(given) - len(concrete))
                    value = concrete[at]
                told = (
                    _NOTHING if value is None else ((), (), _SCALARS.get(type(value), ""), str(value)[:MOST_WORDS], "")
                )
            arguments.append(told)
        return arguments


def read_step(profile: ProfilerResults, at: int, *, settings: dict[str, str], **facts: Any) -> CapturedStep:
    """Read what the profiler recorded from this step's mark to the next; `facts` are values that no call shows."""
    own = profile.events(at)
    calls = DistinctCalls(profile.flat, NoteReader(profile.notes_before(at)))
    states = set(_states(own)) if at == 0 else set()
    kept = [(number, event) for number, event in calls.sequence(own) if id(event) not in states]
    threads = {own[0].thread: 0}  # the thread of our mark is the main one
    unknown: dict[str, Any] = dict.fromkeys(("number", "module_calls", "optimizer_parameters"), 0)
    unknown |= {"training": True, "samples": None, "tokens": None}
    return CapturedStep(
        calls=tuple(calls.distinct),
        sequence=tuple(number for number, _ in kept),
        depths=tuple(event.depth for _, event in kept),
        threads=tuple(threads.setdefault(event.thread, len(threads)) for _, event in kept),
        phases=tuple(_phases(own, [event for _, event in kept])),
        settings=settings,
        **unknown | facts,
    )


def _states(events: Iterable[Event]) -> Iterator[int]:
    phase, above = "", -1
    for event in events:
        if event.mark.startswith("phase "):
            phase, above = event.mark.removeprefix("phase "), -1
        elif phase == "optimizer" and not event.mark:
            if above < 0 or event.depth <= above:
                above = event.depth if event.name in _MAKES_STATES else -1
            if above >= 0:
                yield id(event)


def _phases(events: Iterable[Event], kept: list[Event]) -> list[tuple[int, str]]:
    """Return the index of the kept call at which each phase begins."""
    found: list[tuple[int, str]] = []
    place = 0
    recomputing: Event | None = None  # the first recomputed module, until its caller continues

    def begin(phase: str) -> None:
        if found and found[-1][0] == place:
            found.pop()
        found.append((place, phase))

    for event in events:
        is_kept = place < len(kept) and event is kept[place]
        if event.mark.startswith("phase "):
            begin(event.mark.removeprefix("phase "))
        elif event.mark == RECOMPUTE and recomputing is None:
            recomputing = event
            begin(RECOMPUTE)
        elif is_kept and recomputing and event.thread == recomputing.thread and event.depth < recomputing.depth:
            recomputing = None
            begin("backward")
        while place < len(kept) and event is kept[place]:
            place += 1
    return found


def _is_pinned(address: int | None) -> bool:
    """Whether the address is pinned. PyTorch caches pinned memory, so what was pinned when it was copied still is."""
    if not address:
        return False
    there = (ctypes.c_byte * 1).from_address(address)
    return bool(sys.modules["torch"].frombuffer(there, dtype=sys.modules["torch"].uint8).is_pinned())


@cache
def _device(device: Any) -> str:
    return str(device.type)


@cache
def _type(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return _TYPES.get(name, name)


@cache
def _kind(name: str) -> CallKind:
    if name.startswith(NODE):
        return "node"
    if "::" in name and not name.startswith(("autograd::", "torch::autograd::")):
        return "operator"
    return "kernel" if name.startswith("triton_") else "region"
