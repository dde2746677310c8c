"""A captured step as bytes in a recording's file: compressed JSON, checked when it is read."""

import json
import zlib
from dataclasses import asdict, fields
from typing import Any, get_args

from tonnage.clock.captured import CallKind, CapturedCall, CapturedStep
from tonnage.recording.checks import check_values, is_count, is_word_list, is_words
from tonnage.untrusted import Unreadable, parse_json

_MOST_BYTES = 2**28


def packed(step: CapturedStep) -> bytes:
    """A step as it is kept in a file."""
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    values["calls"] = [asdict(call) for call in step.calls]
    return zlib.compress(json.dumps(values, separators=(",", ":")).encode())


def unpacked(data: bytes) -> CapturedStep:
    """The step that was packed so; `ValueError` of anything else."""
    inflater = zlib.decompressobj()
    try:
        values = parse_json(inflater.decompress(data, _MOST_BYTES))
    except (zlib.error, Unreadable) as error:
        raise ValueError(f"its step cannot be read: {error}") from None
    check_values(values, _KINDS, "step")
    calls = tuple(map(_call, values["calls"]))
    length = len(values["sequence"])
    if not length == len(values["depths"]) == len(values["threads"]) or not all(
        n < len(calls) for n in values["sequence"]
    ):
        raise ValueError("its step names calls that there are not")
    phases = tuple((place, name) for place, name in values["phases"])
    return CapturedStep(
        **values | {name: tuple(values[name]) for name in _NUMBERS} | {"calls": calls, "phases": phases}
    )


def _call(values: Any) -> CapturedCall:
    check_values(values, _CALL_KINDS, "call")
    return CapturedCall(**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _is_extents(value: Any) -> bool:
    """Numbers, in lists no deeper than a list of tensors for each argument."""
    return isinstance(value, list) and all(
        isinstance(entry, list) and all(is_count(n) or (isinstance(n, list) and all(map(is_count, n))) for n in entry)
        for entry in value
    )


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_phases(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and is_count(pair[0]) and is_words(pair[1]) for pair in value
    )


_NUMBERS = ("sequence", "depths", "threads")
_KINDS = {
    **dict.fromkeys(_NUMBERS, _is_numbers),
    **dict.fromkeys(("number", "module_calls", "optimizer_parameters"), is_count),
    **dict.fromkeys(("samples", "tokens"), lambda value: value is None or is_count(value)),
    "training": lambda value: isinstance(value, bool),
    "calls": lambda value: isinstance(value, list),
    "phases": _is_phases,
    "settings": lambda value: isinstance(value, dict) and all(map(is_words, value.values())),
}
_CALL_KINDS = {
    "name": is_words,
    "kind": lambda value: value in get_args(CallKind),
    **dict.fromkeys(("shapes", "strides"), _is_extents),
    **dict.fromkeys(("types", "values", "kernels", "devices"), is_word_list),
}
