"""Out of memory, with the allocator's numbers and PyTorch's message."""

from dataclasses import dataclass

from tonnage.errors import TonnageError
from tonnage.units import GIB, KIB, MIB

_ADVICE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
    " fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """What was requested and what was available, when an allocation finally failed."""

    device: int
    requested_bytes: int
    segment_bytes: int
    capacity_bytes: int
    free_bytes: int
    allowed_bytes: int | None
    process_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    private_pool_bytes: int

    @property
    def reserved_unallocated_bytes(self) -> int:
        """Reserved, not allocated, and not free in a private pool."""
        return self.reserved_bytes - self.allocated_bytes - self.private_pool_bytes

    @property
    def message(self) -> str:
        """The message of `torch.OutOfMemoryError`."""
        allowed = "" if self.allowed_bytes is None else f"{format_size(self.allowed_bytes)} allowed; "
        private = format_size(self.private_pool_bytes)
        private = f"with {private} allocated in private pools (e.g., CUDA Graphs), " if self.private_pool_bytes else ""
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.segment_bytes)}. GPU {self.device} has a total "
            f"capacity of {format_size(self.capacity_bytes)} of which {format_size(self.free_bytes)} is free. "
            f"Including non-PyTorch memory, this process has {format_size(self.process_bytes)} memory in use. {allowed}"
            f"Of the allocated memory {format_size(self.allocated_bytes + self.private_pool_bytes)} is allocated by "
            f"PyTorch, {private}and {format_size(self.reserved_unallocated_bytes)} is reserved by PyTorch but "
            f"unallocated.{_ADVICE}"
        )


class OutOfMemory(TonnageError):
    """The device cannot satisfy the request, and nothing cached was left to release."""

    exit_code = 1

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.message)
        self.shortage = shortage

    @property
    def message(self) -> str:
        """PyTorch's message."""
        return self.shortage.message


def format_size(size_bytes: int) -> str:
    """Format a size as PyTorch does: 1 GiB is still "1024.00 MiB"."""
    if size_bytes <= KIB:
        return f"{size_bytes} bytes"
    for unit, factor in (("KiB", KIB), ("MiB", MIB)):
        if size_bytes <= factor * 1024:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes / GIB:.2f} GiB"
