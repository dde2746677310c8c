"""Storage on disk behind pinned staging buffers: one file, read and written by threads.

The file has no name, so that nothing is left behind in any case. It uses O_DIRECT where the
file system allows it: data is read once, and the page cache would use the memory that is scarce.
"""

import errno
import fcntl
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import IO, Any, TypeVar

import torch
from torch import Tensor

from tonnage.errors import TonnageError
from tonnage.fit.moving.host import ALIGNMENT_BYTES, CopyInFlight, CopyLane, PinnedPool, aligned, pinned, queued
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.units import MIB, format_bytes

_THREADS = 4
_CHUNK_BYTES = 16 * MIB  # per system call
_Result = TypeVar("_Result")


class DiskProblem(TonnageError, OSError):
    """Raised if a directory cannot be used, or a disk is full."""


@dataclass(frozen=True)
class Extent:
    """A range of the file."""

    start: int
    byte_count: int


class DiskSpace:
    """A `Space` in one file, with copies between its extents and GPU memory."""

    def __init__(self, directory: Path, device: torch.device, *, staging_bytes: int) -> None:
        self.device = device
        self._has_values = not on_virtual_gpu(device)
        self._file = _open_unnamed(directory)
        self._directory = directory
        self.file_bytes = 0
        self._free: dict[int, list[Extent]] = defaultdict(list)
        self._latest: dict[int, Future[Any]] = {}
        self._staging = _Staging(device, staging_bytes)
        self._store_lane, self.load_lane = CopyLane(device), CopyLane(device)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tonnage-disk")

    def close(self) -> None:
        self._threads.shutdown()
        self._file.close()

    def take(self, byte_count: int) -> Extent:
        if self._free[byte_count]:
            return self._free[byte_count].pop()
        extent = Extent(self.file_bytes, byte_count)
        added_bytes = aligned(byte_count)
        try:
            if self._has_values:
                os.posix_fallocate(self._file.fileno(), self.file_bytes, added_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise DiskProblem(
                f"{format_bytes(added_bytes)} more are needed in {self._directory}, beside {format_bytes(self.file_bytes)} "
                "there already, and its disk is full.",
                hint="Free space there, or name a directory on another disk.",
            ) from error
        self.file_bytes += added_bytes
        return extent

    def give(self, extent: Extent) -> None:
        self._free[extent.byte_count].append(extent)

    def store(self, source: Tensor, extent: Extent, *, start: int = 0) -> CopyInFlight:
        staged = self._staging.take(source.numel())
        copied = self._store_lane.copy(source, staged[: source.numel()])

        def write() -> None:
            copied.done()
            self._move(os.pwritev, staged, extent.start + start)

        self._submit(extent, staged, write)
        return copied

    def load(self, extent: Extent, target: Tensor) -> "Loaded":
        staged = self._staging.take(extent.byte_count)
        lane = self.load_lane
        now = queued(self.device)

        def read() -> CopyInFlight:
            self._move(os.preadv, staged, extent.start)
            # This thread's current stream is not the computation's.
            copied = lane.copy_all([(staged[: extent.byte_count], target)], after=[now])
            copied.done()
            return copied

        return Loaded(self._submit(extent, staged, read))

    def _submit(self, extent: Extent, staged: Tensor, work: Callable[[], _Result]) -> "Future[_Result]":
        """Run work in order per extent. Earlier work was submitted earlier, so there is no deadlock."""
        before = self._latest.get(extent.start)

        def run() -> _Result:
            try:
                if before is not None:
                    before.result()
                return work()
            finally:
                self._staging.give(staged)

        future = self._threads.submit(run)
        self._latest[extent.start] = future
        return future

    def _move(self, call: Callable[[int, list[memoryview], int], int], buffer: Tensor, start: int) -> None:
        """Read into host memory or write from it, blocking. The buffer and its length must be aligned."""
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        done = 0 if self._has_values else len(view)
        while done < len(view):
            moved = call(self._file.fileno(), [view[done : done + _CHUNK_BYTES]], start + done)
            if moved <= 0:
                raise DiskProblem(f"The file in {self._directory} ended early at {start + done} bytes.")
            done += moved

    def settle(self, extent: Extent) -> None:
        latest = self._latest.get(extent.start)
        if latest is not None:
            latest.result()

    def read_all(self, extent: Extent) -> Tensor:
        self.settle(extent)
        buffer = pinned(aligned(extent.byte_count), torch.device("cpu"))
        self._move(os.preadv, buffer, extent.start)
        return buffer[: extent.byte_count]

    def overwrite(self, extent: Extent, values: Tensor) -> None:
        self.settle(extent)
        self._move(os.pwritev, values, extent.start)


@dataclass(frozen=True)
class Loaded:
    """A read in flight."""

    ticket: "Future[CopyInFlight]"

    def wait(self) -> None:
        """Make the host wait for the disk, and the current stream for the copy."""
        self.ticket.result().wait()


class _Staging(PinnedPool):
    """Pinned buffers in flight, at most `limit_bytes` or one larger buffer; `take` blocks beyond that."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        super().__init__(device, limit_bytes)
        self._asked_bytes = limit_bytes
        self._used_bytes = 0
        self._changed = Condition()

    def take(self, byte_count: int) -> Tensor:
        size = aligned(byte_count)
        with self._changed:
            self._changed.wait_for(lambda: not self._used_bytes or self._used_bytes + size <= self._asked_bytes)
            self._used_bytes += size
            self.limit_bytes = max(self._asked_bytes, self._used_bytes)
            return super().take(size)

    def give(self, buffer: Tensor) -> None:
        with self._changed:
            self._used_bytes -= buffer.numel()
            super().give(buffer)
            self._changed.notify_all()


def _open_unnamed(directory: Path) -> IO[bytes]:
    """Open a new file without a name, with O_DIRECT if the file system supports it."""
    try:
        file = tempfile.TemporaryFile(buffering=0, prefix="tonnage-", dir=directory)  # noqa: SIM115
    except OSError as error:
        raise DiskProblem(
            f"No file can be made in {directory}: {error.strerror}.", hint="Name a directory that can be written to."
        ) from error
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        # Some file systems fail only on write.
        zeros = memoryview(pinned(ALIGNMENT_BYTES, torch.device("cpu")).numpy())  # type: ignore[arg-type]
        os.pwritev(file.fileno(), [zeros], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return file
