"""Sliced recompute: a block runs over slices of the batch, in forward and again in backward.

Intermediates then exist for one slice at a time, as with micro-batches, but the batch is still one: each parameter's
gradient is summed here and reaches autograd once. Only for blocks that treat rows independently.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tonnage.fit.recomputing.remembered import Generators, held_generators, same_states
from tonnage.fit.recomputing.replay import Replayer
from tonnage.fit.recomputing.rerun import Forward, ForwardCall, Gradients, Rerun, without_cache
from tonnage.fit.recomputing.trial import left_alone
from tonnage.fit.stepping.batches import row_slices
from tonnage.fit.technique import NotApplicable
from tonnage.fit.training import Training
from tonnage.fit.virtual import on_virtual_gpu

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_HINT = "Set slices=1, or keep this block."


class SlicedRerun(Rerun):
    """Replaces a block's forward. A batch with fewer rows than slices is cut into single rows."""

    def __init__(self, module: nn.Module, forward: Forward, replayer: Replayer | None, slices: int) -> None:
        super().__init__(module, forward, replayer)
        self.slices = slices

    def first(self, call: ForwardCall, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rows = batch_rows(inputs or call.leaves)
        whole: list[Tensor] = []
        for part in row_slices(rows, self.slices):
            tensors = [take_rows(tensor, rows, part) for tensor in inputs]
            outputs = call.run(tensors, [take_rows(leaf, rows, part) for leaf in call.leaves])
            whole = whole or [output.new_empty((rows, *output.shape[1:])) for output in outputs]
            for target, output in zip(whole, outputs, strict=True):
                target[part].copy_(output)
            del outputs
        return tuple(whole)

    def differentiate(self, call: ForwardCall, inputs: Sequence[Tensor], gradients: Gradients) -> Gradients:
        rows = batch_rows(inputs or call.leaves)
        totals: dict[int, Tensor] = {}  # side by side for a sliced input, summed for everything else
        for part in row_slices(rows, self.slices):
            fresh = [take_rows(tensor.detach(), rows, part).requires_grad_() for tensor in inputs]
            ends = self.again(call, fresh, [take_rows(leaf, rows, part) for leaf in call.leaves])
            starts = [None if g is None else g[part] for g in gradients]
            made = self.gradients(ends, starts, [*fresh, *call.parameters])
            found = {index: gradient for index, gradient in enumerate(made) if gradient is not None}
            for index in [i for i in found if i < len(inputs) and has_rows(inputs[i], rows)]:
                if index not in totals:
                    totals[index] = torch.zeros_like(inputs[index])
                totals[index][part].copy_(found.pop(index))
            added = [index for index in found if index in totals]
            if added:
                torch._foreach_add_([totals[i] for i in added], [found.pop(i) for i in added])
            totals |= found
            del ends, made, found
        return [totals.pop(index, None) for index in range(len(inputs) + len(call.parameters))]


def batch_rows(leaves: Sequence[Any]) -> int:
    """Return the rows of the first floating-point tensor, the hidden state; if all are token ids, of the first."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    return next((tensor.shape[0] for tensor in tensors if tensor.is_floating_point()), tensors[0].shape[0])


def has_rows(leaf: object, rows: int) -> bool:
    """Return whether a tensor has one row per batch row. A vector never does: positions are one."""
    return isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] == rows


def take_rows(leaf: Any, rows: int, part: slice) -> Any:
    return leaf[part] if has_rows(leaf, rows) else leaf


class _Reached(Exception):
    """Stops the forward pass once every kind of block was seen."""


def check_rows_apart(training: Training, names: Sequence[str]) -> None:
    """Raise NotApplicable if a block mixes rows: each kind runs on two rows, together and separately."""
    blocks = {name: training.model.get_submodule(name) for name in names}
    one_of_each = {type(block): name for name, block in reversed(blocks.items())}
    with left_alone(training), torch.no_grad():
        for name, call in first_calls(training, {name: blocks[name] for name in one_of_each.values()}).items():
            _check_block(name, blocks[name], call, training.device)


def first_calls(training: Training, blocks: Mapping[str, nn.Module]) -> dict[str, Arguments]:
    """Return the arguments of each block's first call in a loss on the sample, without KV caches."""
    calls: dict[str, Arguments] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, without_cache(args, kwargs))
        if len(calls) == len(blocks):
            raise _Reached

    with ExitStack() as stack:
        for name, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(partial(note, name), with_kwargs=True).remove)
        stack.enter_context(suppress(_Reached))
        training.loss(training.model, training.sample)
    return calls


def _check_block(name: str, block: nn.Module, call: Arguments, device: torch.device) -> None:
    leaves, spec = tree_flatten(call)
    rows = batch_rows(leaves)
    if rows < 2:
        raise NotApplicable(f"The sample reaches {name} with one row, which cannot be sliced.", hint="Set slices=1.")

    def run(part: slice) -> list[Tensor]:
        args, kwargs = tree_unflatten([take_rows(leaf, rows, part) for leaf in leaves], spec)
        return [leaf for leaf in tree_flatten(block.forward(*args, **kwargs))[0] if isinstance(leaf, Tensor)]

    generators = Generators(device, held_generators(block))
    before = generators.states()
    try:
        together, *alone = run(slice(0, 2)), run(slice(0, 1)), run(slice(1, 2))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise NotApplicable(f"{name} cannot run on a part of the rows: {error}.", hint=_HINT) from error
    if not same_states(before, generators.states()):
        raise NotApplicable(
            f"{name} draws random numbers, and slices would draw others than the whole batch.", hint=_HINT
        )
    for whole, first, second in zip(together, *alone, strict=True):
        if (2, *first.shape[1:]) != whole.shape or first.shape[:1] != (1,):
            raise NotApplicable(f"{name} returns {list(whole.shape)}, which has no batch dimension.", hint=_HINT)
        if not on_virtual_gpu(device) and not _close(whole, torch.cat([first, second])):
            raise NotApplicable(f"{name} mixes the rows of a batch: two rows alone give other values.", hint=_HINT)


def _close(one: Tensor, other: Tensor) -> bool:
    """Compare up to rounding: kernels split their sums by shape."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = one.abs().amax().double()
    return bool((one - other).abs().amax().double() <= 64 * torch.finfo(one.dtype).eps * scale)
