"""One virtual GPU: the allocator behind it, and the record of every block it hands out.

The native half calls `malloc` and `free` for each storage on the device, on whatever thread makes or drops it, always
with the GIL. What a block is for is the business of `attribution`; what PyTorch is told about the card, of `cuda`.
"""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

from tonnage.allocator import AllocatorSettings, CachingAllocator, OutOfMemory, Shortage
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.recording.records import Allocation, Mark, MarkKind, SegmentEvent
from tonnage.recording.records import OutOfMemory as OutOfMemoryRecord
from tonnage.script.attribution import Attribution
from tonnage.virtual.overheads import Overheads

if TYPE_CHECKING:
    from tonnage.virtual.cuda.history import History

Shape = tuple[int, ...]

DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "ComplexHalf": "complex32", "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}  # fmt: skip


# What moves or reserves memory without launching one of torch's kernels.
_WITHOUT_KERNELS = frozenset(
    ("", "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::to", "aten::_to_copy", "aten::copy_")
)


class OutOfDeviceMemory(Exception):
    """Raised out of `malloc`; the native half turns it into torch.OutOfMemoryError."""

    is_out_of_memory = True


class Device:
    """The state of one card during a run."""

    def __init__(self, gpu: Gpu, torch_version: tuple[int, int], settings: AllocatorSettings) -> None:
        self.gpu = gpu
        self.torch_version = torch_version
        self.overheads = Overheads(gpu)
        self.allocator = CachingAllocator(
            gpu.memory_bytes, settings, outside_bytes=self.overheads.total_bytes, observer=self._on_segment
        )
        self.attribution = Attribution(self)
        self.held_line = ""
        self.native_context = ctypes.c_int32()  # what autograd's nodes remember of the module that made them
        self.allocations: list[Allocation] = []
        self.live: dict[int, Allocation] = {}
        self.segments: list[SegmentEvent] = []
        self.marks: list[Mark] = []
        self.sequence = 0
        self._no_kernel_yet = True
        self.serials: dict[int, int] = {}
        self.ooms: list[OutOfMemoryRecord] = []
        self.on_progress: Callable[[], None] | None = None
        self.history: History | None = None
        self.oom_observers: list[Callable[[Shortage], None]] = []

    # Called by the native half

    def malloc(
        self, size: int, index: int, stream: int, operator: str, context: int, serial: int, shape: Shape, dtype: str
    ) -> int:
        """The address of a new block, or OutOfDeviceMemory."""
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory as error:
            self._note_oom(error, operator, context, shape, DTYPES.get(dtype, dtype))
            raise OutOfDeviceMemory(error.message) from None
        who = self.attribution
        self.sequence += 1
        allocation = Allocation(
            len(self.allocations), block.address, size, block.size, stream, self.sequence, None, who.category, operator,
            who.module_of(context), who.phase, who.step, who.line(), (), shape, DTYPES.get(dtype, dtype),
        )  # fmt: skip
        self.allocations.append(allocation)
        self.live[block.address] = allocation
        if self._no_kernel_yet and operator not in _WITHOUT_KERNELS:
            self._no_kernel_yet = False
            self.use("kernels")
        self.serials[block.address] = serial
        if self.history is not None:
            self.history.allocated(allocation)
        if self.on_progress and not self.sequence & 1023:
            self.on_progress()
        return block.address

    def free(self, address: int, serial: int) -> None:
        """A storage was dropped."""
        allocation = self.live.pop(address)
        self.sequence += 1
        allocation.died = self.sequence
        born_in = self.serials.pop(address)
        if born_in == serial and born_in:
            allocation.category = Category.WORKSPACE  # made and dropped inside one operator
        block = self.allocator.block_at(address)
        self.allocator.free(block)
        if self.history is not None:
            self.history.freed(allocation, block)

    def record_stream(self, address: int, stream: int) -> None:
        """`Tensor.record_stream`."""
        self.allocator.record_stream(address, stream)

    def synchronize(self) -> None:
        """The device caught up with the host."""
        self.allocator.process_events()

    # Called by the attribution

    def mark(self, kind: MarkKind, name: str) -> None:
        """A phase or step begins with the next event."""
        self.marks.append(Mark(self.sequence + 1, kind, name))

    def at_module(self, context: int) -> None:
        """The module at work, for nodes that autograd makes."""
        self.native_context.value = context

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None:
        """What these blocks turned out to be for."""
        for address in addresses:
            allocation = self.live.get(address)
            if allocation and (only is None or allocation.category is only):
                allocation.category = category

    # Called by the patches of torch.cuda

    def empty_cache(self) -> None:
        """Give cached segments back, and remember when."""
        self.marks.append(Mark(self.sequence + 1, "empty_cache"))
        self.allocator.empty_cache()

    def use(self, library: str, handle: int = 1) -> None:
        """A library is in use from now on: its share of the process's memory is due."""
        if self.overheads.use(library, handle):
            self.allocator.outside_bytes = self.overheads.total_bytes

    def hold(self, parts: dict[str, int]) -> None:
        """The process holds this much more beside the allocator, by part (a communicator's buffers, say)."""
        self.overheads.parts.update(parts)
        self.allocator.outside_bytes = self.overheads.total_bytes

    def _on_segment(self, action: str, address: int, size: int, stream: int) -> None:
        if self.history is not None:
            self.history.segment(action, address, size, stream)
        if action != "oom":
            self.sequence += 1
            self.segments.append(SegmentEvent(self.sequence, action, address, size, stream))  # type: ignore[arg-type]

    def _note_oom(self, error: OutOfMemory, operator: str, context: int, shape: Shape, dtype: str) -> None:
        who, shortage = self.attribution, error.shortage
        record = OutOfMemoryRecord(
            line=who.line(),
            requested_bytes=shortage.requested_bytes,
            free_bytes=shortage.free_bytes,
            allocated_bytes=shortage.allocated_bytes,
            reserved_bytes=shortage.reserved_bytes,
            operator=operator,
            module=who.module_of(context),
            phase=who.phase,
            step=who.step,
            message=error.message,
            stack=who.stack(),
            shape=shape,
            dtype=dtype,
        )
        self.ooms.append(record)
        for observer in self.oom_observers:
            observer(shortage)
