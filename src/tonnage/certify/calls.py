"""Recorded calls for replay: their events, and their results, rebuilt with new tensors."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.certify.program import TEMPLATE_GIVE_ARGUMENT, RecordedProgram, Template

Key = tuple[Any, ...]
_DEPTH = 8
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class CannotRepeat(Exception):
    """A call's result cannot be rebuilt."""


class Unfaithful(Exception):
    """Replay cannot continue as the script does: everything must be run."""


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a result: its block and layout, or the argument or persistent tensor that it is."""

    slot: int  # of the call; -1: it is `kept`
    block_bytes: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: Any = None
    differentiable: bool = False
    is_whole: bool = False  # the tensor is all of its block, contiguous
    values: Any = None  # a few known numbers, which the script may read
    argument: int = -1  # index, if the tensor is an argument of the call
    kept: Any = None


class ResultTree:
    """The structure of a result, and its tensors' layouts."""

    def __init__(self, value: Any, layout_of: Callable[[Any], TensorLayout], tensor_type: type) -> None:
        self._tensor_type = tensor_type
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._build = self._read(value, _DEPTH)
        self.layouts = [layout_of(tensor) for tensor in self.tensors]
        self.tensors = []  # they belong to the script

    def build(self, tensors: list[Any]) -> Any:
        """Return the same structure with other tensors."""
        return self._build(tensors)

    def _number(self, tensor: Any) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return number

    def _read(self, value: Any, depth: int) -> Callable[[list[Any]], Any]:
        if isinstance(value, self._tensor_type):
            number = self._number(value)
            return lambda tensors: tensors[number]
        if isinstance(value, (*_PLAIN, type)) or callable(value):
            return lambda tensors: value
        if not depth:
            raise CannotRepeat("its result is nested too deeply")
        kind = type(value)
        if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            parts = [self._read(one, depth - 1) for one in value]
            if kind in (list, tuple):
                return lambda tensors: kind(part(tensors) for part in parts)
            return lambda tensors: kind(*(part(tensors) for part in parts))
        if isinstance(value, Mapping):
            fields = {name: self._read(one, depth - 1) for name, one in value.items()}
            if kind is dict or not dataclasses.is_dataclass(value):
                return lambda tensors: kind({name: part(tensors) for name, part in fields.items()})
            return lambda tensors: kind(**{name: part(tensors) for name, part in fields.items()})
        # An object of any class: a copy with placeholders for tensors.
        found: list[Any] = []
        tensors_within(value, self._tensor_type, found, _DEPTH)
        if not found:
            return lambda tensors: value
        slotted = any(getattr(base, "__slots__", ()) for base in kind.__mro__)
        own_reduce = getattr(kind, "__reduce__", None) is not object.__reduce__
        if not own_reduce and not hasattr(kind, "__deepcopy__") and not slotted:
            fields = {name: self._read(one, depth - 1) for name, one in vars(value).items()}

            def build(tensors: list[Any]) -> Any:
                new = object.__new__(kind)
                new.__dict__.update({name: part(tensors) for name, part in fields.items()})
                return new

            return build
        places = {self._number(tensor): object() for tensor in found}
        holes = {id(tensor): place for tensor, place in zip(found, places.values(), strict=True)}
        try:
            empty = copy.deepcopy(value, holes)
        except Exception as error:
            raise CannotRepeat(f"a {kind.__name__} in its result cannot be copied") from error
        return lambda tensors: copy.deepcopy(empty, {id(place): tensors[number] for number, place in places.items()})


def tensors_within(value: Any, tensor_type: type, found: list[Any], depth: int) -> None:
    """Append the tensors that an object holds, each once."""
    if isinstance(value, tensor_type):
        if all(value is not one for one in found):
            found.append(value)
    elif depth and not isinstance(value, _PLAIN):
        if isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, (list, tuple, set)):
            parts = list(value)
        else:
            parts = list(getattr(value, "__dict__", {}).values())
        for part in parts:
            tensors_within(part, tensor_type, found, depth - 1)


@dataclass
class RecordedCall:
    """A call that was run and can be replayed."""

    template: Template
    output: ResultTree | None = None
    loose_at_once: list[int] = field(default_factory=list)  # slots dropped right after it, by no other call
    loose_before_backward: list[int] = field(default_factory=list)  # dropped before backward, such as autocast's cache
    loose: list[int] = field(default_factory=list)  # slots dropped later
    # Parameters (weak references) and their gradients' slots.
    gradients: list[tuple[Any, int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # slots that nothing outside holds after it
    drop: Template | None = None

    @property
    def unclaimed(self) -> list[int]:
        """Slots that neither its result nor gradients hold."""
        known = {layout.slot for layout in self.output.layouts} if self.output else set()
        known |= {slot for _, slot in self.gradients}
        return [slot for slot in range(self.template.slots) if slot not in known]

    def dropping(self, program: RecordedProgram) -> Template:
        """Return the template that drops everything the call left: a graph without a backward, or cleared gradients."""
        if self.drop is None:
            self.drop = program.new_template(f"drop {self.template.name}")
            for slot in self.left:
                self.drop.events.extend((TEMPLATE_GIVE_ARGUMENT, 0, slot, 0))
        return self.drop


@dataclass
class PendingBackward:
    """A forward whose backward has not come yet."""

    call: RecordedCall | None
    instance: int
    is_real: bool
    done: bool = False
