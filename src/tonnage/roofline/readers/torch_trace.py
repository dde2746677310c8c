"""A trace of the PyTorch profiler: kernels with their times, and the operators with shapes that launched them.

An item is one operator with one set of shapes, and takes as long as its kernels; kernels outside any operator are items
of their own, as are copies between host and GPU. Shapes exist if the profiler had `record_shapes=True`. Kernels of
`torch.compile` carry the bytes that the compiler counted. Nothing is guessed.
"""

import reprlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from tonnage.clock.operators import OperatorCall, Work, work_of
from tonnage.errors import BadProfile
from tonnage.roofline.items import Activity, Item, RooflineProfile, gathered, short_kernel_name, timeline_of

_ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_READ = (*_ON_CARD, *_LAUNCHES, "cpu_op")
_US = 1e-6
_LARGEST = 1e18
_SHORT_TYPES = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64", "long int": "int64"}
# Shapes shown per call.
_SHAPES = 3
# No operator or tensor has more: anything beyond is not a call.
_MOST_ARGUMENTS = 10_000
_MOST_EXTENTS = 64
_HINT = "Make one with torch.profiler.profile(record_shapes=True) and export_chrome_trace(FILE)."

Event = dict[str, Any]


def read_torch_trace(trace: object, source: str) -> RooflineProfile:
    """Return every operator that ran on a GPU."""
    found = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(trace, dict) or not isinstance(found, list):
        raise BadProfile(f"{source} is no trace of the PyTorch profiler.", hint=_HINT)
    events = [event for event in found if _is_timed(event)]
    on_card = [event for event in events if event.get("cat") in _ON_CARD]
    if not on_card:
        raise BadProfile(f"{source} holds no kernel of a GPU.", hint="Profile with ProfilerActivity.CUDA.")
    operators = {_id(event): event for event in events if event.get("cat") == "cpu_op" and _id(event) is not None}
    items = gathered(_items(on_card, operators))
    notes = [] if any(item.work.moved_bytes for item in items) else ["The trace holds no shapes: record_shapes=True."]
    launched = {
        _id(event, "correlation"): (event["ts"] + event["dur"]) * _US
        for event in events
        if event.get("cat") in _LAUNCHES
    }
    cards: dict[int | str | None, list[Activity]] = defaultdict(list)
    for event in on_card:
        start_s, length_s = event["ts"] * _US, event["dur"] * _US
        known = launched.get(_id(event, "correlation"))
        cards[_id(event, "device")].append(Activity(start_s, start_s + length_s, known))
    first = next(iter(_list(trace.get("deviceProperties"))), None)
    return RooflineProfile(
        kind="torch-profiler",
        source=source,
        gpu=str(first.get("name", "")) if isinstance(first, dict) else "",
        items=items,
        timeline=timeline_of(max(cards.values(), key=lambda card: sum(one.end_s - one.start_s for one in card))),
        notes=tuple(notes),
    )


def is_torch_trace(trace: object) -> bool:
    """Say whether a JSON value looks like a trace."""
    return isinstance(trace, dict) and "traceEvents" in trace


def _is_timed(event: object) -> bool:
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and event.get("cat") in _READ
        and isinstance(event.get("args", {}), dict)
        and isinstance(event.get("name"), str)
        and all(_is_number(event.get(key)) for key in ("ts", "dur"))
        and event["dur"] >= 0
    )


def _is_number(value: object) -> bool:
    """Say whether it is a finite, reasonably small number: JSON may hold NaN and huge integers."""
    return isinstance(value, int | float) and abs(value) < _LARGEST


def _amount(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and _is_number(value) and value >= 0 else None


def _arguments(event: Event) -> dict[str, Any]:
    arguments: dict[str, Any] = event.get("args", {})
    return arguments


def _id(event: Event, key: str = "External id") -> int | str | None:
    found = _arguments(event).get(key)
    return found if isinstance(found, int | str) else None


def _items(on_card: Iterable[Event], operators: dict[Any, Event]) -> Iterator[Item]:
    calls: dict[Any, list[Event]] = defaultdict(list)
    for number, event in enumerate(on_card):
        if event["cat"] == "gpu_memcpy":
            yield _copy(event)
        else:
            known = _id(event) if _id(event) in operators else ("alone", number)
            calls[known].append(event)
    for known, kernels in calls.items():
        yield _operator(operators[known], kernels) if known in operators else _kernel(kernels)


def _copy(event: Event) -> Item:
    moved = _amount(_arguments(event).get("bytes"))
    direction = event["name"].removeprefix("Memcpy ")
    if "HtoD" in direction or "DtoH" in direction:
        return Item(name="copy", detail=direction, seconds=event["dur"] * _US, work=Work(None, moved), link=direction)
    twice = None if moved is None else 2 * moved
    return Item(name="copy", detail=direction, seconds=event["dur"] * _US, work=Work(0.0, twice))


def _kernel(kernels: list[Event]) -> Item:
    name, unknown = short_kernel_name(kernels[0]["name"]), "no operator launched it"
    return Item(name=name, **_measured(kernels), work=Work(None, None), unknown=unknown)


def _operator(operator: Event, kernels: list[Event]) -> Item:
    call = _call(operator, kernels)
    # What torch.compile recorded for its own kernels.
    size, operations = (_amount(_arguments(operator).get(key)) for key in ("kernel_num_gb", "kernel_flop"))
    work = work_of(call) if size is None else Work(operations or 0.0, size * 1e9)
    known = "" if work else "its shapes are not in the trace" if not _has_shapes(call) else "no rule counts its bytes"
    # Dtypes and shapes of its first tensors, like "bf16 8192×1024, 1024×50304".
    words: list[str] = []
    said = ""
    for shape, kind in zip(call.shapes, call.types, strict=False):
        if not shape or not all(isinstance(extent, int) for extent in shape):
            continue
        short = _SHORT_TYPES.get(kind, kind)
        words.append(("" if short == said else f"{short} ") + "×".join(map(str, shape)))
        said = short
    return Item(
        name=call.name,
        detail=", ".join(words[:_SHAPES]),
        **_measured(kernels),
        work=work or Work(None, None),
        unknown=known,
        made=((call, 1),) if _has_shapes(call) else (),
    )


def _has_shapes(call: OperatorCall) -> bool:
    return any(shape for shape in call.shapes)


def _measured(kernels: list[Event]) -> dict[str, Any]:
    longest = max(kernels, key=lambda kernel: float(kernel["dur"]))
    grid = _arguments(longest).get("grid")
    return {
        "seconds": sum(kernel["dur"] for kernel in kernels) * _US,
        "launches": len(kernels),
        "blocks": prod(grid) if isinstance(grid, list) and _is_shape(grid) else None,
        "kernels": tuple(dict.fromkeys(kernel["name"] for kernel in kernels if kernel["cat"] == "kernel")),
    }


def _call(operator: Event, kernels: list[Event]) -> OperatorCall:
    arguments = _arguments(operator)
    return OperatorCall(
        name=operator["name"].removeprefix("aten::"),
        shapes=tuple(map(_extents, _list(arguments.get("Input Dims")))),
        strides=tuple(map(_extents, _list(arguments.get("Input Strides")))),
        types=tuple(map(_words, _list(arguments.get("Input type")))),
        values=tuple(map(_words, _list(arguments.get("Concrete Inputs")))),
        kernels=tuple(kernel["name"] for kernel in kernels),
    )


def _list(value: object) -> list[object]:
    return value[:_MOST_ARGUMENTS] if isinstance(value, list) else []


def _extents(value: object) -> tuple[Any, ...]:
    """Return a tensor's shape or strides, or those of a list of tensors; empty for anything else."""
    entries = _list(value)
    if entries and all(isinstance(entry, list) for entry in entries):
        return tuple(tuple(entry) for entry in entries if isinstance(entry, list) and _is_shape(entry))
    return tuple(entries) if _is_shape(entries) else ()


def _is_shape(value: list[Any]) -> bool:
    return len(value) <= _MOST_EXTENTS and all(type(extent) is int and 0 <= extent < 2**48 for extent in value)


def _words(value: object) -> str:
    """Return an argument as text; a list is formatted as the profiler does."""
    return value if isinstance(value, str) else "" if value is None else reprlib.repr(value)
