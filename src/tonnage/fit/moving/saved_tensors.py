"""What backward keeps, held elsewhere meanwhile: storages that go to the host and come back in time.

    window = OffloadWindow(device, PinnedKeeper(device, pool), window_bytes=GIB)
    with saved_by(window.pack):
        output = block(input)
    ...
    loss.backward()

A window of bytes slides over the storages in the order in which they were kept. In forward the youngest are still on
the GPU while their copies run; an older one leaves once the window is full, and the computing stream then waits for its
copy, so that when memory returns depends on the order of calls alone and never on timing. Backward finds the last ones
still there and loads ahead of itself through the same window. With pinned memory no call waits on the host.

This module does not know blocks nor which tensors are worth it.
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

from tonnage.fit.moving.host import CopyLane, PinnedPool, Ticket, has_streams, with_index


class Packed(Protocol):
    """What stands in autograd's graph for a tensor."""

    def unpack(self) -> Tensor: ...


@dataclass(frozen=True)
class _Left:
    """A tensor that stays where it is. Autograd checks no versions under hooks, so this does."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        check_version(self.tensor._version, self.version)
        return self.tensor


@dataclass(frozen=True)
class _Delegated:
    """A tensor that the hooks around these have taken."""

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
    """Let `pack` stand in for the tensors that backward keeps; what it declines goes to the hooks around, or stays.

    (PyTorch calls the innermost pair of hooks alone, so passing on is up to us.)
    """
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def take(tensor: Tensor) -> Packed:
        packed = pack(tensor)
        if packed is not None:
            return packed
        if around is not None:
            return _Delegated(around[0](tensor), around[1])
        # Detached: an operator's output would hold the operator's node, which holds it.
        return _Left(tensor.detach(), tensor._version)

    with torch.autograd.graph.saved_tensors_hooks(take, lambda packed: packed.unpack()):
        yield


def made_of_a_parameter(tensor: Tensor) -> bool:
    """A parameter, a view of one, or a cast of one such as autocast makes."""
    if isinstance(tensor, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors over one storage, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


class Arrival(Protocol):
    def wait(self) -> None:
        """Let the current stream go on only when the bytes are there."""


class SavedBytes(Protocol):
    """Bytes that have left the GPU, or are leaving."""

    @property
    def copied(self) -> Ticket:
        """After it the GPU memory they were in is free."""

    def load(self, target: Tensor) -> Arrival:
        """Into GPU memory, after what the current stream has been given so far."""

    def release(self) -> None:
        """Nobody will load them again. A load that nobody waited for is over."""


class Keeper(Protocol):
    def keep(self, source: Tensor) -> SavedBytes:
        """Let these bytes leave the GPU, after what the current stream has been given so far."""


class PinnedKeeper:
    """Keeps bytes in pinned memory of the host."""

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
    copied: Ticket

    def load(self, target: Tensor) -> Ticket:
        return self.keeper.load_lane.copy(self.host, target)

    def release(self) -> None:
        self.keeper.pool.give(self.host)


class OffloadWindow:
    """Moves storages out and back, `window_bytes` at a time (or one storage, where one is larger)."""

    def __init__(self, device: torch.device, keeper: Keeper, *, window_bytes: int) -> None:
        self.device = with_index(device)
        self.keeper = keeper
        self.window_bytes = window_bytes
        self.used_bytes = 0
        # Weak, all three: a moved storage lives as long as autograd's graph holds it.
        self._moved: list[weakref.ref[_Moved]] = []
        self._leaving: deque[weakref.ref[_Moved]] = deque()
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Moved] = weakref.WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Packed | None:
        """The tensor on its way to the host, or None where it cannot go."""
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
        """The oldest go until the window holds no more than it may; the youngest stays whatever its size."""
        while self.used_bytes > self.window_bytes and len(self._leaving) > 1:
            moved = self._leaving.popleft()()
            if moved is not None and moved.in_window:
                moved.drop()
                self._exit(moved)

    def fetch(self, moved: "_Moved") -> Tensor:
        """The bytes of a storage on the GPU, for the current stream, and those that backward needs next on their way."""
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
        # Memory of the current stream's, which waits for the copy before it reads, and frees only after.
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
        """Nobody needs it any more: its place in the window and its bytes elsewhere are free."""
        self._exit(moved)
        moved.kept.release()

    def _forget_the_dead(self) -> None:
        while self._moved and self._moved[-1]() is None:
            self._moved.pop()
        while self._leaving and self._leaving[0]() is None:
            self._leaving.popleft()


class _Moved:
    """One storage: kept elsewhere, and for a while on the GPU too."""

    def __init__(self, window: OffloadWindow, source: Tensor, resident: Tensor, kept: SavedBytes) -> None:
        self.window = window
        self.kept = kept
        self.byte_count = resident.numel()
        self.source: Tensor | None = source  # detached, yet it shares the version counter of what was kept
        self.version = self.version_copied = source._version
        self.storage_ref = StorageWeakRef(source.untyped_storage())  # while it lives no other storage has this key
        self.resident: Tensor | None = resident
        self.arrival: Arrival | None = None  # of what was loaded
        self.stream = torch.cuda.current_stream(window.device) if has_streams(window.device) else None
        self.in_window = False

    def check(self) -> None:
        """Raise where the copy may have caught a later value than the one that was kept."""
        check_version(self.source._version if self.source is not None else self.version_copied, self.version)

    def drop(self) -> None:
        """Off the GPU, once the copy from there is done."""
        assert self.source is not None
        self.version_copied = self.source._version
        self.kept.copied.wait(self.stream)
        self.source = self.resident = None

    def __del__(self) -> None:
        # The GPU memory goes back to the stream that it came from: not before a copy that reads or writes it is done.
        if self.source is not None:
            self.kept.copied.wait(self.stream)
        elif self.arrival is not None and self.in_window:
            with torch.cuda.stream(self.stream):
                self.arrival.wait()
        self.window.release(self)


@dataclass(frozen=True)
class _View:
    """A tensor over a moved storage."""

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
    """All of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
