"""Offload tensors saved for backward: storages move to the host and return in time.

    window = OffloadWindow(device, PinnedKeeper(device, pool), window_bytes=GIB)
    with saved_by(window.pack):
        output = block(input)
    ...
    loss.backward()

A window of bytes slides over the storages in the order in which they were saved. In forward the newest are still on
the GPU while they are copied; when the window is full the oldest is released, and the compute stream waits for its
copy, so that memory use depends on the order of calls and never on timing. Backward finds the last ones still on the
GPU and prefetches through the same window. With pinned memory no call blocks the host. This module does not know
blocks or which tensors are worth it.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tonnage.fit.moving.host import CopyInFlight, CopyLane, PinnedPool, has_streams, with_index


class Packed(Protocol):
    """What replaces a tensor in autograd's graph."""

    def unpack(self) -> Tensor: ...


@dataclass(frozen=True)
class _Left:
    """A tensor that stays on the GPU. Autograd skips its version check under hooks, so it is done here."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        check_version(self.tensor._version, self.version)
        return self.tensor


@dataclass(frozen=True)
class _Delegated:
    """A tensor that outer hooks have packed."""

    packed: Any
    unpack_hook: Callable[[Any], Tensor]

    def unpack(self) -> Tensor:
        return self.unpack_hook(self.packed)


def check_version(found: int, kept: int) -> None:
    if found != kept:
        raise RuntimeError(
            f"A tensor that backward needs was changed in place after it was kept: it is at version {found}, and "
            f"version {kept} was kept."
        )


@contextmanager
def saved_by(pack: Callable[[Tensor], Packed | None]) -> Iterator[None]:
    """Let `pack` replace the tensors saved for backward; those it declines go to outer hooks, or stay.

    PyTorch calls only the innermost pair of hooks, so they are forwarded here.
    """
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def take(tensor: Tensor) -> Packed:
        packed = pack(tensor)
        if packed is not None:
            return packed
        if around is not None:
            return _Delegated(around[0](tensor), around[1])
        # Detached, to avoid a cycle between an operator's output and its autograd node.
        return _Left(tensor.detach(), tensor._version)

    with torch.autograd.graph.saved_tensors_hooks(take, lambda packed: packed.unpack()):
        yield


def made_of_a_parameter(tensor: Tensor) -> bool:
    """Return whether it is a parameter, a view of one, or a cast of one as autocast makes."""
    if isinstance(tensor, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors over one storage, while one of them is alive."""
    return int(tensor.untyped_storage()._cdata)


class Arrival(Protocol):
    def wait(self) -> None:
        """Make the current stream wait until the bytes have arrived."""


class SavedBytes(Protocol):
    """Bytes that have left the GPU, or are leaving."""

    @property
    def copied(self) -> CopyInFlight:
        """The copy after which their GPU memory is free."""

    def load(self, target: Tensor) -> Arrival:
        """Copy into GPU memory, after the work queued on the current stream."""

    def release(self) -> None:
        """Free the bytes; nothing will load them again, and loads in flight have finished."""


class TensorKeeper(Protocol):
    def keep(self, source: Tensor) -> SavedBytes:
        """Copy these bytes off the GPU, after the work queued on the current stream."""


class PinnedKeeper:
    """Stores bytes in pinned host memory."""

    def __init__(self, device: torch.device, pool: PinnedPool) -> None:
        self.pool = pool
        self.store_lane, self.load_lane = CopyLane(device), CopyLane(device)

    def keep(self, source: Tensor) -> SavedBytes:
        host = self.pool.take(source.numel())
        return _PinnedBytes(self, host, self.store_lane.copy(source, host))


@dataclass(frozen=True)
class _PinnedBytes:
    keeper: PinnedKeeper
    host: Tensor
    copied: CopyInFlight

    def load(self, target: Tensor) -> CopyInFlight:
        return self.keeper.load_lane.copy(self.host, target)

    def release(self) -> None:
        self.keeper.pool.give(self.host)


class OffloadWindow:
    """Moves storages out and back, with at most `window_bytes` (or one larger storage) in transit."""

    def __init__(self, device: torch.device, keeper: TensorKeeper, *, window_bytes: int) -> None:
        self.device = with_index(device)
        self.keeper = keeper
        self.window_bytes = window_bytes
        self.used_bytes = 0
        # All weak: a moved storage lives as long as autograd's graph holds it.
        self._moved: list[weakref.ref[_Moved]] = []
        self._leaving: deque[weakref.ref[_Moved]] = deque()
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Moved] = weakref.WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Packed | None:
        """Start moving the tensor to the host, or return None if it cannot be moved."""
        if tensor.device != self.device or tensor.layout is not torch.strided or type(tensor) is not Tensor:
            return None
        if tensor.is_conj() or tensor.is_neg():  # flags that a storage does not carry
            return None
        moved = self._known.get((storage_key(tensor), tensor._version)) or self._store(tensor.detach())
        return _View(moved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _store(self, tensor: Tensor) -> "_Moved":
        resident = bytes_of(tensor)
        moved = _Moved(self, tensor, resident, self.keeper.keep(resident))
        self._forget_the_dead()
        self._moved.append(weakref.ref(moved))
        self._leaving.append(weakref.ref(moved))
        self._known[storage_key(tensor), tensor._version] = moved
        self._enter(moved)
        self._let_leave()
        return moved

    def _let_leave(self) -> None:
        """Release the oldest until the window is within its limit; the newest stays whatever its size."""
        while self.used_bytes > self.window_bytes and len(self._leaving) > 1:
            moved = self._leaving.popleft()()
            if moved is not None and moved.in_window:
                moved.drop()
                self._exit(moved)

    def fetch(self, moved: "_Moved") -> Tensor:
        """Return a storage's bytes on the GPU for the current stream, and prefetch what backward needs next."""
        moved.check()
        if moved.resident is None:
            self._load(moved)
        resident = moved.resident
        assert resident is not None
        if moved.arrival is not None:
            moved.arrival.wait()
        self._exit(moved)
        self._forget_the_dead()
        self._load_ahead()
        return resident

    def _load_ahead(self) -> None:
        for reference in reversed(self._moved):
            moved = reference()
            if moved is None or moved.resident is not None:
                continue
            if self.used_bytes and self.used_bytes + moved.byte_count > self.window_bytes:
                return
            self._load(moved)

    def _load(self, moved: "_Moved") -> None:
        # Allocated on the current stream, which waits for the copy before it reads or frees.
        target = torch.empty(moved.byte_count, dtype=torch.uint8, device=self.device)
        moved.source, moved.resident, moved.arrival = None, target, moved.kept.load(target)
        self._enter(moved)

    def _enter(self, moved: "_Moved") -> None:
        moved.in_window = True
        self.used_bytes += moved.byte_count

    def _exit(self, moved: "_Moved") -> None:
        if moved.in_window:
            moved.in_window = False
            self.used_bytes -= moved.byte_count

    def release(self, moved: "_Moved") -> None:
        """Free its place in the window and its bytes elsewhere."""
        self._exit(moved)
        moved.kept.release()

    def _forget_the_dead(self) -> None:
        while self._moved and self._moved[-1]() is None:
            self._moved.pop()
        while self._leaving and self._leaving[0]() is None:
            self._leaving.popleft()


class _Moved:
    """One storage: saved elsewhere, and for a while on the GPU too."""

    def __init__(self, window: OffloadWindow, source: Tensor, resident: Tensor, kept: SavedBytes) -> None:
        self.window = window
        self.kept = kept
        self.byte_count = resident.numel()
        self.source: Tensor | None = source  # detached, but it shares the version counter of the saved tensor
        self.version = self.version_copied = source._version
        self.storage_ref = StorageWeakRef(source.untyped_storage())  # while it lives, no other storage has this key
        self.resident: Tensor | None = resident
        self.arrival: Arrival | None = None  # of the loaded bytes
        self.stream = torch.cuda.current_stream(window.device) if has_streams(window.device) else None
        self.in_window = False

    def check(self) -> None:
        """Raise if the copy may hold a later value than the one that was saved."""
        check_version(self.source._version if self.source is not None else self.version_copied, self.version)

    def drop(self) -> None:
        """Free the GPU memory, after the copy from it is done."""
        assert self.source is not None
        self.version_copied = self.source._version
        self.kept.copied.wait(self.stream)
        self.source = self.resident = None

    def __del__(self) -> None:
        # The GPU memory returns to its stream, so that stream must wait for copies that read or write it.
        if self.source is not None:
            self.kept.copied.wait(self.stream)
        elif self.arrival is not None and self.in_window:
            with torch.cuda.stream(self.stream):
                self.arrival.wait()
        self.window.release(self)


@dataclass(frozen=True)
class _View:
    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        storage = self.moved.window.fetch(self.moved).untyped_storage()
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, self.offset, self.size, self.stride)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
