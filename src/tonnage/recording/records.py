"""The ordered memory events of one run: plain records, whoever made them.

Nothing here knows where a recording came from, how it is stored or how it is shown.

Sequence numbers order everything. Each allocation, free and segment event takes the next number; a mark takes the
number of the event that follows it, so that a phase begins with the first event after its mark.
"""

from dataclasses import dataclass, field
from typing import Literal

from tonnage.ledger import Category

Outcome = Literal["ok", "oom", "error"]
Source = Literal["virtual", "cuda", "snapshot"]
MarkKind = Literal["phase", "step", "empty_cache", "begin", "beyond"]
SegmentAction = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
NoteKind = Literal["not_modelled", "assumption"]


@dataclass(slots=True)
class Allocation:
    """One block of the caching allocator, from `born` until `died` (None: alive at the end)."""

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
    """From `sequence` on, this phase or step runs; or, at it, the cache was emptied. Steps are named "1", "2", ...

    "begin": the recording began here, in mid-run; what stands before it is what there was already. "beyond": the request that
    follows did not fit, and was granted all the same; the name says how what follows ended (`recording.beyond`).
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
    """A value that was read from the virtual GPU, and what stood in for it."""

    what: str
    line: str
    count: int
    value: str


@dataclass(frozen=True, slots=True)
class Note:
    """What is not modelled, or what was assumed about data."""

    kind: NoteKind
    operator: str
    count: int
    text: str


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The request that failed, if one ended the run: by the device's count at that moment."""

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
    """What a run was: the card, the versions, the script and how it ended."""

    gpu: str
    gpu_name: str
    capacity_bytes: int
    torch_modelled: str
    torch_installed: str
    outcome: Outcome = "ok"
    source: Source = "virtual"
    settings: str = ""
    script: str = ""  # the absolute path of its text
    command: tuple[str, ...] = ()  # what named it after `tonnage run`, without its own arguments
    folder: str = ""  # the working directory
    arguments: tuple[str, ...] = ()
    exit_status: int = 0
    error: str = ""
    wall_seconds: float = 0.0
    overhead_bytes: int = 0
    overhead_parts: dict[str, int] = field(default_factory=dict)
    pinned_host_bytes: int = 0
    ooms_caught: int = 0
    training: dict[str, str] = field(default_factory=dict)  # who drives the steps, and how: `script.training` says what

    @property
    def program(self) -> str:
        """What ran, in a few words: the script's path as seen from the folder that it ran in, or a launcher's command."""
        shown = " ".join(self.command) or self.script
        return shown.removeprefix(self.folder.rstrip("/") + "/") if self.folder else shown
