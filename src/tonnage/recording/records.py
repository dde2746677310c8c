"""The plain records of a run's events, numbered in sequence; a mark has the number of the event that follows it."""

from dataclasses import dataclass, field
from typing import Literal

from tonnage.ledger import Category

# "depends": it ended by a value that a virtual GPU does not have.
Outcome = Literal["ok", "oom", "error", "depends"]
DEPENDS_STATUS = 3  # the exit status of such a run
Ending = Literal["assert", "raise", "exit", "error", "loop"]
Source = Literal["virtual", "cuda", "snapshot"]
MarkKind = Literal["phase", "step", "empty_cache", "begin", "beyond"]
SegmentAction = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
NoteKind = Literal["not_modelled", "assumption"]
# What a block is for by the phase in which it is made, unless more is known.
BY_PHASE = {
    "setup": Category.OTHER,
    "forward": Category.ACTIVATIONS,
    "evaluation": Category.ACTIVATIONS,
    "generation": Category.ACTIVATIONS,
    "backward": Category.ACTIVATIONS,
    "optimizer": Category.WORKSPACE,
}


@dataclass(slots=True)
class Allocation:
    """One block of the caching allocator, from `born` until `died` (None: live at the end)."""

    index: int
    address: int
    requested_bytes: int
    block_bytes: int
    stream: int
    born: int
    died: int | None = None
    category: Category = Category.OTHER
    operator: str = ""
    module: str = ""
    phase: str = ""
    step: int = 0
    line: str = ""
    stack: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A phase or step that starts at `sequence`, or an emptied cache. Steps are named "1", "2", ...

    "begin": the recording began here, mid-run; earlier events describe what existed already. "beyond": the next
    request did not fit but was granted; the name says how the run ended then (`recording.beyond`).
    """

    sequence: int
    kind: MarkKind
    name: str = ""


@dataclass(frozen=True, slots=True)
class SegmentEvent:
    """Memory that the allocator took from the device or gave back."""

    sequence: int
    action: SegmentAction
    address: int
    size_bytes: int
    stream: int


@dataclass(frozen=True, slots=True)
class StandIn:
    """A value that was read from the virtual GPU, and its placeholder."""

    what: str
    line: str
    count: int
    value: str
    decides: str = ""  # the test that it decided, such as "if at train.py:88", if it can be told


@dataclass(frozen=True, slots=True)
class Dependence:
    """What ended a run because of a value that a virtual GPU does not have."""

    how: Ending
    line: str  # of the assertion, raise, exit, call or loop
    error: str
    read_line: str  # the script's line that read the value
    what: str  # what was read, such as "scalar bool"
    count: int  # how often it was read there
    value: str  # the placeholder that the script got

    @property
    def sentence(self) -> str:
        """The line, the value, and what the script took it for."""
        ends = {
            "assert": f"the assertion at {self.line} fails",
            "raise": f"{self.line} raises an error",
            "exit": f"{self.line} exits",
            "error": f"{self.line} fails",
            "loop": f"the loop at {self.line} does not end",
        }
        took = f"a {self.what} read at {self.read_line or self.line}, taken as {self.value}"
        return f"depends on values that a prediction does not have: {ends[self.how]} because of {took}"

    @property
    def assumption(self) -> str:
        """What `--assume` takes to continue with another value."""
        if self.value in ("True", "False"):
            return f"{self.read_line}={'false' if self.value == 'True' else 'true'}"
        return f"{self.read_line}=0"

    @property
    def advice(self) -> str:
        """What to do, with the exact text to write."""
        name, _, value = self.assumption.rpartition("=")
        keyword = f"flag={value.title()}" if value in ("true", "false") else f"number={value}"
        if not name:
            return f"Name a value that lets it continue, around the code that reads it: with tonnage.assume({keyword}):"
        return f"Name a value that lets it continue: --assume {self.assumption}, or with tonnage.assume({keyword}):"


@dataclass(frozen=True, slots=True)
class Note:
    """Something that is not modelled, or an assumption about data."""

    kind: NoteKind
    operator: str
    count: int
    text: str


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """The failed request that ended a run, with the device's figures at that moment."""

    line: str
    requested_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    operator: str = ""
    module: str = ""
    phase: str = ""
    step: int = 0
    message: str = ""
    stack: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""


@dataclass(slots=True, kw_only=True)
class Header:
    """The metadata of a run: the card, the versions, the script and how it ended."""

    gpu: str
    gpu_name: str
    capacity_bytes: int
    torch_modelled: str
    torch_installed: str
    outcome: Outcome = "ok"
    source: Source = "virtual"
    settings: str = ""
    script: str = ""  # the script's absolute path
    command: tuple[str, ...] = ()  # what named the script after `tonnage run`, without its own arguments
    folder: str = ""  # the working directory
    arguments: tuple[str, ...] = ()
    exit_status: int = 0
    error: str = ""
    wall_seconds: float = 0.0
    overhead_bytes: int = 0
    overhead_parts: dict[str, int] = field(default_factory=dict)
    pinned_host_bytes: int = 0
    ooms_caught: int = 0
    # The training framework and its settings, see `script.training`.
    training: dict[str, str] = field(default_factory=dict)

    @property
    def program(self) -> str:
        """The script's path relative to the working directory, or a launcher's command."""
        shown = " ".join(self.command) or self.script
        return shown.removeprefix(self.folder.rstrip("/") + "/") if self.folder else shown
