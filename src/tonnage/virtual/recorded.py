"""The record of one virtual card: every block allocated, what it is for, and when it was freed.

The attribution reports to it. Its subclasses provide the blocks: our model of the allocator on a CPU build of torch,
torch's own allocator on a CUDA build.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tonnage.garbage import made_own_objects
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.recording.records import Allocation, FailedRequest, Mark, MarkKind, SegmentAction, SegmentEvent
from tonnage.script.attribution import Attribution
from tonnage.script.lines import ScriptPlace
from tonnage.virtual.going_on import GoingOn

Shape = tuple[int, ...]


class RecordedDevice:
    """The state of one card during a run. Its two subclasses have what is only declared here."""

    overhead_parts: dict[str, int]  # bytes that the process holds outside the allocator, by part
    memory_stats: Callable[[], dict[str, int]]  # the allocator's, by the names of `torch.cuda.memory_stats`
    lift_limit: Callable[[], None]  # the card's memory limit
    synchronize: Callable[[], None]  # the device with the host
    hold: Callable[[dict[str, int]], None]  # counts more bytes outside the allocator (such as a communicator's buffers)
    at_module: Callable[[int], None]  # sets the current module, for autograd nodes created from now on
    # Begins a copy to these tensors on its own stream, and ends it; blocks freed meanwhile are not reused.
    begin_copy: Callable[[Iterable[Any]], Any]
    end_copy: Callable[[Any], None]

    def __init__(self, gpu: Gpu, torch_version: tuple[int, int]) -> None:
        self.gpu: Gpu = gpu
        self.torch_version = torch_version
        self.attribution = Attribution(self)
        self.held_line = ""
        self.allocations: list[Allocation] = []
        self.live: dict[int, Allocation] = {}
        self.segments: list[SegmentEvent] = []
        self.marks: list[Mark] = []
        self.sequence = 0
        self.cards: set[int] = set()  # cards that have blocks
        self.serials: dict[int, int] = {}
        self.ooms: list[FailedRequest] = []
        self.on_progress: Callable[[], None] | None = None
        self.on_request: Callable[[], None] | None = None
        self.going_on: GoingOn | None = None  # set if the run continues past its memory limit

    # Called by subclasses

    def allocated(
        self, address: int, size: int, block_size: int, stream: int, operator: str, module: str, serial: int, shape: Shape | None,
        dtype: str, place: ScriptPlace,
    ) -> Allocation:  # fmt: skip
        """Record a new block; `serial` numbers the outermost operator that requested it."""
        who = self.attribution
        who.at(place)
        self.sequence += 1
        allocation = Allocation(
            len(self.allocations), address, size, block_size, stream, self.sequence, None, who.category, operator, module,
            who.phase, who.step, place.line, place.stack, shape, dtype,
        )  # fmt: skip
        self.allocations.append(allocation)
        made_own_objects(1 if shape is None else 2)  # with its shape
        self.live[address] = allocation
        self.serials[address] = serial
        if not self.sequence & 1023:
            if self.on_progress:
                self.on_progress()
            if who.observer:
                who.observer.goes_on()
        return allocation

    def freed(self, address: int, serial: int) -> Allocation | None:
        """Record that a block was freed; return None if it is older than the record."""
        allocation = self.live.pop(address, None)
        if allocation is None:
            return None
        self.sequence += 1
        allocation.died = self.sequence
        born_in = self.serials.pop(address)
        if born_in == serial and born_in:
            allocation.category = Category.WORKSPACE  # allocated and freed inside one operator
        return allocation

    def failed(self, module: str, **facts: Any) -> None:
        """Record a request that the card could not hold, with these facts of `FailedRequest`."""
        who = self.attribution
        place = who.place()
        self.ooms.append(
            FailedRequest(line=place.line, stack=place.stack, phase=who.phase, step=who.step, module=module, **facts)
        )

    def segment_changed(self, action: SegmentAction, address: int, size: int, stream: int) -> None:
        """Record that the allocator took memory from the card or gave some back."""
        self.sequence += 1
        self.segments.append(SegmentEvent(self.sequence, action, address, size, stream))
        if self.attribution.host:
            self.attribution.host.card_used()

    def held(self) -> tuple[int, int]:
        """Return how many blocks were made so far, and the bytes that are held now."""
        self.drain()
        return len(self.allocations), self.memory_stats()["allocated_bytes.all.current"]

    def drain(self) -> None:
        """Process all pending events; only a device that keeps a log has some."""

    # Called by the attribution

    def mark(self, kind: MarkKind, name: str = "") -> None:
        """Record that a phase or step begins with the next event, or that the cache was emptied."""
        self.marks.append(Mark(self.sequence + 1, kind, name))
        made_own_objects(1)
        if self.going_on is not None:
            self.going_on.check(kind)

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None:
        """Set the category of these blocks, if they are live."""
        for address in addresses:
            allocation = self.live.get(address)
            if allocation and (only is None or allocation.category is only):
                allocation.category = category
