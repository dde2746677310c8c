"""Weights on the host: a block's parameters are copied to the GPU before it runs and dropped afterwards.

A few slots on the GPU hold one block's weights each. `bring` loads a block and prefetches the one after it, in
forward or backward. Between uses a parameter is an expanded NaN: its shape, dtype and device are kept, its values
are in a space off the GPU. Other techniques handle gradients and optimizer states; they find each parameter on its
device when they step it. It does not know which blocks are worth it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tonnage.fit.modules import replace_forward, why_not_blocks
from tonnage.fit.moving import host
from tonnage.fit.moving.saved_tensors import Packed, bytes_of, same_view, saved_by, storage_key
from tonnage.fit.stepping.parameter_step import OneByOneStepper, parameter_steps, why_not_one_by_one
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training
from tonnage.units import format_bytes


def packing_of(parameters: Iterable[nn.Parameter]) -> host.Packing:
    layouts = ((parameter, parameter.dtype, parameter.size(), parameter.stride()) for parameter in parameters)
    return host.Packing.of(layouts, alignment=host.ALIGNMENT_BYTES)


def nan_of(device: torch.device) -> Callable[[torch.dtype], Tensor]:
    """Return a function that gives one NaN per dtype; expanded, it stands for values that are elsewhere."""
    return cache(lambda dtype: torch.full((), torch.nan, device=device).to(dtype))


class BlockWeights:
    """The streamed parameters of one block: their bytes in a space, and for a while in a slot on the GPU."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], space: host.Space, nan: Callable[[torch.dtype], Tensor]
    ) -> None:
        """Move the values off the GPU and free the memory of each parameter."""
        packing = packing_of(parameters)
        self.places, self.byte_count = packing.places, packing.byte_count
        self.slot: _WeightSlot | None = None
        self.changed = False
        self._space, self._nan = space, nan
        self._extent: Any = space.take(self.byte_count)
        self._written = host.CopyInFlight(None)
        for parameter, place in self.places.items():
            self.write(place.start, bytes_of(parameter.data))
        self._settle()
        self.point_nowhere()

    def write(self, start: int, source: Tensor) -> None:
        """Copy some bytes from GPU memory, after the work queued on the current stream."""
        self._written = self._space.store(source, self._extent, start=start)

    def fetch(self, target: Tensor, *, after: "BlockWeights | None") -> host.Arrival:
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
            parameter.data = self._nan(place.dtype).expand(place.size)

    def return_for_good(self) -> None:
        values = self.read()
        for parameter, place in self.places.items():
            fresh = torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=parameter.device)
            parameter.data = fresh.copy_(place.view(values))
        self._space.give(self._extent)


@dataclass(eq=False)
class _WeightSlot:
    buffer: Tensor
    weights: BlockWeights | None = None
    arrival: host.Arrival = field(default_factory=lambda: host.CopyInFlight(None))


class WeightStreamer:
    """Loads blocks, in the order given, into `slots` slots on the GPU."""

    def __init__(
        self, blocks: Sequence[BlockWeights], device: torch.device, *, slots: int, finish_steps: Callable[[], None]
    ) -> None:
        self._blocks = blocks
        self._finish_steps = finish_steps
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
            self._finish_steps()
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


class WeightStreaming(Technique, name="weight-streaming"):
    blocks: tuple[str, ...]
    slots: int = 2  # blocks on the GPU at a time: one runs, the others are in transit
    host_bytes: int | None = None  # most bytes to pin; default: all that is free

    def why_not(self, training: Training) -> str | None:
        if self.slots < 2:
            return f"slots={self.slots}, but one block comes while another runs"
        reason = why_not_blocks(training.model, self.blocks) or why_not_one_by_one(training.optimizer)
        if reason is not None:
            return reason
        for name, parameters in streamed_parameters(training.model, self.blocks).items():
            if not parameters:
                return f"the block {name!r} has no parameters of its own"
            if any(type(parameter.data) is not Tensor for parameter in parameters):
                return f"the block {name!r} has parameters that are sharded or of a tensor type of their own"
            if any(bytes_of(p.data).numel() != p.numel() * p.itemsize for p in parameters):
                return f"the block {name!r} has parameters that share their memory with others"
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        free_bytes = host.host_limit_bytes(training.device, self.host_bytes)
        space = host.PinnedSpace(training.device, free_bytes)
        self.place_in(space, training, stack, free_bytes=free_bytes, where="the host")

    def place_in(self, space: host.Space, training: Training, stack: ExitStack, *, free_bytes: int, where: str) -> None:
        """Move the weights to a space with this much room."""
        owned = streamed_parameters(training.model, self.blocks)
        needed_bytes = sum(packing_of(parameters).byte_count for parameters in owned.values())
        if needed_bytes > free_bytes:
            raise NotApplicable(
                f"{format_bytes(needed_bytes)} of weights would go to {where}, which has {format_bytes(free_bytes)} for them.",
                hint="Name fewer blocks.",
            )
        blocks: dict[str, BlockWeights] = {}
        nan = nan_of(training.device)
        try:
            for name, parameters in owned.items():
                blocks[name] = BlockWeights(parameters, space, nan)
                stack.callback(blocks[name].return_for_good)
        except host.HostMemoryExhausted as error:
            raise NotApplicable(str(error), hint=error.hint) from error
        # A step may still run on another stream or on the host, and write where another block's weights will be.
        steps = parameter_steps(training.optimizer)
        streamer = WeightStreamer([*blocks.values()], training.device, slots=self.slots, finish_steps=steps.finish)
        stack.callback(streamer.close)
        for name, weights in blocks.items():
            block = training.model.get_submodule(name)
            stack.callback(replace_forward(block, _streaming(block, streamer, weights)))
            _keep_state_dict_plain(block, streamer, weights, stack)
        stack.callback(steps.bring_by(streamer.changing))
        stack.callback(training.replace_stepper(OneByOneStepper(training.stepper)))


def streamed_parameters(model: nn.Module, names: tuple[str, ...]) -> dict[str, list[nn.Parameter]]:
    """Return each block's parameters that no other part of the model uses."""
    owners: dict[nn.Parameter, set[str | None]] = defaultdict(set)
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        owners[parameter].add(next((name for name in names if full_name.startswith(f"{name}.")), None))
    blocks = {name: model.get_submodule(name) for name in names}
    return {name: [p for p in block.parameters() if owners[p] == {name}] for name, block in blocks.items()}


def _streaming(block: nn.Module, streamer: WeightStreamer, weights: BlockWeights) -> Callable[..., Any]:
    before = block.forward

    def bring(gradient: Tensor) -> None:
        streamer.bring(weights)

    def forward(*args: Any, **kwargs: Any) -> Any:
        key = storage_key(streamer.bring(weights))
        if not torch.is_grad_enabled():
            return before(*args, **kwargs)

        def pack(tensor: Tensor) -> Packed | None:
            if storage_key(tensor) != key:
                return None
            view = same_view(tensor)  # the position among the block's bytes is saved, not the bytes
            return lambda: view(streamer.bring(weights))

        with saved_by(pack):
            outputs = before(*args, **kwargs)
        # An autograd function inside may differentiate by its parameters without having saved them.
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(bring)
        return outputs

    return forward


def _keep_state_dict_plain(block: nn.Module, streamer: WeightStreamer, weights: BlockWeights, stack: ExitStack) -> None:
    loading: list[Tensor] = []

    def give(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
        streamer.store_changes(weights)
        values = weights.read()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            entry = state_dict.get(prefix + name)
            if parameter in weights.places and entry is not None and entry is not parameter:  # it is, with keep_vars
                state_dict[prefix + name] = weights.places[parameter].view(values)

    def open_values(module: nn.Module, states: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise NotApplicable(
                f"load_state_dict(assign=True) would put other parameters in place of those of {prefix.removesuffix('.')!r}, "
                "whose values are on the host.",
                hint="Load without assign=True, or undo the technique first.",
            )
        streamer.forget(weights)
        loading.append(weights.read())
        weights.point_at(loading[0])

    def close_values(module: nn.Module, _: Any) -> None:
        weights.point_nowhere()
        weights.overwrite(loading.pop())

    stack.callback(block.register_state_dict_post_hook(give).remove)
    stack.callback(block.register_load_state_dict_pre_hook(open_values).remove)
    stack.callback(block.register_load_state_dict_post_hook(close_values).remove)
