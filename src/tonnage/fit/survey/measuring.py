"""Measure one block, the rest of the model, the optimizer and the host link, each on its own.

A block runs on the inputs that the model gave it; the rest runs with blocks replaced by pass-throughs. So a model
can be profiled even if its whole step does not fit. The training is unchanged: gradients are dropped as they are
computed, buffers and RNG states are restored.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from tonnage.fit.gradients import taken_gradients
from tonnage.fit.modules import OF_EVERY_MODULE, eagerly, replace_forward, undisturbed
from tonnage.fit.survey.meter import Duration, GpuMeter, Watch
from tonnage.fit.survey.profile import BlockProfile, OutsideProfile
from tonnage.fit.training import Batch, Training

Required = tuple[bool, ...]  # for each flattened argument of a call: whether it requires a gradient
_PASSES = 12  # forward passes to try when the model skips blocks at random


@dataclass(frozen=True)
class BlockCall:
    """How the model called a block, and the shapes of its output.

    Tensor arguments are leaves that require a gradient where the model's own did.
    """

    training: Training
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any  # tensors are replaced by their shape and dtype
    autocast: torch.dtype | None = None  # the dtype, if the user's loss enters autocast itself

    @property
    def hidden(self) -> Tensor:
        """The tensor that flows from block to block: the first floating-point one, else the first."""
        return _hidden(self.args, self.kwargs)

    def with_gradient(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as new leaves; the hidden state always requires a gradient."""
        hidden = self.hidden

        def leaf(value: Any) -> Any:
            wanted = _floats(value) and (value is hidden or value.requires_grad)
            return value.detach().requires_grad_() if wanted else value

        args, kwargs = tree_map(leaf, (self.args, self.kwargs))
        return args, kwargs

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Enter the contexts of a forward pass, and the autocast that the user's loss may enter."""
        kind, narrow = self.training.device.type, self.autocast
        with (
            self.training.forward_pass(),
            torch.autocast(kind, narrow, enabled=narrow is not None, cache_enabled=False),
        ):
            yield

    def forward(self) -> Any:
        args, kwargs = self.with_gradient()
        with self.surroundings():
            return self.block(*args, **kwargs)

    def run(self, gradient: Callable[[Tensor], Tensor] = torch.ones_like) -> None:
        """Run forward and backward."""
        output = self.forward()
        ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(ends, [gradient(end) for end in ends])


def bytes_of(tree: Any) -> int:
    """Return the bytes of all storages in a pytree, counting each once."""
    storages = {leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def parameter_bytes(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def dropped_gradients(module: nn.Module) -> AbstractContextManager[None]:
    return taken_gradients(module, lambda name, gradient: None)


@dataclass(frozen=True)
class BlockCalls:
    """How the model calls its blocks: one call per kind, and the kind of each block."""

    by_kind: dict[str, tuple[str, BlockCall]]  # name of the block that was captured, and its call
    kinds: dict[str, str]  # by block name, in execution order
    by_chance: bool = False  # whether some passes skip blocks


def capture_calls(
    training: Training, blocks: dict[str, nn.Module], batch: Batch, required: dict[str, Required] | None = None
) -> BlockCalls:
    """Run the model until every block has run, a few times at most, since some models skip blocks at random.

    `required` says which block inputs require a gradient (see `required_gradients`).
    """
    calls, first = BlockCalls({}, {}), 0
    device = training.device.type

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves, structure = tree_flatten((args, kwargs))
        wanted = (required or {}).get(name, ())
        if len(wanted) == len(leaves):
            pairs = zip(leaves, wanted, strict=True)
            leaves = [leaf.detach().requires_grad_() if needed else leaf for leaf, needed in pairs]
            args, kwargs = tree_unflatten(leaves, structure)
        kind = calls.kinds[name] = kind_of(module, args, kwargs)
        if kind not in calls.by_kind:
            shapes = tree_map_only(Tensor, lambda leaf: _Described(tuple(leaf.shape), leaf.dtype), output)
            autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            calls.by_kind[kind] = name, BlockCall(training, module, args, kwargs, shapes, autocast)

    for _ in range(_PASSES if training.mesh is None else 1):
        try:
            with torch.no_grad():
                _see_blocks(training, blocks, batch, keep)
        except RuntimeError:  # the loss itself needs gradients
            _see_blocks(training, blocks, batch, keep)
        first = first or len(calls.kinds)
        if len(calls.kinds) == len(blocks):
            break
    if len(calls.kinds) == first:
        return calls
    return replace(calls, kinds={name: calls.kinds[name] for name in blocks if name in calls.kinds}, by_chance=True)


def required_gradients(training: Training, blocks: dict[str, nn.Module], batch: Batch) -> dict[str, Required]:
    """Return which inputs of each block require a gradient, or nothing if that cannot be determined.

    This needs an autograd graph. Saved tensors are dropped, so it takes no memory.
    """
    found: dict[str, Required] = {}

    def keep(name: str, _: nn.Module, args: Any, kwargs: Any, __: Any) -> None:
        found[name] = tuple(_floats(leaf) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))

    def missing(_: None) -> Tensor:
        raise RuntimeError("What was saved for backward is not there: only a forward pass was wanted.")

    hooks = saved_tensors_hooks(lambda _: None, missing)
    with suppress(RuntimeError), undisturbed(training.model, training.device), hooks:
        _see_blocks(training, blocks, batch, keep)
    return found


def _see_blocks(
    training: Training, blocks: dict[str, nn.Module], batch: Batch, see: Callable[[str, nn.Module, Any, Any, Any], None]
) -> None:
    with ExitStack() as stack, eagerly(), training.forward_pass():
        for name, block in blocks.items():
            stack.callback(block.register_forward_hook(partial(see, name), with_kwargs=True).remove)
        training.loss(training.model, batch)


def kind_of(block: nn.Module, args: Any = (), kwargs: Any = None) -> str:
    """Return a key that is equal for blocks of equal cost: same class, parameters, settings and inputs."""
    parameters = ",".join(f"{tuple(p.shape)}{p.dtype}{p.requires_grad}" for p in block.parameters())
    # Settings tell blocks of one class apart (sliding window, kind of attention). Layer indices do not.
    for module in block.modules():
        held = {k: v for k, v in vars(module).items() if isinstance(v, int | str) and k not in OF_EVERY_MODULE}
        counts = ("idx", "index", "layer_id")
        parameters += (
            str({name: value for name, value in held.items() if not any(word in name for word in counts)}) + ","
        )
    tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
    hidden = _hidden(args, kwargs or {}) if tensors else None  # always requires a gradient
    inputs = ",".join(f"{tuple(t.shape)}{t.dtype}{t is hidden or t.requires_grad}" for t in tensors)
    return f"{type(block).__name__}|{hash(parameters) & 0xFFFFFFFF:x}|{hash(inputs) & 0xFFFFFFFF:x}"


def measure_block(meter: GpuMeter, call: BlockCall) -> BlockProfile:
    """Measure forward and backward of one block as it is: compiled, tiled or recomputed if a technique made it so."""
    hidden = call.hidden
    with dropped_gradients(call.block), undisturbed(call.block, meter.device):
        call.run()  # compile and warm up
        forward, backward = _watch_block(meter, call)
        forward_time, whole_time = meter.time(call.forward), meter.time(call.run)
        if _floats(hidden):
            forward_time, whole_time = _without_frame(meter, call, forward_time, whole_time)
    return BlockProfile(
        parameters_bytes=parameter_bytes(call.block.parameters()),
        input_bytes=hidden.numel() * hidden.element_size(),
        kept_bytes=forward.kept_bytes,
        forward_peak_bytes=forward.peak_bytes,
        backward_peak_bytes=backward.peak_bytes,
        **_times(forward_time, whole_time),
    )


def rehearsal_pace(meter: GpuMeter, call: BlockCall, usual_s: float) -> float:
    """Return what share of its usual time a block takes in a rehearsal, whose gradients are zero.

    Products of zeros take less power, and a card at its power limit then runs at a higher clock: 0.91 on an H200.
    """
    with dropped_gradients(call.block), undisturbed(call.block, meter.device):
        zeros = meter.time(lambda: call.run(torch.zeros_like))
    return min(1.0, zeros.gpu_s / usual_s) if usual_s else 1.0


def _without_frame(meter: GpuMeter, call: BlockCall, forward: Duration, whole: Duration) -> tuple[Duration, Duration]:
    """Subtract the host time that only arises because a block runs alone: starting and ending autograd."""
    undo = replace_forward(call.block, lambda *args, **kwargs: _hidden(args, kwargs).float() * 1.0)
    try:
        frames = [meter.time(run, least_s=0.01) for run in (call.forward, call.run)]
    finally:
        undo()
    own = [max(0.0, found.host_s - frame.host_s) for found, frame in zip((forward, whole), frames, strict=True)]
    return replace(forward, host_s=own[0]), replace(whole, host_s=own[1])


def _times(forward: Duration, whole: Duration) -> dict[str, Any]:
    return {
        "forward_s": forward.gpu_s,
        "backward_s": max(0.0, whole.gpu_s - forward.gpu_s),
        "forward_host_s": forward.host_s,
        "backward_host_s": max(0.0, whole.host_s - forward.host_s),
    }


def measure_outside(
    training: Training, meter: GpuMeter, blocks: dict[str, nn.Module], calls: BlockCalls, batch: Batch
) -> OutsideProfile:
    """Measure the whole model with blocks that pass their input through."""
    stretches = _PeaksAround(meter)
    with ExitStack() as stack:
        stack.enter_context(dropped_gradients(training.model))
        stack.enter_context(undisturbed(training.model, meter.device))
        for name, kind in calls.kinds.items():
            stack.callback(replace_forward(blocks[name], _hand_through(calls.by_kind[kind][1].output, stretches)))

        def forward() -> Tensor:
            with training.forward_pass():
                return training.loss(training.model, batch)

        forward().backward()
        stretches.forget()
        with meter.watch() as whole:
            loss = forward()
            kept_bytes = meter.allocated_bytes - whole.before_bytes
            loss.backward()
            del loss
        peaks = {"kept_bytes": kept_bytes} | stretches.peaks(whole)
        forward_time = meter.time(forward)
        whole_time = meter.time(lambda: forward().backward())
    return OutsideProfile(**peaks, **_times(forward_time, whole_time))


class _PeaksAround:
    """Peak memory before the first block, between blocks and after the last, in a pass whose blocks do nothing."""

    def __init__(self, meter: GpuMeter) -> None:
        self.meter = meter
        self.forget()

    def forget(self) -> None:
        self.forward: list[tuple[int, int]] = []  # for each stretch: its peak, and the bytes allocated at its end
        self.backward: list[tuple[int, int]] = []

    def ends(self, stretches: list[tuple[int, int]]) -> None:
        stretches.append((self.meter.new_peak(), self.meter.allocated_bytes))

    def peaks(self, whole: Watch) -> dict[str, Any]:
        """Return the peaks after the blocks (all activations alive), before them (none alive) and between them."""
        count, before_bytes = len(self.forward), whole.before_bytes
        if not count or count != len(self.backward):
            return {"peak_bytes": max([whole.peak_bytes, *(p - before_bytes for p, _ in self.forward + self.backward)])}
        between = [(self.forward[index], self.backward[count - index]) for index in range(1, count)]
        return {
            "kept_bytes": self.backward[0][1] - before_bytes,  # what head and loss saved is already freed
            "peak_bytes": self.backward[0][0] - before_bytes,
            "stem_peak_bytes": max(self.forward[0][0] - before_bytes, whole.peak_bytes),
            "between_peak_bytes": tuple(
                max((peak - before_bytes for peak, end in there_and_back if peak > end), default=0)
                for there_and_back in between
            ),
        }


def _watch_block(meter: GpuMeter, call: BlockCall) -> tuple[Watch, Watch]:
    hidden, saved = call.hidden.untyped_storage().data_ptr(), set[int]()

    # Otherwise torch.compile would compile these hooks again and again, until it falls back to eager.
    @torch.compiler.disable
    def note(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    @torch.compiler.disable
    def give(tensor: Tensor) -> Tensor:
        return tensor

    with meter.watch() as forward, saved_tensors_hooks(note, give):
        output = call.forward()
    # The first output is the next block's input and counted there. Others (a shared bias, router logits) stay.
    made = next((leaf for leaf in tree_leaves(output) if _floats(leaf)), None)
    if made is not None and made.untyped_storage().data_ptr() != hidden:
        forward.kept_bytes -= bytes_of(made)
    if hidden in saved:
        forward.kept_bytes += bytes_of(call.hidden)
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients = [torch.ones_like(end) for end in ends]
    del output
    with meter.watch() as backward:
        torch.autograd.backward(ends, gradients)
    return forward, backward


def _hand_through(output: Any, stretches: _PeaksAround) -> Any:
    """Return a forward that returns its input in place of the output of that shape, and zeros elsewhere."""
    leaves, structure = tree_flatten(output, is_leaf=lambda leaf: isinstance(leaf, _Described))

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        # Layers before the blocks may be frozen.
        if torch.is_grad_enabled() and _floats(hidden) and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        stretches.ends(stretches.forward)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: stretches.ends(stretches.backward))
        filled = [leaf.like(hidden) if isinstance(leaf, _Described) else leaf for leaf in leaves]
        stretches.meter.new_peak()  # ignore the peak of making the stand-in for the block's output
        return tree_unflatten(filled, structure)

    return forward


@dataclass(frozen=True)
class _Described:
    """A tensor's shape and dtype, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def like(self, hidden: Tensor) -> Tensor:
        if self.shape[1:] == tuple(hidden.shape)[1:] and _floats(hidden):
            return hidden.to(self.dtype)
        if self.dtype.is_floating_point and _floats(hidden):
            zeros: Tensor = _OfAnotherShape.apply(hidden, self.shape, self.dtype)
            return zeros
        return torch.zeros(self.shape, dtype=self.dtype, device=hidden.device)


class _OfAnotherShape(torch.autograd.Function):
    """Zeros that depend on the input, so that the layers before it get a backward pass; its backward allocates nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.like = hidden.shape, hidden.dtype
        return torch.zeros(shape, dtype=dtype, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shape, dtype = ctx.like
        return torch.zeros((), dtype=dtype, device=gradient.device).expand(shape), None, None


def _hidden(args: Any, kwargs: Any) -> Tensor:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return next((tensor for tensor in tensors if _floats(tensor)), tensors[0])


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
