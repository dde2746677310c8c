"""The record of one virtual card: every block that was handed out, what it is for, and when it went.

It is the sink of the attribution. Where blocks come from is the business of its subclasses: our model of the allocator on a
CPU build of torch, torch's own allocator on a CUDA build.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.recording.records import Allocation, Mark, MarkKind, SegmentAction, SegmentEvent
from tonnage.recording.records import OutOfMemory as OutOfMemoryRecord
from tonnage.script.attribution import Attribution
from tonnage.script.lines import Place
from tonnage.virtual.going_on import GoingOn

Shape = tuple[int, ...]


class RecordedDevice(ABC):
    """The state of one card during a run."""

    def __init__(self, gpu: Gpu, torch_version: tuple[int, int]) -> None:
        self.gpu = gpu
        self.torch_version = torch_version
        self.attribution = Attribution(self)
        self.held_line = ""
        self.allocations: list[Allocation] = []
        self.live: dict[int, Allocation] = {}
        self.segments: list[SegmentEvent] = []
        self.marks: list[Mark] = []
        self.sequence = 0
        self.cards: set[int] = set()  # that have blocks
        self.serials: dict[int, int] = {}
        self.ooms: list[OutOfMemoryRecord] = []
        self.on_progress: Callable[[], None] | None = None
        self.on_request: Callable[[], None] | None = None
        self.going_on: GoingOn | None = None  # beyond a request that the card cannot hold

    @abstractmethod
    def memory_stats(self) -> dict[str, int]:
        """The allocator's figures, as `torch.cuda.memory_stats` names them."""

    @property
    @abstractmethod
    def overhead_parts(self) -> dict[str, int]:
        """What the process holds beside the allocator, by part."""

    @abstractmethod
    def lift_limit(self) -> None:
        """From now on the card holds whatever is asked for, within reason."""

    @abstractmethod
    def synchronize(self) -> None:
        """The device caught up with the host."""

    @abstractmethod
    def hold(self, parts: dict[str, int]) -> None:
        """The process holds this much more beside the allocator, by part (a communicator's buffers, say)."""

    @abstractmethod
    def begin_copy(self, tensors: Iterable[Any]) -> Any:
        """A copy on a stream of its own writes these tensors: dropped ones are not reused before it is done. Its handle."""

    @abstractmethod
    def end_copy(self, copy: Any) -> None:
        """That copy is done."""

    # Called by subclasses

    def allocated(
        self, address: int, size: int, block_size: int, stream: int, operator: str, module: str, serial: int, shape: Shape | None,
        dtype: str, place: Place,
    ) -> Allocation:  # fmt: skip
        """A block was handed out; `serial` numbers the outermost operator that asked for it."""
        who = self.attribution
        who.at(place)
        self.sequence += 1
        allocation = Allocation(
            len(self.allocations), address, size, block_size, stream, self.sequence, None, who.category, operator, module,
            who.phase, who.step, place.line, place.stack, shape, dtype,
        )  # fmt: skip
        self.allocations.append(allocation)
        self.live[address] = allocation
        self.serials[address] = serial
        if not self.sequence & 1023:
            if self.on_progress:
                self.on_progress()
            if who.observer:
                who.observer.goes_on()
        return allocation

    def freed(self, address: int, serial: int) -> Allocation | None:
        """A block came back; None where it is older than the record."""
        allocation = self.live.pop(address, None)
        if allocation is None:
            return None
        self.sequence += 1
        allocation.died = self.sequence
        born_in = self.serials.pop(address)
        if born_in == serial and born_in:
            allocation.category = Category.WORKSPACE  # made and dropped inside one operator
        return allocation

    def segment_changed(self, action: SegmentAction, address: int, size: int, stream: int) -> None:
        """The allocator took memory from the card, or gave some back."""
        self.sequence += 1
        self.segments.append(SegmentEvent(self.sequence, action, address, size, stream))
        if self.attribution.host:
            self.attribution.host.card_used()

    def drain(self) -> None:  # noqa: B027 - only a device that keeps a log has something to do
        """Count everything that has happened until now."""

    # Called by the attribution

    def mark(self, kind: MarkKind, name: str = "") -> None:
        """A phase or step begins with the next event, or the cache was emptied."""
        self.marks.append(Mark(self.sequence + 1, kind, name))
        if self.going_on is not None:
            self.going_on.check(kind)

    @abstractmethod
    def at_module(self, context: int) -> None:
        """The module at work, for nodes that autograd makes."""

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None:
        """What these blocks turned out to be for."""
        for address in addresses:
            allocation = self.live.get(address)
            if allocation and (only is None or allocation.category is only):
                allocation.category = category
