"""One virtual GPU on a CPU build of torch: its allocator, and the blocks that the native library reports.

The native library calls `malloc` and `free` for each storage on the device, on the thread that creates or drops it,
always holding the GIL. `attribution` finds out what a block is for; `cuda` is what PyTorch sees of the card.
"""

import ctypes
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

from tonnage.allocator import AllocatorSettings, CachingAllocator, OutOfMemory, Shortage
from tonnage.hardware import Gpu
from tonnage.virtual.recorded import RecordedDevice, Shape

if TYPE_CHECKING:
    from tonnage.virtual.cuda.history import DeviceHistory

DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "ComplexHalf": "complex32", "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}  # fmt: skip


# Operators that move or reserve memory without launching a kernel of torch.
_WITHOUT_KERNELS = frozenset(
    ("", "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::to", "aten::_to_copy", "aten::copy_")
)


_FIRST_COPY = 1 << 40  # larger than any stream id of a script


class OutOfDeviceMemory(Exception):
    """Raised by `malloc`; the native library turns it into torch.OutOfMemoryError."""

    is_out_of_memory = True


class Device(RecordedDevice):
    """A card whose allocator is our model of PyTorch's."""

    def __init__(self, gpu: Gpu, torch_version: tuple[int, int], settings: AllocatorSettings) -> None:
        super().__init__(gpu, torch_version)
        own = self.allocator = CachingAllocator(gpu.memory_bytes, settings, observer=self._on_segment)
        self.memory_stats, self.lift_limit, self.synchronize = own.memory_stats, own.lift_limit, own.process_events
        self.record_stream, self.end_copy = own.record_stream, own.retire_stream
        self.overhead_parts = {}
        self.use("context")
        self.native_context = ctypes.c_int32()  # the module id that autograd nodes created now are tagged with
        self._no_kernel_yet = True
        self._copies = count(_FIRST_COPY)
        self.history: DeviceHistory | None = None
        self.oom_observers: list[Callable[[Shortage], None]] = []

    # Called by the native library

    def malloc(
        self, size: int, index: int, stream: int, operator: str, context: int, serial: int, shape: Shape, dtype: str
    ) -> int:
        """Return the address of a new block, or raise OutOfDeviceMemory."""
        if self.on_request is not None:
            self.on_request()
        self.cards.add(index)
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory as error:
            short = error.shortage
            self.failed(
                self.attribution.module_of(context), requested_bytes=short.requested_bytes, free_bytes=short.free_bytes,
                allocated_bytes=short.allocated_bytes, reserved_bytes=short.reserved_bytes, operator=operator,
                message=error.message, shape=shape, dtype=DTYPES.get(dtype, dtype),
            )  # fmt: skip
            for observer in self.oom_observers:
                observer(short)
            if self.going_on is None or not self.going_on.grants(short):
                raise OutOfDeviceMemory(error.message) from None
            block = self.allocator.malloc(size, stream)
        allocation = self.allocated(
            block.address, size, block.size, stream, operator, self.attribution.module_of(context), serial, shape,
            DTYPES.get(dtype, dtype), self.attribution.place(),
        )  # fmt: skip
        if self._no_kernel_yet and operator not in _WITHOUT_KERNELS:
            self._no_kernel_yet = False
            self.use("kernels")
        if self.history is not None:
            self.history.allocated(allocation)
        return block.address

    def free(self, address: int, serial: int) -> None:
        """Free the block of a dropped storage."""
        allocation = self.freed(address, serial)
        assert allocation is not None
        block = self.allocator.block_at(address)
        self.allocator.free(block)
        if self.history is not None:
            self.history.freed(allocation, block)

    def begin_copy(self, tensors: Iterable[Any]) -> int:
        copy = next(self._copies)
        for address in {t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes()}:
            self.record_stream(address, copy)
        return copy

    # Called by the attribution

    def at_module(self, context: int) -> None:
        self.native_context.value = context

    # Called by the patches of torch.cuda

    def empty_cache(self) -> None:
        """Free cached segments and mark the event in the recording."""
        self.mark("empty_cache")
        self.allocator.empty_cache()

    def use(self, library: str, handle: int = 1) -> None:
        """Count a library's memory (for its `handle`-th handle) from now on, by the catalogue's figures for this card."""
        part = library if handle == 1 else f"{library} {handle}"
        if part in self.overhead_parts or library not in self.gpu.overheads:
            return
        # Since 1.13 a kernel is loaded at its first launch; before, all of torch's kernels were loaded at once.
        held = "all kernels" if library == "kernels" and self.torch_version < (1, 13) else library
        self.hold({part: self.gpu.overheads[held].size_bytes})

    def hold(self, parts: dict[str, int]) -> None:
        self.overhead_parts.update(parts)
        self.allocator.outside_bytes = sum(self.overhead_parts.values())

    def _on_segment(self, action: str, address: int, size: int, stream: int) -> None:
        if self.history is not None:
            self.history.segment(action, address, size, stream)
        if action != "oom":
            self.segment_changed(action, address, size, stream)  # type: ignore[arg-type]
