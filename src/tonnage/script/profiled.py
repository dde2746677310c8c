"""What torch's profiler recorded, as calls in the order in which they began.

The profiler's tree has tensors with shapes, strides, types and devices, also those in lists; its events beside it have numbers,
flags and lists of numbers. A virtual GPU computes some small values on the host, within the operator that asks for them: such
calls are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tonnage.recording.captured import CallKind, CapturedCall

MARK = "tonnage: "
_NODE = "autograd::engine::evaluate_function: "
_TYPES = {
    "float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16", "int64": "long int",
    "int32": "int", "int16": "short int", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
    "complex64": "c10::complex<float>", "complex128": "c10::complex<double>", "float8_e4m3fn": "c10::Float8_e4m3fn",
    "float8_e5m2": "c10::Float8_e5m2",
}  # fmt: skip
_MOST_WORDS = 400


@dataclass(slots=True)
class Event:
    """A call as the profiler has it; a mark of ours has the rest of its name in `mark`."""

    call: Any
    depth: int
    began_ns: int
    thread: int
    mark: str = ""


def events_of(results: Any) -> list[Event]:
    """All calls and marks by the time at which they began. Threads that wait for each other do not overlap."""
    found: list[Event] = []
    for root in results.experimental_event_tree():
        _flatten(root, 0, found)
    found.sort(key=lambda event: event.began_ns)
    return found


def _flatten(root: Any, depth: int, found: list[Event]) -> None:
    todo = [(root, depth)]
    while todo:
        event, depth = todo.pop()
        name = event.name
        mark = name.removeprefix(MARK) if name.startswith(MARK) else ""
        found.append(Event(event, depth, event.start_time_ns, event.start_tid, mark))
        todo.extend((child, depth + 1) for child in reversed(event.children))


def numbers_of(results: Any) -> dict[int, Any]:
    """The profiler's flat events, which alone hold lists of numbers, by what the tree's events know them by."""
    return {event.correlation_id(): event for event in results.events()}


class Calls:
    """Distinct calls, numbered in order of appearance."""

    def __init__(self, flat: Mapping[int, Any]) -> None:
        self._flat = flat
        self._numbers: dict[CapturedCall, int] = {}
        self._of_tensor: dict[Any, str] = {}

    @property
    def distinct(self) -> tuple[CapturedCall, ...]:
        """Each once."""
        return tuple(self._numbers)

    def sequence(self, events: Sequence[Event]) -> Iterator[tuple[int, int, Event]]:
        """The number and depth of each call that the script made, marks and the virtual GPU's own work left out."""
        within: dict[int, list[tuple[bool, bool]]] = {}  # by thread, of each open call: on the card, left out
        for event in events:
            if event.mark:
                continue
            call = self._call(event.call)
            above = within.setdefault(event.thread, [])
            del above[event.depth :]
            on_card, dropped = above[-1] if above else (False, False)
            is_aside = on_card and any(call.devices) and not call.on_card
            on_card |= call.kind == "operator" and call.on_card
            # A call whose callers are not in this step begins at the top.
            above.extend([(on_card, dropped or is_aside)] * (event.depth + 1 - len(above)))
            if not (dropped or is_aside):
                yield self._numbers.setdefault(call, len(self._numbers)), event.depth, event

    def _call(self, event: Any) -> CapturedCall:
        name, given = event.name, getattr(event.typed[1], "inputs", ())
        flat = self._flat.get(event.correlation_id) if given else None
        types = list(flat.dtypes()) if flat else [""] * len(given)
        concrete = flat.concrete_inputs() if flat else []
        shapes, strides, devices = [], [], []
        for at, value in enumerate(given):
            shape, stride, device = (), (), ""
            if hasattr(value, "sizes"):
                shape, stride, device = tuple(value.sizes), tuple(value.strides), value.device.type
            elif isinstance(value, list) and value and all(hasattr(each, "sizes") for each in value):
                shape, stride = tuple(tuple(t.sizes) for t in value), tuple(tuple(t.strides) for t in value)
                names = {str(each.dtype).removeprefix("torch.") for each in value}
                if at < len(types) and len(names) == 1:
                    types[at] = f"{_type(names.pop())}[]"
                device = "cuda" if any(each.device.type == "cuda" for each in value) else value[0].device.type
            shapes.append(shape)
            strides.append(stride)
            devices.append(device)
        return CapturedCall(
            name=name.removeprefix("aten::").removeprefix(_NODE),
            kind=_kind(name, bool(given)),
            shapes=tuple(shapes),
            strides=tuple(strides),
            devices=tuple(devices),
            types=tuple(types),
            values=tuple(map(_words, concrete)),
        )


def _words(value: Any) -> str:
    """An argument as text."""
    return "" if value is None else value if isinstance(value, str) else str(value)[:_MOST_WORDS]


def _type(name: str) -> str:
    return _TYPES.get(name, name)


def _kind(name: str, has_arguments: bool) -> CallKind:
    if name.startswith(_NODE):
        return "node"
    if "::" in name and not name.startswith("autograd::"):
        return "operator"
    return "kernel" if has_arguments and name.startswith("triton_") else "region"
