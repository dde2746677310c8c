"""Keep on disk what techniques otherwise keep on the host: activations, block weights, optimizer states."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tonnage.fit.moving.disk import DiskSpace, Extent, Loaded
from tonnage.fit.moving.host import CopyInFlight
from tonnage.fit.moving.saved_tensors import SavedBytes
from tonnage.fit.moving.streaming import Home
from tonnage.fit.stepping.parameter_step import Group, State, StateStep, StepFunction, own_state, plain_state

_ON_DISK = "disk"  # the only state key of a parameter here


class DiskKeeper:
    """Stores activations on disk."""

    def __init__(self, space: DiskSpace) -> None:
        self._space = space

    def keep(self, source: Tensor) -> SavedBytes:
        extent = self._space.take(source.numel())
        return _DiskBytes(self._space, extent, self._space.store(source, extent))


@dataclass(frozen=True)
class _DiskBytes:
    space: DiskSpace
    extent: Extent
    copied: CopyInFlight

    def load(self, target: Tensor) -> Loaded:
        return self.space.load(self.extent, target)

    def release(self) -> None:
        self.space.give(self.extent)


class DiskHome:
    """Stores the weights of one block on disk."""

    def __init__(self, space: DiskSpace, byte_count: int) -> None:
        self._space = space
        self._extent = space.take(byte_count)
        self._copied = CopyInFlight(None)

    def fetch(self, target: Tensor, *, after: Sequence[Home]) -> Loaded:
        for home in (*after, self):
            home.wait_for_writes(self._space.load_lane.stream)
        return self._space.load(self._extent, target)

    def write(self, start: int, source: Tensor) -> None:
        self._copied = self._space.store(source, self._extent, start=start)

    def wait_for_writes(self, stream: "torch.cuda.Stream | None") -> None:
        self._copied.wait(stream)

    def settle(self) -> None:
        self._space.settle(self._extent)

    def read(self) -> Tensor:
        return self._space.read_all(self._extent)

    def overwrite(self, values: Tensor) -> None:
        self.settle()
        self._space.write(values, self._extent.start)

    def close(self) -> None:
        self.settle()
        self._space.give(self._extent)


@dataclass(eq=False)
class _StatesOnDisk:
    """One parameter's states: tensors in an extent, counters and the like here."""

    extent: Extent
    tensors: dict[str, tuple[int, torch.dtype, torch.Size, tuple[int, ...]]]  # start in bytes, and layout
    others: State

    def views(self, buffer: Tensor) -> State:
        return {
            name: buffer[start : start + size.numel() * dtype.itemsize].view(dtype).as_strided(size, stride)
            for name, (start, dtype, size, stride) in self.tensors.items()
        }


class DiskStep(StateStep):
    """Steps a parameter with states that are read from disk and written back.

    While one parameter is stepped, the states of its successor in the previous step are prefetched.
    """

    def __init__(self, inner: StepFunction, space: DiskSpace, device: torch.device) -> None:
        self._inner = inner
        self.space = space
        self._device = device
        self._coming: dict[_StatesOnDisk, tuple[Tensor, Loaded]] = {}
        self._leaving: list[tuple[Tensor, CopyInFlight]] = []
        self._next: dict[_StatesOnDisk, _StatesOnDisk] = {}
        self._first: _StatesOnDisk | None = None
        self._last: _StatesOnDisk | None = None

    @torch.no_grad()
    def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        kept: _StatesOnDisk | None = state.get(_ON_DISK)
        if kept is None:
            made: State = {}
            self._inner(parameter, gradient, made, group)
            if made:
                state[_ON_DISK] = self._keep(made)
            return
        buffer = self._load(kept)
        here = {**kept.others, **kept.views(buffer)}
        self._inner(parameter, gradient, here, group)
        self._store(kept, here, buffer)

    def plain_state(self, parameter: Tensor, state: State) -> State:
        if not state:
            return {}
        kept: _StatesOnDisk = state[_ON_DISK]
        tensors = kept.views(self.space.read_all(kept.extent))
        if isinstance(self._inner, StateStep):
            tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        plain = plain_state(self._inner, parameter, {**kept.others, **tensors})
        return {name: v.cpu() if isinstance(v, Tensor) and v.dim() else v for name, v in plain.items()}

    def own_state(self, parameter: Tensor, plain: State, group: Group) -> State:
        self._coming.clear()  # reads in flight hold their buffers until they finish
        self._next.clear()
        self._first = self._last = None
        made = own_state(self._inner, parameter, plain, group)
        return {_ON_DISK: self._keep(made)} if made else {}

    def _keep(self, made: State) -> _StatesOnDisk:
        tensors: dict[str, tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = {}
        end = 0
        for name, value in made.items():
            if isinstance(value, Tensor) and value.dim():
                like = torch.empty_like(value, device="meta")  # dense, whatever the value's layout
                tensors[name] = (end, value.dtype, value.size(), like.stride())
                end += -(-value.numel() * value.itemsize // 16) * 16
        others = {name: value for name, value in made.items() if name not in tensors}
        kept = _StatesOnDisk(self.space.take(end), tensors, others)
        weakref.finalize(kept, self.space.give, kept.extent).atexit = False
        self._store(kept, made, torch.empty(end, dtype=torch.uint8, device=self._device))
        return kept

    def _load(self, kept: _StatesOnDisk) -> Tensor:
        buffer, loaded = self._coming.pop(kept) if kept in self._coming else self._start_loading(kept)
        loaded.wait()
        # Prefetch nothing after the last parameter: the first one's states would stay on the GPU during the next
        # forward.
        self._first = self._first or kept
        if self._last is not None and kept is not self._first:
            self._next[self._last] = kept
        self._last = kept
        following = self._next.get(kept)
        if following is not None and following not in self._coming:
            self._coming[following] = self._start_loading(following)
        return buffer

    def _start_loading(self, kept: _StatesOnDisk) -> tuple[Tensor, Loaded]:
        buffer = torch.empty(kept.extent.byte_count, dtype=torch.uint8, device=self._device)
        return buffer, self.space.load(kept.extent, buffer)

    def _store(self, kept: _StatesOnDisk, state: State, buffer: Tensor) -> None:
        for name, view in kept.views(buffer).items():
            if state[name].data_ptr() != view.data_ptr():
                view.copy_(state[name])
        kept.others = {name: value for name, value in state.items() if name not in kept.tensors}
        self._leaving.append((buffer, self.space.store(buffer, kept.extent)))
        while len(self._leaving) > 1:
            self._let_go()

    def _let_go(self) -> None:
        """Release the oldest buffer in flight; the current stream waits for its copy."""
        _, copied = self._leaving.pop(0)
        copied.wait()

    def finish(self) -> None:
        """Release all buffers in flight; the current stream waits for their copies."""
        while self._leaving:
            self._let_go()
