"""The operators of one typical step of a run, in the order in which they began: what a clock needs to say how long it takes.

Most calls of a step are alike, so each distinct one is kept once and the step is a sequence of their numbers. Nothing here knows
who captured the step, or how long anything takes.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

from tonnage.clock.operators import Call
from tonnage.recording.checks import check_values, is_count, is_whole, is_word_list, is_words
from tonnage.untrusted import Unreadable, parse_json

# A kernel is one of Triton's; a node is one that autograd's engine evaluates; a region is a stretch that was given a name.
CallKind = Literal["operator", "kernel", "node", "region"]
_MOST_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall(Call):
    """A distinct call. `devices` holds "cuda", "cpu" or "" for each argument; a list of tensors has a type like "float[]"."""

    kind: CallKind = "operator"
    devices: tuple[str, ...] = ()

    @property
    def on_card(self) -> bool:
        """Whether any of its tensors lies on the card."""
        return "cuda" in self.devices


@dataclass(frozen=True, slots=True)
class Moment:
    """One call at its place in the step: how deep it is nested, in which phase and thread (0: the script's own)."""

    call: CapturedCall
    depth: int
    phase: str
    thread: int
    parent: int | None


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """What one step called.

    `number` is that of the step as marks count it. `sequence`, `depths` and `threads` are of equal length; `phases` says from
    which place on which phase runs. `samples` and `tokens` are those of the step's inputs, None where they are not clear.
    """

    number: int
    training: bool
    calls: tuple[CapturedCall, ...]
    sequence: tuple[int, ...]
    depths: tuple[int, ...]
    threads: tuple[int, ...]
    phases: tuple[tuple[int, str], ...]
    module_calls: int
    optimizer_parameters: int
    samples: int | None
    tokens: int | None
    settings: dict[str, str]

    @cached_property
    def counts(self) -> Counter[CapturedCall]:
        """How often each distinct call was made."""
        return Counter({self.calls[number]: count for number, count in Counter(self.sequence).items()})

    @property
    def operators(self) -> int:
        """All operators, nested ones too."""
        return sum(count for call, count in self.counts.items() if call.kind == "operator")

    @cached_property
    def top_level_operators(self) -> int:
        """Operators that no other operator called."""
        moments = list(self.moments())

        def is_inner(moment: Moment) -> bool:
            above = moment.parent
            while above is not None and moments[above].call.kind != "operator":
                above = moments[above].parent
            return above is not None

        return sum(moment.call.kind == "operator" and not is_inner(moment) for moment in moments)

    @cached_property
    def wrappers(self) -> frozenset[int]:
        """Places of operators that only pass on to one of the same name, as autocast has it: the inner one does the work."""
        moments = list(self.moments())
        return frozenset(
            moment.parent
            for moment in moments
            if moment.parent is not None and moment.call.name == moments[moment.parent].call.name
        )

    @property
    def autograd_nodes(self) -> int:
        """Nodes that autograd's engine evaluated."""
        return sum(count for call, count in self.counts.items() if call.kind == "node")

    def moments(self) -> Iterator[Moment]:
        """Every call in order; `parent` is the place of the call that made it."""
        begins = dict(self.phases)
        phase = ""
        open_calls: dict[int, list[int]] = {}
        for place, (number, depth, thread) in enumerate(zip(self.sequence, self.depths, self.threads, strict=True)):
            phase = begins.get(place, phase)
            above = open_calls.setdefault(thread, [])
            del above[depth:]
            yield Moment(self.calls[number], depth, phase, thread, above[-1] if above else None)
            above.append(place)


# ── as bytes ──


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
        isinstance(entry, list) and all(is_whole(n) or (isinstance(n, list) and all(map(is_whole, n))) for n in entry)
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
