"""Weights on the host: a block's parameters are copied to the GPU before it runs and dropped afterwards.

Other techniques handle gradients and optimizer states; they find each parameter on its device when they step it. It
does not know which blocks are worth it.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tonnage.fit.modules import replace_forward, why_not_blocks
from tonnage.fit.moving.host import HostMemoryExhausted, PinnedSpace, Space, host_limit_bytes
from tonnage.fit.moving.saved_tensors import Packed, bytes_of, same_view, saved_by, storage_key
from tonnage.fit.moving.streaming import BlockWeights, Nowhere, WeightStreamer, lay_out
from tonnage.fit.stepping.one_by_one import OneByOneStepper
from tonnage.fit.stepping.parameter_step import parameter_steps, why_not_one_by_one
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training
from tonnage.units import format_bytes


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
        free_bytes = host_limit_bytes(training.device, self.host_bytes)
        space = PinnedSpace(training.device, free_bytes)
        stream_weights(training, self.blocks, space, free_bytes, where="the host", slots=self.slots, stack=stack)


def streamed_parameters(model: nn.Module, names: tuple[str, ...]) -> dict[str, list[nn.Parameter]]:
    """Return each block's parameters that no other part of the model uses."""
    owners: dict[nn.Parameter, set[str | None]] = defaultdict(set)
    for module_name, module in model.named_modules(remove_duplicate=False):
        owner = next((name for name in names if f"{module_name}.".startswith(f"{name}.")), None)
        for parameter in module.parameters(recurse=False):
            owners[parameter].add(owner)
    blocks = {name: model.get_submodule(name) for name in names}
    return {name: [p for p in block.parameters() if owners[p] == {name}] for name, block in blocks.items()}


def stream_weights(
    training: Training,
    names: tuple[str, ...],
    space: Space,
    free_bytes: int,
    *,
    where: str,
    slots: int,
    stack: ExitStack,
) -> None:
    """Move the weights of these blocks to a space with this much room."""
    owned = streamed_parameters(training.model, names)
    needed_bytes = sum(lay_out(parameters)[1] for parameters in owned.values())
    if needed_bytes > free_bytes:
        raise NotApplicable(
            f"{format_bytes(needed_bytes)} of weights would go to {where}, which has {format_bytes(free_bytes)} for them.",
            hint="Name fewer blocks.",
        )
    blocks: dict[str, BlockWeights] = {}
    nowhere = Nowhere(training.device)
    try:
        for name, parameters in owned.items():
            blocks[name] = BlockWeights(parameters, space, nowhere)
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
        _keep_state_dict_plain(block, streamer, weights, stack)
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

    for handle in (
        block.register_state_dict_post_hook(give),
        block.register_load_state_dict_pre_hook(open_values),
        block.register_load_state_dict_post_hook(close_values),
    ):
        stack.callback(handle.remove)
