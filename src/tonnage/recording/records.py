"""The plain records of a run's events, numbered in sequence; a mark has the number of the event that follows it."""

from dataclasses import dataclass, field
from typing import Literal

from tonnage.ledger import Category

Outcome = Literal["ok", "oom", "error"]
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
