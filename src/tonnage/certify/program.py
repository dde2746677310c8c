"""The memory events of a whole training, with repeated parts stored once.

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

from array import array
from dataclasses import dataclass, field

TAKE, GIVE, CALL, GIVE_SLOT, PART, EMPTY, OUTSIDE, ALLOWED = range(8)
TEMPLATE_TAKE, TEMPLATE_GIVE, TEMPLATE_GIVE_ARGUMENT, TEMPLATE_EMPTY = range(4)
Owner = tuple[int, int]  # (-1, id) for the script's own blocks, (instance, slot) for a call's


@dataclass
class Template:
    """The events of one call: rows of four numbers, and the line at which each block was requested."""

    number: int
    name: str
    events: "array[int]" = field(default_factory=lambda: array("q"))
    lines: list[int] = field(default_factory=list)  # per slot, an index into Program.lines
    repeats: bool = True  # False: it dropped something that cannot be named, so it must be run each time

    @property
    def slots(self) -> int:
        """Number of blocks it takes."""
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
    lines: list[str] = field(default_factory=list)
    block_lines: "array[int]" = field(default_factory=lambda: array("l"))  # of the script's own blocks, by id
    instances: int = 0
    _line_numbers: dict[str, int] = field(default_factory=dict)

    def line(self, text: str) -> int:
        """Return the number of a line of the script."""
        number = self._line_numbers.get(text)
        if number is None:
            number = self._line_numbers[text] = len(self.lines)
            self.lines.append(text)
        return number

    def take(self, size: int, stream: int, line: str) -> Owner:
        """Record that the script requests a block."""
        identity = len(self.block_lines)
        self.block_lines.append(self.line(line))
        self.operations.extend((TAKE, identity, size, stream))
        return -1, identity

    def give(self, owner: Owner) -> None:
        """Record that a block is dropped."""
        instance, number = owner
        self.operations.extend((GIVE, number) if instance < 0 else (GIVE_SLOT, instance, number))

    def new_template(self, name: str) -> Template:
        """Add an empty template."""
        self.templates.append(Template(len(self.templates), name))
        return self.templates[-1]

    def new_instance(self) -> int:
        """Return the number of the next call."""
        self.instances += 1
        return self.instances - 1

    def call(self, template: Template, instance: int, arguments: list[int]) -> None:
        """Record that a template runs."""
        self.operations.extend((CALL, template.number, instance, len(arguments), *arguments))

    def begin(self, part: ProgramPart) -> None:
        """Start the next part of the training."""
        self.operations.append(PART)
        self.parts.append(part)
