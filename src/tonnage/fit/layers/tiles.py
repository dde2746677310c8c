"""Run a module over slices of its rows, one after the other, in forward and backward.

This is for modules that treat each row (each token) independently. Forward saves only the input; backward reruns
each slice and differentiates it, so that intermediates exist for one slice at a time. Parameters are inputs of the
autograd function: their gradients are summed here and passed to autograd once, complete, so a hook that steps a
parameter sees one gradient.
"""

import types
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tonnage.fit.modules import dropouts
from tonnage.fit.stepping.batches import row_slices
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training, Undo, set_attributes
from tonnage.fit.virtual import on_virtual_gpu

Run = Callable[[Tensor], Tensor]

# Of a tiled output against the whole one, by dtype.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
_PROBE_ROWS = 32  # two slices of sixteen, the smallest that FP8 kernels take


def tile_forward(module: nn.Module, tiles: int) -> Undo:
    """Make `module` run its current forward in `tiles` slices. Undo in reverse order of replacing."""
    # One function bound to each module, not a closure each: the compiler then treats equal blocks as equal.
    kept = module.forward, tiles, dropouts(module)
    return set_attributes(module, _tonnage_tiles=kept, forward=types.MethodType(_forward, module))


# A graph break for torch.compile, which cannot trace a backward inside a backward.
@torch.compiler.disable
def _forward(module: nn.Module, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    kept: Any = module._tonnage_tiles
    run, tiles, dropping = kept
    output: Tensor
    # A dropout switched on since would sample anew in backward.
    if arguments or keywords or x.ndim < 2 or any(dropout.training for dropout in dropping):
        output = run(x, *arguments, **keywords)
    else:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        output = Tiled.apply(run, tiles, SaveForTiles.apply(x), *parameters)
    return output


_forward.__name__ = "forward"  # so that a pickled module gets its plain forward back


class SaveForTiles(torch.autograd.Function):
    """Saves `x` for the tiles that follow.

    It is separate so that `x` is saved before they run: a checkpoint around the module reruns forward until
    everything saved is recomputed, stops here, and leaves the tiles to backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Tiled(torch.autograd.Function):
    """`run(x)` slice by slice over all dimensions but the last; `parameters` are those that `run` uses."""

    @staticmethod
    def forward(ctx: Any, run: Run, tiles: int, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.tiles, ctx.parameters = run, tiles, parameters
        kind = x.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.casting = {"device_type": kind, "enabled": enabled, "dtype": dtype}  # for rerunning a slice in backward
        ctx.kept = x.grad_fn
        if ctx.kept is None:  # nothing before x is trained
            ctx.save_for_backward(x)
        rows = x.detach().reshape(-1, x.shape[-1])
        output: Tensor | None = None  # not a view: the receiver may write into it
        # Without its cache: casts made in a forward without gradients would detach later uses of the weight.
        with torch.autocast(**ctx.casting, cache_enabled=False):
            for part in row_slices(len(rows), tiles):
                piece = run(_shaped(rows[part], x.ndim))
                if output is None:
                    output = piece.new_empty(*x.shape[:-1], piece.shape[-1])
                output.view(len(rows), -1)[part] = piece.view(-1, piece.shape[-1])
            return run(x) if output is None else output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = (ctx if ctx.kept is None else ctx.kept).saved_tensors
        needs_x, *needs_parameters = ctx.needs_input_grad[2:]
        parameters = [p for p, needed in zip(ctx.parameters, needs_parameters, strict=True) if needed]
        rows, gradients = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        x_gradient = torch.empty_like(rows, memory_format=torch.contiguous_format) if needs_x else None
        sums: list[Tensor | None] = [None] * len(parameters)
        # With its cache, one cast of each weight serves all slices.
        with torch.autocast(**ctx.casting, cache_enabled=True):
            for part in row_slices(len(rows), ctx.tiles):
                piece = _shaped(rows[part], x.ndim).detach().requires_grad_(needs_x)
                with torch.enable_grad():
                    output = ctx.run(piece)
                wanted = [piece, *parameters] if needs_x else parameters
                made = torch.autograd.grad(output, wanted, gradients[part].view_as(output), allow_unused=True)
                del output
                if x_gradient is not None:
                    x_gradient[part] = 0 if made[0] is None else made[0].view(-1, x.shape[-1])
                # The first slice's gradients become the sums, without clearing or copying.
                for index, tensor in enumerate(made[1:] if needs_x else made):
                    total = sums[index]
                    if total is None:
                        sums[index] = tensor
                    elif tensor is not None:
                        total.add_(tensor)
        found = iter(sums)
        to_x = None if x_gradient is None else x_gradient.view(x.shape)
        return (None, None, to_x, *(next(found) if needed else None for needed in needs_parameters))


def _shaped(rows: Tensor, dimensions: int) -> Tensor:
    """Restore the number of dimensions of the whole input, for modules that depend on it."""
    return rows.view(*(1,) * (dimensions - 2), *rows.shape)


class Tiling(Technique):
    """Runs layers of a kind over `tiles` slices of their rows (batch times sequence)."""

    tiles: int = 8
    kind: ClassVar[str]
    not_found: ClassVar[str]

    @staticmethod
    @abstractmethod
    def find(model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers by name."""

    @abstractmethod
    def obstacle(self, layer: Any) -> str | None:
        """Return why this layer cannot be tiled, as the rest of a sentence, or None."""

    def why_not(self, training: Training) -> str | None:
        if self.tiles < 2:
            return f"{self.tiles} tiles are the {self.kind} as it is; two are the fewest."
        found = self.find(training.model)
        if not found:
            return self.not_found
        return next((f"{name} {reason}." for name, layer in found.items() if (reason := self.obstacle(layer))), None)

    def place(self, training: Training, stack: ExitStack) -> None:
        for layer in self.find(training.model).values():
            stack.callback(tile_forward(layer, self.tiles))


def mixes_rows(module: nn.Module, width: int) -> str | None:
    """Return why the module cannot run in slices, tried on random rows, whole and in halves; or None."""
    # A wrapper reduces the gradients of sharded parameters.
    if any(type(parameter.data) is not Tensor for parameter in module.parameters()):
        return "is sharded over devices, whose wrapper would not see the gradients of its tiles"
    parameter = next(module.parameters(), torch.empty(0))
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(1, _PROBE_ROWS, width, generator=draws).to(parameter.device, parameter.dtype)
    try:
        with torch.no_grad():
            whole = module.forward(x)
            if not isinstance(whole, Tensor) or whole.shape[:2] != x.shape[:2]:
                return "does not return one tensor with a row for each row"
            pieces = torch.cat([module.forward(half) for half in x.chunk(2, dim=1)], dim=1)
    except (RuntimeError, TypeError, ValueError) as problem:
        return f"does not run on {_PROBE_ROWS} rows of {width} ({str(problem).splitlines()[0]})"
    if on_virtual_gpu(x.device):
        return None
    difference, norm = (pieces.double() - whole.double()).norm(), whole.double().norm()
    if difference <= _TOLERANCES.get(whole.dtype, 3e-2) * norm:
        return None
    return "gives other values for a row when the rows beside it are left out"
