"""Weights of blocks that live on the host and are copied to the GPU, block by block, while they are used.

A few slots on the GPU hold one block's weights each. `bring` loads a block and prefetches the one after it, in
forward or backward. Between uses a parameter is an expanded NaN: its shape, dtype and device are kept, its values
are in a space off the GPU. It does not know what a block computes or how a parameter is stepped.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tonnage.fit.moving.host import ALIGNMENT_BYTES, Arrival, CopyInFlight, Space, aligned
from tonnage.fit.moving.saved_tensors import bytes_of


@dataclass(frozen=True)
class Place:
    """A tensor's position among the bytes of a buffer."""

    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        flat = buffer[self.start : self.start + self.byte_count].view(self.dtype)
        return flat.as_strided(self.size, self.stride)


def lay_out(tensors: Iterable[Tensor], alignment: int = ALIGNMENT_BYTES) -> tuple[list[Place], int]:
    """Lay out tensors one after another; return their places and the total bytes."""
    places: list[Place] = []
    end = 0
    for tensor in tensors:
        places.append(Place(end, tensor.dtype, tensor.size(), tensor.stride()))
        end += aligned(places[-1].byte_count, alignment)
    return places, end


class Nowhere:
    """Placeholder tensors that take no memory: one NaN per dtype, expanded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of_type: dict[torch.dtype, Tensor] = {}

    def stand_in(self, place: Place) -> Tensor:
        if place.dtype not in self._of_type:
            self._of_type[place.dtype] = torch.full((), torch.nan, device=self.device).to(place.dtype)
        return self._of_type[place.dtype].expand(place.size)


class BlockWeights:
    """The streamed parameters of one block: their bytes in a space, and for a while in a slot on the GPU."""

    def __init__(self, parameters: Sequence[nn.Parameter], space: Space, nowhere: Nowhere) -> None:
        places, self.byte_count = lay_out(parameters)
        self.places = dict(zip(parameters, places, strict=True))
        self.slot: _WeightSlot | None = None
        self.changed = False
        self._space, self._nowhere = space, nowhere
        self._extent = space.take(self.byte_count)
        self._written = CopyInFlight(None)

    def leave(self) -> None:
        """Move the values off the GPU and free the memory of each parameter."""
        for parameter, place in self.places.items():
            self.write(place.start, bytes_of(parameter.data))
        self._settle()
        self.point_nowhere()

    def write(self, start: int, source: Tensor) -> None:
        """Copy some bytes from GPU memory, after the work queued on the current stream."""
        self._written = self._space.store(source, self._extent, start=start)

    def fetch(self, target: Tensor, *, after: "BlockWeights | None") -> Arrival:
        """Copy all bytes into GPU memory, after that block's bytes, if any, have been copied out of it."""
        for weights in (after, self):
            if weights is not None:
                weights._written.wait(self._space.load_lane.stream)
        return self._space.load(self._extent, target)

    def read(self) -> Tensor:
        """Return all bytes on the host."""
        self._settle()
        return self._space.read_all(self._extent)

    def overwrite(self, values: Tensor) -> None:
        """Replace all bytes from the host; `values` may be what `read` returned, changed in place."""
        self._settle()
        self._space.overwrite(self._extent, values)

    def _settle(self) -> None:
        self._written.done()
        self._space.settle(self._extent)

    def point_at(self, buffer: Tensor) -> None:
        for parameter, place in self.places.items():
            parameter.data = place.view(buffer)

    def point_nowhere(self) -> None:
        for parameter, place in self.places.items():
            parameter.data = self._nowhere.stand_in(place)

    def return_for_good(self) -> None:
        values = self.read()
        for parameter, place in self.places.items():
            fresh = torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=self._nowhere.device)
            parameter.data = fresh.copy_(place.view(values))
        self._space.give(self._extent)


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
        self._of = {parameter: weights for weights in blocks for parameter in weights.places}
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
        """Keep the parameter on the GPU inside this context; changes are stored at the latest when its block leaves."""
        if parameter in self._of:
            self.bring(self._of[parameter])
            self._of[parameter].changed = True
        yield

    def store_changes(self, weights: BlockWeights) -> None:
        """Write changes made on the GPU back to the space."""
        if weights.changed and weights.slot is not None:
            self._finish_changes()
            weights.write(0, weights.slot.buffer[: weights.byte_count])
            weights.changed = False

    def forget(self, weights: BlockWeights) -> None:
        """Drop a block from its slot, since its stored values are about to change."""
        if weights.slot is not None:
            self._vacate(weights.slot)

    def close(self) -> None:
        for slot in self._slots:
            self._vacate(slot)
        self._slots.clear()

    def _load(self, weights: BlockWeights) -> _WeightSlot:
        slot = next(slot for slot in self._slots if slot.weights is None or slot.weights is not self._current)
        previous = slot.weights
        self._vacate(slot)
        slot.arrival = weights.fetch(slot.buffer[: weights.byte_count], after=previous)
        slot.weights, weights.slot = weights, slot
        self._touch(slot)
        return slot

    def _touch(self, slot: _WeightSlot) -> None:
        self._slots.remove(slot)
        self._slots.append(slot)

    def _vacate(self, slot: _WeightSlot) -> None:
        if slot.weights is not None:
            self.store_changes(slot.weights)
            slot.weights.point_nowhere()
            slot.weights.slot = None
            if slot.weights is self._current:
                self._current = None
        slot.weights = None
