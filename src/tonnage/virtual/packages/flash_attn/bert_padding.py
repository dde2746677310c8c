"""Packing a padded batch into one row of tokens, and unpacking it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _IndexFirstAxis(torch.autograd.Function):
    """Select rows by index. The indices are expanded over the row's width as a view."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.count = rows.shape[0]
        flat = rows.reshape(rows.shape[0], -1)
        return torch.gather(flat, 0, _wide(indices, flat.shape[1])).reshape(-1, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        flat = grad.reshape(grad.shape[0], -1)
        result = flat.new_zeros(ctx.count, flat.shape[1])
        result.scatter_(0, _wide(indices, flat.shape[1]), flat)
        return result.reshape(ctx.count, *grad.shape[1:]), None


class _IndexPutFirstAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(indices)
        result = values.new_zeros(count, *values.shape[1:])
        result[indices] = values
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.saved_tensors[0]], None, None


def _wide(indices: Tensor, width: int) -> Tensor:
    return indices[:, None].expand(-1, width)


index_first_axis = _IndexFirstAxis.apply
index_put_first_axis = _IndexPutFirstAxis.apply


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> tuple[Any, ...]:
    """Return the tokens that a mask keeps, their indices, cumulative lengths, the maximum length, and the used lengths."""
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = every.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(every.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    ends = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Place the tokens at their positions in a batch, with zeros elsewhere."""
    padded: Tensor = index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
    return padded
