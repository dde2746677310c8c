"""The memory events of a whole training, with repeated parts stored once, and the calls that can be replayed.

A program is a sequence of numbers: an operation and its operands. The events of a model call, a backward or an optimizer
step are a template, which the program refers to each time. A block belongs to the script (an id) or to one call of a template
(instance and slot).

| operation | operands                                 | means                                                     |
|-----------|------------------------------------------|-----------------------------------------------------------|
| TAKE      | id, bytes, stream                        | the script allocates a block                              |
| GIVE      | id                                       | the script frees it                                       |
| CALL      | template, instance, count, instances ... | a template runs, given the calls whose blocks it may drop |
| GIVE_SLOT | instance, slot                           | a block that a call left is freed                         |
| PART      |                                          | the next part of the training begins                      |
| EMPTY     |                                          | the cache is emptied                                      |
| OUTSIDE   | bytes                                    | process memory outside the allocator                      |
| ALLOWED   | bytes or -1                              | `set_per_process_memory_fraction`                         |

Events of a template are rows of four numbers: (0, slot, bytes, stream) allocates, (1, slot) frees, (2, argument, slot) frees
a block of an earlier call, (3) empties the cache.
"""

import copy
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from sys import intern
from typing import Any

Owner = tuple[int, int]  # (-1, id) for the script's own blocks, (instance, slot) for a call's
Key = tuple[Any, ...]
_DEPTH = 8
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class Op:
    """The operations of a program."""

    TAKE, GIVE, CALL, GIVE_SLOT, PART, EMPTY, OUTSIDE, ALLOWED = range(8)


class TemplateOp:
    """The events of a template."""

    TAKE, GIVE, GIVE_ARGUMENT, EMPTY = range(4)


@dataclass
class Template:
    """The events of one call: rows of four numbers, and the line at which each block was requested."""

    number: int
    name: str
    events: "array[int]" = field(default_factory=lambda: array("q"))
    lines: list[str] = field(default_factory=list)  # per slot
    repeats: bool = True  # False: it dropped something that cannot be named, so it must be run each time

    @property
    def slots(self) -> int:
        return len(self.lines)


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """A stretch of the training: a step's forward and what follows, an evaluation batch, or what is between."""

    kind: str  # "setup", "step", "evaluation" or "between"
    step: int
    micro_batch: int = 1
    shape: tuple[int, ...] = ()
    replayed: bool = False


@dataclass
class RecordedProgram:
    """The whole program, as it is recorded."""

    operations: "array[int]" = field(default_factory=lambda: array("q"))
    templates: list[Template] = field(default_factory=list)
    parts: list[ProgramPart] = field(default_factory=lambda: [ProgramPart("setup", 0)])
    block_lines: list[str] = field(default_factory=list)  # of the script's own blocks, by id
    instances: int = 0

    def take(self, size: int, stream: int, line: str) -> Owner:
        """Record that the script requests a block."""
        identity = len(self.block_lines)
        self.block_lines.append(intern(line))
        self.operations.extend((Op.TAKE, identity, size, stream))
        return -1, identity

    def give(self, owner: Owner) -> None:
        """Record that a block is dropped."""
        instance, number = owner
        self.operations.extend((Op.GIVE, number) if instance < 0 else (Op.GIVE_SLOT, instance, number))

    def new_template(self, name: str) -> Template:
        self.templates.append(Template(len(self.templates), name))
        return self.templates[-1]

    def new_instance(self) -> int:
        """Return the number of the next call."""
        self.instances += 1
        return self.instances - 1

    def call(self, template: Template, instance: int, arguments: list[int]) -> None:
        self.operations.extend((Op.CALL, template.number, instance, len(arguments), *arguments))

    def begin(self, part: ProgramPart) -> None:
        self.operations.append(Op.PART)
        self.parts.append(part)


# Calls to replay ------------------------------------------------------------------------------------------------------


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
        self.build = self._read(value, _DEPTH)  # makes the same structure with other tensors
        self.layouts = [layout_of(tensor) for tensor in self.tensors]
        self.tensors = []  # they belong to the script

    def _number(self, tensor: Any) -> int:
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
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
            of_all = kind if kind in (list, tuple) else kind._make
            return lambda tensors: of_all(part(tensors) for part in parts)
        if isinstance(value, Mapping):
            fields = {name: self._read(one, depth - 1) for name, one in value.items()}
            if not is_dataclass(value):
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
        held = value if isinstance(value, (Mapping, list, tuple, set)) else getattr(value, "__dict__", {})
        for part in list(held.values() if isinstance(held, Mapping) else held):
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

    def dropping(self, program: RecordedProgram) -> Template:
        """Return the template that drops everything the call left: a graph without a backward, or cleared gradients."""
        if self.drop is None:
            self.drop = program.new_template(f"drop {self.template.name}")
            for slot in self.left:
                self.drop.events.extend((TemplateOp.GIVE_ARGUMENT, 0, slot, 0))
        return self.drop


@dataclass
class PendingBackward:
    """A forward whose backward has not come yet."""

    call: RecordedCall | None
    instance: int
    is_real: bool
    done: bool = False
