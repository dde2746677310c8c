"""Weights on the host: a block's parameters are copied to the GPU before it runs and dropped afterwards.

Other techniques handle gradients and optimizer states; they find each parameter on its device when they step it. It
does not know which blocks are worth it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tonnage.fit.modules import replace_forward, why_not_blocks
from tonnage.fit.moving.host import CopyLane, HostMemoryExhausted, host_limit_bytes
from tonnage.fit.moving.saved_tensors import Packed, bytes_of, saved_by, storage_key
from tonnage.fit.moving.streaming import (
    BlockWeights,
    Home,
    Nowhere,
    PinnedHome,
    StreamedTensor,
    WeightStreamer,
    place_all,
)
from tonnage.fit.stepping.one_by_one import OneByOneStepper
from tonnage.fit.stepping.parameter_step import parameter_steps, why_not_one_by_one
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training, Undo
from tonnage.units import format_bytes

Homes = Callable[[int], Home]  # takes the bytes to hold

_NARROWS = "it narrows each parameter where it stands, and the values of these are on the host"
CONFLICTS = {"master-weights": _NARROWS, "stochastic-bf16": _NARROWS}


@dataclass(frozen=True, kw_only=True)
class WeightStreaming(Technique):
    name: ClassVar[str] = "weight-streaming"
    title: ClassVar[str] = "weights on the host"
    order: ClassVar[int] = 35
    conflicts: ClassVar[Mapping[str, str]] = CONFLICTS
    refusal: ClassVar[str] = "Weights cannot be streamed from the host: {reason}."

    blocks: tuple[str, ...]
    slots: int = 2  # blocks on the GPU at a time: one runs, the others are in transit
    host_bytes: int | None = None  # most bytes to pin; default: all that is free

    def why_not(self, training: Training) -> str | None:
        if self.slots < 2:
            return f"slots={self.slots}, but one block comes while another runs"
        reason = why_not_blocks(training.model, self.blocks) or why_not_one_by_one(training.optimizer)
        if reason is not None:
            return reason
        return why_not_streamed(training.model, self.blocks)

    def place(self, training: Training, stack: ExitStack) -> None:
        load_lane, store_lane = CopyLane(training.device), CopyLane(training.device)
        owned = streamed_parameters(training.model, self.blocks)
        needed_bytes = sum(place_all(parameters)[1] for parameters in owned.values())
        check_room(needed_bytes, host_limit_bytes(training.device, self.host_bytes), where="the host")

        def home(byte_count: int) -> Home:
            return PinnedHome(byte_count, training.device, load_lane, store_lane)

        stream_weights(training, self.blocks, home, slots=self.slots, stack=stack)


def check_room(needed_bytes: int, free_bytes: int, *, where: str) -> None:
    if needed_bytes > free_bytes:
        raise NotApplicable(
            f"{format_bytes(needed_bytes)} of weights would go to {where}, which has {format_bytes(free_bytes)} for them.",
            hint="Name fewer blocks.",
        )


def streamed_parameters(model: nn.Module, names: tuple[str, ...]) -> dict[str, list[nn.Parameter]]:
    """Return each block's parameters that no other part of the model uses."""
    owners: dict[nn.Parameter, set[str | None]] = defaultdict(set)
    for module_name, module in model.named_modules(remove_duplicate=False):
        owner = next((name for name in names if f"{module_name}.".startswith(f"{name}.")), None)
        for parameter in module.parameters(recurse=False):
            owners[parameter].add(owner)
    blocks = {name: model.get_submodule(name) for name in names}
    return {name: [p for p in block.parameters() if owners[p] == {name}] for name, block in blocks.items()}


def why_not_streamed(model: nn.Module, names: tuple[str, ...]) -> str | None:
    for name, parameters in streamed_parameters(model, names).items():
        if not parameters:
            return f"the block {name!r} has no parameters of its own"
        if any(type(parameter.data) is not Tensor for parameter in parameters):
            return f"the block {name!r} has parameters that are sharded or of a tensor type of their own"
        if any(bytes_of(p.data).numel() != p.numel() * p.itemsize for p in parameters):
            return f"the block {name!r} has parameters that share their memory with others"
    return None


def stream_weights(training: Training, names: tuple[str, ...], homes: Homes, *, slots: int, stack: ExitStack) -> None:
    """Move the weights of these blocks into homes of this kind."""
    blocks: dict[str, BlockWeights] = {}
    nowhere = Nowhere(training.device)
    try:
        for name, parameters in streamed_parameters(training.model, names).items():
            places, byte_count = place_all(parameters)
            blocks[name] = BlockWeights(places, byte_count, homes(byte_count), nowhere)
            stack.callback(blocks[name].return_for_good)
            blocks[name].leave()
    except HostMemoryExhausted as error:
        raise NotApplicable(str(error), hint=error.hint) from error
    # A step may still run on another stream or on the host, and write where another block's weights will be.
    steps = parameter_steps(training.optimizer)
    streamer = WeightStreamer([*blocks.values()], training.device, slots=slots, finish_changes=steps.finish)
    stack.callback(streamer.close)
    for name, weights in blocks.items():
        block = training.model.get_submodule(name)
        stack.callback(replace_forward(block, _streaming(block, streamer, weights)))
        stack.callback(_keep_state_dict_plain(block, streamer, weights))
    stack.callback(steps.bring_by(streamer.changing))
    stack.callback(training.replace_stepper(OneByOneStepper(training.stepper)))


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
            shape = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
            return StreamedTensor(streamer, weights, *shape)

        with saved_by(pack):
            outputs = before(*args, **kwargs)
        # An autograd function inside may differentiate by its parameters without having saved them.
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(bring)
        return outputs

    return forward


def _keep_state_dict_plain(block: nn.Module, streamer: WeightStreamer, weights: BlockWeights) -> Undo:
    loading: list[Tensor] = []

    def give(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
        streamer.take_home(weights)
        values = weights.home.read()
        places = {place.parameter: place for place in weights.places}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            entry = state_dict.get(prefix + name)
            if parameter in places and entry is not None and entry is not parameter:  # it is, with keep_vars
                state_dict[prefix + name] = places[parameter].view(values)

    def open_home(module: nn.Module, states: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise NotApplicable(
                f"load_state_dict(assign=True) would put other parameters in place of those of {prefix.removesuffix('.')!r}, "
                "whose values are on the host.",
                hint="Load without assign=True, or undo the technique first.",
            )
        streamer.forget(weights)
        loading.append(weights.home.read())
        weights.point_at(loading[0])

    def close_home(module: nn.Module, _: Any) -> None:
        weights.point_nowhere()
        weights.home.overwrite(loading.pop())

    with ExitStack() as stack:
        for handle in (
            block.register_state_dict_post_hook(give),
            block.register_load_state_dict_pre_hook(open_home),
            block.register_load_state_dict_post_hook(close_home),
        ):
            stack.callback(handle.remove)
        return stack.pop_all().close
