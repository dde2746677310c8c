"""Weights of blocks that live on the host and are copied to the GPU, block by block, while they are used.

A few slots on the GPU hold one block's weights each. `bring` loads a block and prefetches the one after it, in
forward or backward. Between uses a parameter is an expanded NaN: its shape, dtype and device are kept, its values
are in its home. It does not know what a block computes or how a parameter is stepped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from tonnage.fit.moving.host import CopyInFlight, CopyLane, pinned
from tonnage.fit.moving.saved_tensors import Arrival, bytes_of

ALIGNMENT_BYTES = 4096  # of each parameter in its block's bytes, as O_DIRECT requires


class Home(Protocol):
    """Where the bytes of one block's weights are stored."""

    def fetch(self, target: Tensor, *, after: Sequence["Home"]) -> Arrival:
        """Copy all bytes into GPU memory, after these homes have copied out what was in it."""

    def write(self, start: int, source: Tensor) -> None:
        """Copy some bytes from GPU memory, after the work queued on the current stream."""

    def wait_for_writes(self, stream: "torch.cuda.Stream | None") -> None:
        """Make a stream wait until pending writes have left the GPU."""

    def settle(self) -> None:
        """Make the host wait until all writes have arrived."""

    def read(self) -> Tensor:
        """Return all bytes on the host."""

    def overwrite(self, values: Tensor) -> None:
        """Replace all bytes from the host; `values` may be what `read` returned, changed in place."""

    def close(self) -> None: ...


class PinnedHome:
    def __init__(self, byte_count: int, device: torch.device, load_lane: CopyLane, store_lane: CopyLane) -> None:
        self._bytes = pinned(byte_count, device)
        self._load_lane, self._store_lane = load_lane, store_lane
        self._written = CopyInFlight(None)

    def fetch(self, target: Tensor, *, after: Sequence[Home]) -> CopyInFlight:
        for home in (*after, self):
            home.wait_for_writes(self._load_lane.stream)
        return self._load_lane.copy(self._bytes, target)

    def write(self, start: int, source: Tensor) -> None:
        self._written = self._store_lane.copy(source, self._bytes[start : start + source.numel()])

    def wait_for_writes(self, stream: "torch.cuda.Stream | None") -> None:
        self._written.wait(stream)

    def settle(self) -> None:
        self._written.done()

    def read(self) -> Tensor:
        self.settle()
        return self._bytes

    def overwrite(self, values: Tensor) -> None:
        if values is not self._bytes:
            self._bytes.copy_(values)

    def close(self) -> None:
        self.settle()


@dataclass(frozen=True, eq=False)
class ParameterPlace:
    """A parameter's position among its block's bytes."""

    parameter: nn.Parameter
    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def bytes_in(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.byte_count]

    def view(self, buffer: Tensor) -> Tensor:
        return self.bytes_in(buffer).view(self.dtype).as_strided(self.size, self.stride)


def place_all(parameters: Sequence[nn.Parameter]) -> tuple[list[ParameterPlace], int]:
    """Lay out parameters one after another; return their places and the total bytes."""
    places: list[ParameterPlace] = []
    end = 0
    for parameter in parameters:
        places.append(ParameterPlace(parameter, end, parameter.dtype, parameter.size(), parameter.stride()))
        end += -(-places[-1].byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places, end


class Nowhere:
    """Placeholder tensors that take no memory: one NaN per dtype, expanded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of_type: dict[torch.dtype, Tensor] = {}

    def stand_in(self, place: ParameterPlace) -> Tensor:
        if place.dtype not in self._of_type:
            self._of_type[place.dtype] = torch.full((), torch.nan, device=self.device).to(place.dtype)
        return self._of_type[place.dtype].expand(place.size)


class BlockWeights:
    """The streamed parameters of one block."""

    def __init__(self, places: Sequence[ParameterPlace], byte_count: int, home: Home, nowhere: "Nowhere") -> None:
        self.places = places
        self.byte_count = byte_count
        self.home = home
        self.slot: _WeightSlot | None = None
        self.changed = False
        self._nowhere = nowhere

    def leave(self) -> None:
        """Move the values home and free the GPU memory of each parameter."""
        for place in self.places:
            self.home.write(place.start, bytes_of(place.parameter.data))
        self.home.settle()
        self.point_nowhere()

    def point_at(self, buffer: Tensor) -> None:
        for place in self.places:
            place.parameter.data = place.view(buffer)

    def point_nowhere(self) -> None:
        for place in self.places:
            place.parameter.data = self._nowhere.stand_in(place)

    def return_for_good(self) -> None:
        values = self.home.read()
        for place in self.places:
            fresh = torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=self._nowhere.device)
            place.parameter.data = fresh.copy_(place.view(values))
        self.home.close()


@dataclass(eq=False)
class _WeightSlot:
    buffer: Tensor
    weights: BlockWeights | None = None
    arrival: Arrival = field(default_factory=lambda: CopyInFlight(None))


class WeightStreamer:
    """Loads blocks, in the order given, into `slots` slots on the GPU."""

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        device: torch.device,
        *,
        slots: int,
        finish_changes: Callable[[], None] = lambda: None,
    ) -> None:
        self._blocks = blocks
        self._finish_changes = finish_changes
        self._index = {weights: index for index, weights in enumerate(blocks)}
        self._of = {place.parameter: weights for weights in blocks for place in weights.places}
        largest = max(weights.byte_count for weights in blocks)
        # Least recently used first.
        self._slots = [_WeightSlot(torch.empty(largest, dtype=torch.uint8, device=device)) for _ in range(slots)]
        self._current: BlockWeights | None = None

    def bring(self, weights: BlockWeights) -> Tensor:
        """Load the block and point its parameters at it; return its bytes for the current stream."""
        slot = weights.slot or self._load(weights)
        if weights is not self._current:
            slot.arrival.wait()
            weights.point_at(slot.buffer)
            self._touch(slot)
            self._current = weights
            # Prefetch the next block in this direction.
            in_backward = torch._C._current_graph_task_id() != -1
            index = self._index[weights] + (-1 if in_backward else 1)
            if 0 <= index < len(self._blocks) and self._blocks[index].slot is None:
                self._load(self._blocks[index])
        return slot.buffer

    @contextmanager
    def changing(self, parameter: nn.Parameter) -> Iterator[None]:
        """Keep the parameter on the GPU inside this context; changes go home at the latest when its block leaves."""
        if parameter in self._of:
            self.bring(self._of[parameter])
            self._of[parameter].changed = True
        yield

    def take_home(self, weights: BlockWeights) -> None:
        """Write changes made on the GPU back home."""
        if weights.changed and weights.slot is not None:
            self._finish_changes()
            weights.home.write(0, weights.slot.buffer[: weights.byte_count])
            weights.changed = False

    def forget(self, weights: BlockWeights) -> None:
        """Drop a block from its slot, since its values at home are about to change."""
        if weights.slot is not None:
            self._vacate(weights.slot)

    def close(self) -> None:
        for slot in self._slots:
            self._vacate(slot)
        self._slots.clear()

    def _load(self, weights: BlockWeights) -> _WeightSlot:
        slot = next(slot for slot in self._slots if slot.weights is None or slot.weights is not self._current)
        previous = [slot.weights.home] if slot.weights is not None else []
        self._vacate(slot)
        slot.arrival = weights.home.fetch(slot.buffer[: weights.byte_count], after=previous)
        slot.weights, weights.slot = weights, slot
        self._touch(slot)
        return slot

    def _touch(self, slot: _WeightSlot) -> None:
        self._slots.remove(slot)
        self._slots.append(slot)

    def _vacate(self, slot: _WeightSlot) -> None:
        if slot.weights is not None:
            self.take_home(slot.weights)
            slot.weights.point_nowhere()
            slot.weights.slot = None
            if slot.weights is self._current:
                self._current = None
        slot.weights = None


@dataclass(frozen=True)
class StreamedTensor:
    """A view of a block's weights saved for backward: its position among the block's bytes, not the bytes."""

    streamer: WeightStreamer
    weights: BlockWeights
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        storage = self.streamer.bring(self.weights).untyped_storage()
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, self.offset, self.size, self.stride)
