"""A module over pieces of its rows, one after the other, forward and backward.

For modules that treat each row (each token) alone. Forward keeps the input and nothing else; backward runs each piece
again and differentiates it, so that what lies inside the module exists for one piece at a time. Parameters are inputs
of the function: their gradients are summed here and handed to autograd once, complete, so a hook that steps a
parameter sees one gradient. It does not know which modules are worth it.
"""

import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tonnage.fit.modules import dropouts, replace_forward
from tonnage.fit.training import Undo
from tonnage.fit.virtual import on_virtual_gpu

Run = Callable[[Tensor], Tensor]

# Of a tiled output against the whole one, by the precision of its type.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE_TOLERANCE = 3e-2
_PROBE_ROWS = 32  # in two pieces of sixteen, the smallest that FP8 kernels take


def tile_forward(module: nn.Module, tiles: int) -> Undo:
    """Let `module` run its present forward in `tiles` pieces. Undone in the reverse order of replacing."""
    # One function bound to each module, instead of a closure for each: a compiler sees equal blocks as equal.
    module._tonnage_tiles = (module.forward, tiles, dropouts(module))
    undo_forward = replace_forward(module, types.MethodType(_forward, module))

    def undo() -> None:
        undo_forward()
        del module._tonnage_tiles

    return undo


# Compiled code around it ends here and goes on after: a compiler cannot see through a backward inside a backward.
@torch.compiler.disable
def _forward(module: nn.Module, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    run, tiles, dropping = module._tonnage_tiles
    # A dropout switched on since would draw anew in backward.
    if arguments or keywords or x.ndim < 2 or any(dropout.training for dropout in dropping):
        return run(x, *arguments, **keywords)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return Tiled.apply(run, tiles, Kept.apply(x), *parameters)


_forward.__name__ = "forward"  # pickled with its module, it is the module's plain forward again


class Kept(torch.autograd.Function):
    """Keeps `x` for the tiles that follow.

    Apart from them, so that it is kept before they run: a checkpoint around the module, which in backward runs forward
    again until all that is kept was made, then stops here and leaves the tiles to backward.
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
    """`run(x)` piece by piece over all dimensions but the last; `parameters` are those that `run` uses."""

    @staticmethod
    def forward(ctx: Any, run: Run, tiles: int, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.tiles, ctx.parameters = run, tiles, parameters
        ctx.casting = _Casting(x.device.type)
        ctx.kept = x.grad_fn
        if ctx.kept is None:  # nothing before x is trained
            ctx.save_for_backward(x)
        rows = x.detach().reshape(-1, x.shape[-1])
        output: Tensor | None = None  # no view: who gets it may write into it
        with ctx.casting.uncached(), _tiling():
            for start, end in bounds(len(rows), tiles):
                piece = run(_shaped(rows[start:end], x.ndim))
                if output is None:
                    output = piece.new_empty(*x.shape[:-1], piece.shape[-1])
                output.view(len(rows), -1)[start:end] = piece.view(end - start, -1)
            return run(x) if output is None else output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = (ctx if ctx.kept is None else ctx.kept).saved_tensors
        needs_x, *needs_parameters = ctx.needs_input_grad[2:]
        parameters = [p for p, needed in zip(ctx.parameters, needs_parameters, strict=True) if needed]
        with ctx.casting.again():
            x_gradient, sums = _differentiate(ctx.run, ctx.tiles, x, gradient, parameters, needs_x=needs_x)
        found = iter(sums)
        return (None, None, x_gradient, *(next(found) if needed else None for needed in needs_parameters))


def _differentiate(
    run: Run, tiles: int, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor], *, needs_x: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    rows, gradients = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    x_gradient = torch.empty_like(rows, memory_format=torch.contiguous_format) if needs_x else None
    sums: list[Tensor | None] = [None] * len(parameters)
    for start, end in bounds(len(rows), tiles):
        piece = _shaped(rows[start:end], x.ndim).detach().requires_grad_(needs_x)
        with torch.enable_grad():
            output = run(piece)
        wanted = [piece, *parameters] if needs_x else [*parameters]
        made = torch.autograd.grad(output, wanted, gradients[start:end].view_as(output), allow_unused=True)
        del output
        if x_gradient is not None:
            x_gradient[start:end] = 0 if made[0] is None else made[0].view(end - start, -1)
        _add(sums, made[1:] if needs_x else made)
    return None if x_gradient is None else x_gradient.view(x.shape), sums


def _add(sums: list[Tensor | None], made: Sequence[Tensor | None]) -> None:
    """The first piece's gradients become the sums; nothing is cleared and no copy is made."""
    for index, tensor in enumerate(made):
        total = sums[index]
        if total is None:
            sums[index] = tensor
        elif tensor is not None:
            total.add_(tensor)


def bounds(rows: int, tiles: int) -> Iterator[tuple[int, int]]:
    """Where each piece begins and ends: as even as can be, none empty."""
    pieces = min(tiles, rows)
    return pairwise(rows * piece // pieces for piece in range(pieces + 1)) if pieces else iter(())


def _shaped(rows: Tensor, dimensions: int) -> Tensor:
    """With as many dimensions as the whole input had, for modules that count them."""
    return rows.view(*(1,) * (dimensions - 2), *rows.shape)


_here = threading.local()


def in_a_tile() -> bool:
    """Whether this thread runs a tile's forward, which nothing holds on to: where nobody reads it, it may be left out."""
    return getattr(_here, "tiling", False)


@contextmanager
def _tiling() -> Iterator[None]:
    before, _here.tiling = in_a_tile(), True
    try:
        yield
    finally:
        _here.tiling = before


class _Casting:
    """Autocast as it is now, for running a piece again in backward."""

    def __init__(self, device_type: str) -> None:
        self._settings = {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
        }

    def again(self) -> torch.autocast:
        """One cast of each weight serves all pieces."""
        return torch.autocast(**self._settings, cache_enabled=True)

    def uncached(self) -> torch.autocast:
        """For a forward without gradients: a cast cached there would cut later uses of the weight off from it."""
        return torch.autocast(**self._settings, cache_enabled=False)


# Whether a module may be tiled ----------------------------------------------------------------------------------------


def mixes_rows(module: nn.Module, width: int) -> str | None:
    """Why the module cannot run piece by piece: tried on a few random rows, whole and in two pieces. Or None."""
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
    if difference <= _TOLERANCES.get(whole.dtype, _COARSE_TOLERANCE) * norm:
        return None
    return "gives other values for a row when the rows beside it are left out"


def sharded(module: nn.Module) -> bool:
    """Whether its parameters are pieces on several devices, whose gradients a wrapper of the module gathers."""
    return any(type(parameter.data) is not Tensor for parameter in module.parameters())
