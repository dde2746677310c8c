"""One block, the rest of the model, the optimizer and the link, each measured alone on the device that is there.

A block is run on the inputs that the model gave it; the rest is run with blocks that hand their input through. So a
model is profiled whose whole step would not fit. Nothing of the training changes: gradients are dropped as they are
made, buffers and random states are put back.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tonnage.fit.measure.meter import Meter, Watch
from tonnage.fit.measure.profile import BlockProfile, OutsideProfile
from tonnage.fit.modules import replace_forward
from tonnage.fit.training import Batch, Training


@dataclass(frozen=True)
class BlockCall:
    """How the model called a block, and the shape of what came back."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any  # leaves that are tensors are replaced by their shape and type
    autocast: torch.dtype | None = None  # the type, where the caller's loss runs under an autocast of its own

    @property
    def hidden(self) -> Tensor:
        """The tensor that flows from block to block: the first of floating type."""
        return next(leaf for leaf in tree_leaves((self.args, self.kwargs)) if _floats(leaf))

    def with_gradient(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with what flows from block to block as a leaf that wants its gradient."""
        hidden = self.hidden

        def leaf(value: Any) -> Any:
            return hidden.detach().requires_grad_() if value is hidden else value

        args, kwargs = tree_map(leaf, (self.args, self.kwargs))
        return args, kwargs

    @contextmanager
    def surroundings(self, training: Training) -> Iterator[None]:
        """The contexts around a forward pass, and the autocast that the caller's own loss may enter."""
        narrow = torch.autocast(
            training.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )
        with training.forward_pass(), narrow:
            yield


def bytes_of(tree: Any) -> int:
    """Of the storages in a nesting, each once."""
    storages = {leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def parameter_bytes(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Random states and buffers (running statistics) as they were, once it is over."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.numel()}
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])


@contextmanager
def dropped_gradients(module: nn.Module) -> Iterator[None]:
    """Each gradient is dropped as soon as it is complete; those that were there come back afterwards."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    handles = [parameter.register_post_accumulate_grad_hook(drop) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@dataclass(frozen=True)
class Calls:
    """How the model calls its blocks: one call for each kind, and the kind of every block."""

    by_kind: dict[str, tuple[str, BlockCall]]  # the block that was seen, and its call
    kinds: dict[str, str]  # by name of the block, in the order in which they ran


def capture_calls(training: Training, blocks: dict[str, nn.Module], batch: Batch) -> Calls:
    calls = Calls({}, {})
    with ExitStack() as stack, torch.no_grad(), training.forward_pass():
        for name, block in blocks.items():

            def keep(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                kind = calls.kinds[name] = kind_of(module, args, kwargs)
                if kind not in calls.by_kind:
                    autocast = _autocast_dtype(training.device)
                    calls.by_kind[kind] = name, BlockCall(args, kwargs, tree_map(_described, output), autocast)

            handle = block.register_forward_hook(keep, with_kwargs=True)
            stack.callback(handle.remove)
        training.loss(training.model, batch)
    return calls


def kind_of(block: nn.Module, args: Any = (), kwargs: Any = None) -> str:
    """Blocks of one kind cost the same: same class, same parameters, same inputs."""
    parameters = ",".join(f"{tuple(p.shape)}{p.dtype}{p.requires_grad}" for p in block.parameters())
    inputs = ",".join(f"{tuple(t.shape)}{t.dtype}" for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor))
    return f"{type(block).__name__}|{hash(parameters) & 0xFFFFFFFF:x}|{hash(inputs) & 0xFFFFFFFF:x}"


def measure_block(training: Training, meter: Meter, name: str, block: nn.Module, call: BlockCall) -> BlockProfile:
    """Forward and backward of one block, as it stands: compiled, tiled or recomputed if a technique made it so."""
    hidden = call.hidden
    with dropped_gradients(block), undisturbed(block, meter.device):
        _run_block(training, block, call)  # compiles, warms up
        forward, backward = _watch_block(training, meter, block, call)
        forward_s = meter.seconds(lambda: _forward_block(training, block, call))
        both_s = meter.seconds(lambda: _run_block(training, block, call))
    return BlockProfile(
        name=name,
        kind=kind_of(block, call.args, call.kwargs),
        parameters_bytes=parameter_bytes(block.parameters()),
        input_bytes=hidden.numel() * hidden.element_size(),
        kept_bytes=forward.kept_bytes,
        forward_peak_bytes=forward.peak_bytes,
        backward_peak_bytes=backward.peak_bytes,
        forward_s=forward_s,
        backward_s=both_s - forward_s,
    )


def measure_outside(
    training: Training, meter: Meter, blocks: dict[str, nn.Module], calls: Calls, batch: Batch
) -> OutsideProfile:
    """The whole model with blocks that hand their input through."""
    with ExitStack() as stack:
        stack.enter_context(dropped_gradients(training.model))
        stack.enter_context(undisturbed(training.model, meter.device))
        for name, kind in calls.kinds.items():
            stack.callback(replace_forward(blocks[name], _hand_through(calls.by_kind[kind][1].output)))

        def forward() -> Tensor:
            with training.forward_pass():
                return training.loss(training.model, batch)

        forward().backward()
        with meter.watch() as whole:
            loss = forward()
            kept_bytes = meter.allocated_bytes - whole.before_bytes
            loss.backward()
            del loss
        forward_s = meter.seconds(forward)
        both_s = meter.seconds(lambda: forward().backward())
    return OutsideProfile(
        kept_bytes=kept_bytes,
        peak_bytes=whole.peak_bytes,
        forward_s=forward_s,
        backward_s=both_s - forward_s,
    )


def _watch_block(training: Training, meter: Meter, block: nn.Module, call: BlockCall) -> tuple[Watch, Watch]:
    hidden, saved = call.hidden.untyped_storage().data_ptr(), set[int]()

    def note(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with meter.watch() as forward, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = _forward_block(training, block, call)
    forward.kept_bytes -= bytes_of(output)
    if hidden in saved:
        forward.kept_bytes += bytes_of(call.hidden)
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients = [torch.ones_like(end) for end in ends]
    del output
    with meter.watch() as backward:
        torch.autograd.backward(ends, gradients)
    return forward, backward


def _run_block(training: Training, block: nn.Module, call: BlockCall) -> None:
    output = _forward_block(training, block, call)
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


def _forward_block(training: Training, block: nn.Module, call: BlockCall) -> Any:
    args, kwargs = call.with_gradient()
    with call.surroundings(training):
        return block(*args, **kwargs)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _hand_through(output: Any) -> Any:
    """A forward that returns its input in the place of the output of that shape, and empty tensors elsewhere."""
    leaves, structure = tree_flatten(output, is_leaf=lambda leaf: isinstance(leaf, _Described))

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = next(leaf for leaf in tree_leaves((args, kwargs)) if _floats(leaf))
        filled = [leaf.like(hidden) if isinstance(leaf, _Described) else leaf for leaf in leaves]
        return tree_unflatten(filled, structure)

    return forward


@dataclass(frozen=True)
class _Described:
    """A tensor's shape and type, without its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def like(self, hidden: Tensor) -> Tensor:
        if self.shape[1:] == tuple(hidden.shape)[1:]:
            return hidden.to(self.dtype)
        return torch.zeros(self.shape, dtype=self.dtype, device=hidden.device)


def _described(leaf: Any) -> Any:
    return _Described(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
