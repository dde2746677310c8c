"""Host memory: pinned buffers of exact size, and copies on a separate stream.

On a device without streams (the CPU in tests) copies are synchronous.
"""

import math
import mmap
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from tonnage.errors import TonnageError
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.hardware.host_memory import free_host_bytes
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from tonnage.fit.moving.disk import DiskSpace, Loaded

ALIGNMENT_BYTES = 4096  # of offsets and lengths in a file, as O_DIRECT requires


class HostMemoryExhausted(TonnageError, MemoryError):
    """Raised if more pinned memory is requested than the budget allows."""


def aligned(byte_count: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Round up to a multiple."""
    return -(-byte_count // alignment) * alignment


@dataclass(frozen=True)
class Place:
    """A tensor's position among the bytes of a buffer."""

    start: int
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]

    @property
    def byte_count(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        flat = buffer[self.start : self.start + self.byte_count].view(self.dtype)
        return flat.as_strided(self.size, self.stride)


@dataclass(frozen=True)
class Packing:
    """The layout of several tensors in one buffer."""

    places: dict[Any, Place]
    byte_count: int

    @classmethod
    def of(
        cls, layouts: Iterable[tuple[Any, torch.dtype, Sequence[int], Sequence[int]]], alignment: int = 16
    ) -> "Packing":
        """Lay out tensors one after another, by key, dtype, size and stride; 16 bytes suit vectorized kernels."""
        places: dict[Any, Place] = {}
        end = 0
        for key, dtype, size, stride in layouts:
            places[key] = Place(end, dtype, size, stride)
            end += aligned(places[key].byte_count, alignment)
        return cls(places, end)

    @property
    def tensor_bytes(self) -> int:
        return sum(place.byte_count for place in self.places.values())

    def views(self, buffer: Tensor) -> dict[Any, Tensor]:
        return {key: place.view(buffer) for key, place in self.places.items()}

    def store(self, values: dict[str, Any], buffer: Tensor) -> dict[str, Any]:
        """Copy tensors that are not in the buffer yet; return what has no place there (counters)."""
        for key, view in self.views(buffer).items():
            if values[key].data_ptr() != view.data_ptr() or values[key].device != view.device:
                view.copy_(values[key])
        return {key: value for key, value in values.items() if key not in self.places}


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


def host_limit_bytes(device: torch.device, asked_bytes: int | None) -> int:
    """Return how much may be pinned: what was requested, or all that is free. A virtual GPU has no limit."""
    if asked_bytes is not None:
        return asked_bytes
    return sys.maxsize if on_virtual_gpu(device) else free_host_bytes()


class _Pages(mmap.mmap):
    """Private pages, registered with CUDA until the last tensor over them is freed."""

    registered_at = 0

    def __del__(self) -> None:
        if self.registered_at and torch.cuda.is_available():  # a virtual GPU may be gone by now
            torch.cuda.synchronize()  # no copy may be in flight; buffers are freed on undo, not during a step
            torch.cuda.cudart().cudaHostUnregister(self.registered_at)


def pinned(byte_count: int, device: torch.device) -> Tensor:
    """Return a page-aligned pinned buffer of exactly this size, for asynchronous copies.

    PyTorch's own pinned allocator rounds up to powers of two and caches what is freed, so up to half would be
    wasted. Huge pages are used if available: pinning them is far quicker.
    """
    if byte_count == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if has_streams(device) and not on_virtual_gpu(device):
        buffer.zero_()  # with all threads; registering would fault the pages in one by one
    if has_streams(device):
        error = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), byte_count, 0))
        if error != 0:
            raise HostMemoryExhausted(
                f"{format_bytes(byte_count)} of host memory could not be pinned (CUDA error {error}).",
                hint="Give fit a smaller host= budget, or free memory of this machine.",
            )
        pages.registered_at = buffer.data_ptr()
    return buffer


class PinnedPool:
    """Pinned buffers by exact size, reused when returned, never more than `limit_bytes`."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.pinned_bytes = 0
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, byte_count: int) -> Tensor:
        if self._free[byte_count]:
            return self._free[byte_count].pop()
        if self.pinned_bytes + byte_count > self.limit_bytes:  # drop unused buffers of other sizes
            self.pinned_bytes -= sum(size * len(buffers) for size, buffers in self._free.items())
            self._free.clear()
        if self.pinned_bytes + byte_count > self.limit_bytes:
            raise HostMemoryExhausted(
                f"{format_bytes(byte_count)} more pinned memory is needed; {format_bytes(self.pinned_bytes)} of the "
                f"{format_bytes(self.limit_bytes)} granted are in use.",
                hint="Raise host=, or let fit choose again with a smaller batch.",
            )
        buffer = pinned(byte_count, self.device)
        self.pinned_bytes += byte_count
        return buffer

    def give(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


@dataclass(frozen=True)
class CopyInFlight:
    """A copy in flight, or other work on a stream; without an event, it is done."""

    event: "torch.cuda.Event | None" = None

    def wait(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Make a stream (default: the current one) wait for the copy."""
        if self.event is not None:
            (stream or torch.cuda.current_stream()).wait_event(self.event)

    def done(self) -> None:
        """Make the host wait for the copy."""
        if self.event is not None:
            self.event.synchronize()


def queued(device: torch.device) -> CopyInFlight:
    """Return an event after the work queued on the current stream."""
    return CopyInFlight(torch.cuda.current_stream(device).record_event() if has_streams(device) else None)


class CopyLane:
    """A side stream for copies in one or both directions, in order. Without streams, copies are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if has_streams(device) else None

    def copy(self, source: Tensor, target: Tensor) -> CopyInFlight:
        """Run `target.copy_(source)` after the work queued on the current stream.

        Hold both until the ticket was waited on. (`record_stream` would hold them too, but until the host happens to
        check, and the peak would depend on timing.)
        """
        return self.copy_all([(source, target)], after=[queued(self.device)])

    def copy_all(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[CopyInFlight]) -> CopyInFlight:
        """Copy each source to its target after these events."""
        if self.stream is None:
            for source, target in pairs:
                target.copy_(source)
            return CopyInFlight(None)
        for earlier in after:
            earlier.wait(self.stream)
        with torch.cuda.stream(self.stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            return CopyInFlight(self.stream.record_event())


class PinnedSpace(PinnedPool):
    """Bytes kept off the GPU in pinned host memory: an extent is a buffer. `disk.DiskSpace` keeps them in a file.

    Users take an extent, store and load its bytes, and give it back when nothing will load it again.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        super().__init__(device, limit_bytes)
        self.store_lane, self.load_lane = CopyLane(device), CopyLane(device)

    def store(self, source: Tensor, extent: Tensor, *, start: int = 0) -> CopyInFlight:
        """Copy GPU bytes into part of an extent, after the work queued on the current stream.

        The GPU memory is free after the returned copy; the bytes have arrived after that and `settle`.
        """
        return self.store_lane.copy(source, extent[start : start + source.numel()])

    def load(self, extent: Tensor, target: Tensor) -> CopyInFlight:
        """Copy an extent into GPU memory, after the work queued on the current stream."""
        return self.load_lane.copy(extent, target)

    def settle(self, extent: Tensor) -> None:
        """Wait for all work on the extent besides the copies that `store` returned: here there is none."""

    def read_all(self, extent: Tensor) -> Tensor:
        """Return all bytes on the host, after pending writes."""
        return extent

    def overwrite(self, extent: Tensor, values: Tensor) -> None:
        """Replace all bytes from the host; `values` may be what `read_all` returned, changed in place."""
        if values is not extent:
            extent.copy_(values)


Space: TypeAlias = "PinnedSpace | DiskSpace"
Arrival: TypeAlias = "CopyInFlight | Loaded"
