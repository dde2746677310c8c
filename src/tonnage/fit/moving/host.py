"""The host's side: pinned buffers of exact size, and copies on a stream of their own.

On a device without streams (the CPU in tests) a copy happens at once and waiting is nothing. This module does not know
what is copied nor why.
"""

import mmap
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tonnage.errors import TonnageError
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.units import format_bytes


class HostMemoryExhausted(TonnageError, MemoryError):
    """More pinned memory was asked for than the budget grants."""


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


def with_index(device: torch.device) -> torch.device:
    """The device as its tensors name it: "cuda" is "cuda:0" there."""
    if device.index is not None or not has_streams(device):
        return device
    return torch.device(device.type, torch.cuda.current_device())


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of this machine, or of this container's share, that a process could still take."""
    free = _table(proc / "meminfo")["MemAvailable:"] * 1024
    for folder, limit_name, used_name, cache_name in _CGROUP_FILES:
        files = [cgroup / folder / name for name in (limit_name, used_name)]
        limit, used = (file.read_text().strip() if file.exists() else "max" for file in files)
        if limit.isdigit() and used.isdigit():
            cache = _table(cgroup / folder / "memory.stat").get(cache_name, 0)
            free = min(free, int(limit) - int(used) + cache)
    return max(free, 0)


def host_limit_bytes(device: torch.device, asked_bytes: int | None) -> int:
    """What may be pinned: what was asked for, or all that is free. Beside a virtual GPU nothing is ever written."""
    if asked_bytes is not None:
        return asked_bytes
    return sys.maxsize if on_virtual_gpu(device) else free_host_bytes()


# Version 2 and version 1 of control groups: where the limit, the use and the part of it that gives way stand.
_CGROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _table(file: Path) -> dict[str, int]:
    rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


class _Pages(mmap.mmap):
    """Private pages, registered with CUDA until the last tensor over them dies."""

    registered_at = 0

    def __del__(self) -> None:
        if self.registered_at and torch.cuda.is_available():  # a virtual GPU may be gone by now
            torch.cuda.synchronize()  # no copy may be under way; buffers die when a technique is undone, not in a step
            torch.cuda.cudart().cudaHostUnregister(self.registered_at)


def pinned(byte_count: int, device: torch.device) -> Tensor:
    """A flat buffer of exactly this size, on page boundaries, that the device copies from and to without waiting.

    PyTorch's own pinned allocator rounds up to powers of two and keeps what it is given back: up to half would be
    wasted. So the pages are ours. Large pages where the system grants them: pinning them is far quicker.
    """
    if byte_count == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if has_streams(device) and not on_virtual_gpu(device):
        buffer.zero_()  # by all threads; registering would fault the pages in one by one
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
    """Pinned buffers by exact size, kept when given back, never beyond `limit_bytes`."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.pinned_bytes = 0
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, byte_count: int) -> Tensor:
        if self._free[byte_count]:
            return self._free[byte_count].pop()
        if self.pinned_bytes + byte_count > self.limit_bytes:  # drop sizes of other batches, which nobody holds
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
class Ticket:
    """A copy under way."""

    event: "torch.cuda.Event | None"

    def wait(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Let a stream, the current one unless told, go on only after the copy."""
        if self.event is not None:
            (stream or torch.cuda.current_stream()).wait_event(self.event)

    def done(self) -> None:
        """Let the host go on only after the copy."""
        if self.event is not None:
            self.event.synchronize()


class CopyLane:
    """Copies in one direction or both, in order, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if has_streams(device) else None

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        """`target.copy_(source)` after what the current stream has been given so far.

        Hold both until the ticket was waited on. (`record_stream` would hold them too, but until the host happens to
        look, and the peak would depend on timing.)
        """
        if self.stream is None:
            target.copy_(source)
            return Ticket(None)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return Ticket(event)
