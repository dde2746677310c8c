"""`unbind` whose backward does not copy gradients that are adjacent already."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Any:
        ctx.dim = dim
        return x.unbind(dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = _beside(gradients, ctx.dim)
        return (torch.stack(gradients, dim=ctx.dim) if whole is None else whole), None


def _beside(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return the tensor that these are slices of, if they are equally spaced in one storage."""
    first = parts[0]
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(parts)}
    alike = {(p.shape, p.stride(), p.untyped_storage().data_ptr()) for p in parts}
    if len(steps) != 1 or len(alike) != 1:
        return None
    shape, stride = list(first.shape), list(first.stride())
    shape.insert(dim, len(parts))
    stride.insert(dim, int(steps.pop()))
    return first.as_strided(shape, stride)


def unbind(x: Tensor, dim: int) -> Any:
    """Return the slices of a tensor along a dimension."""
    return _Unbind.apply(x, dim)
