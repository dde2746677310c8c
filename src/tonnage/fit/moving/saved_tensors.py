"""Offload tensors saved for backward: storages move to the host and return in time.

    window = OffloadWindow(device, PinnedSpace(device, limit_bytes), window_bytes=GIB)
    with saved_by(window.pack):
        output = block(input)
    ...
    loss.backward()

A window of bytes slides over the storages in the order in which they were saved. In forward the newest are still on
the GPU while they are copied; when the window is full the oldest is released, and the compute stream waits for its
copy, so that memory use depends on the order of calls and never on timing. Backward finds the last ones still on the
GPU and prefetches through the same window. With pinned memory no call blocks the host.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tonnage.fit.moving.host import Arrival, CopyInFlight, Space, has_streams

Packed = Callable[[], Tensor]  # what replaces a tensor in autograd's graph, and returns it


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

    def unchanged(tensor: Tensor, version: int) -> Tensor:
        check_version(tensor._version, version)  # which autograd skips under hooks
        return tensor

    def take(tensor: Tensor) -> Packed:
        packed = pack(tensor)
        if packed is not None:
            return packed
        if around is not None:
            return partial(around[1], around[0](tensor))
        # Detached, to avoid a cycle between an operator's output and its autograd node.
        return partial(unchanged, tensor.detach(), tensor._version)

    with torch.autograd.graph.saved_tensors_hooks(take, lambda packed: packed()):
        yield


def same_view(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that views the storage of another tensor as this one views its own."""
    dtype, layout = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())
    return lambda other: torch.empty(0, dtype=dtype, device=other.device).set_(other.untyped_storage(), *layout)


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


class OffloadWindow:
    """Moves storages out and back, with at most `window_bytes` (or one larger storage) in transit."""

    def __init__(self, device: torch.device, space: Space, *, window_bytes: int) -> None:
        self.device = torch.empty(0, device=device).device  # with its index, as tensors report it
        self.space = space
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
        view = same_view(tensor)
        return lambda: view(self._fetch(moved))

    def _store(self, tensor: Tensor) -> "_Moved":
        resident = bytes_of(tensor)
        extent: Any = self.space.take(resident.numel())
        moved = _Moved(self, tensor, resident, extent, self.space.store(resident, extent))
        self._forget_the_dead()
        self._moved.append(weakref.ref(moved))
        self._leaving.append(weakref.ref(moved))
        self._known[storage_key(tensor), tensor._version] = moved
        self._enter(moved)
        # Release the oldest until the window is within its limit; the newest stays whatever its size.
        while self.used_bytes > self.window_bytes and len(self._leaving) > 1:
            oldest = self._leaving.popleft()()
            if oldest is not None and oldest.in_window:
                oldest.drop()
                self._exit(oldest)
        return moved

    def _fetch(self, moved: "_Moved") -> Tensor:
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
        for following in (reference() for reference in reversed(self._moved)):
            if following is None or following.resident is not None:
                continue
            if self.used_bytes and self.used_bytes + following.byte_count > self.window_bytes:
                break
            self._load(following)
        return resident

    def _load(self, moved: "_Moved") -> None:
        # Allocated on the current stream, which waits for the copy before it reads or frees.
        target = torch.empty(moved.byte_count, dtype=torch.uint8, device=self.device)
        moved.source, moved.resident, moved.arrival = None, target, self.space.load(moved.extent, target)
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
        self.space.give(moved.extent)

    def _forget_the_dead(self) -> None:
        while self._moved and self._moved[-1]() is None:
            self._moved.pop()
        while self._leaving and self._leaving[0]() is None:
            self._leaving.popleft()


class _Moved:
    """One storage: saved in an extent, and for a while on the GPU too."""

    def __init__(
        self, window: OffloadWindow, source: Tensor, resident: Tensor, extent: Any, copied: CopyInFlight
    ) -> None:
        self.window = window
        self.extent = extent
        self.copied = copied  # after it the GPU memory is free
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
        self.copied.wait(self.stream)
        self.source = self.resident = None

    def __del__(self) -> None:
        # The GPU memory returns to its stream, so that stream must wait for copies that read or write it.
        if self.source is not None:
            self.copied.wait(self.stream)
        elif self.arrival is not None and self.in_window:
            with torch.cuda.stream(self.stream):
                self.arrival.wait()
        self.window.release(self)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
