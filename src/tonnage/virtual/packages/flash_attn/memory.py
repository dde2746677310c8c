"""Allocations of flash-attn's C++, in its order: outputs, statistics, and accumulators that live during the call.

Tensors are batched, or packed by token with cumulative lengths.
"""

from math import ceil
from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels.attention import flash_splits

WIDEST_HEAD = 256
_PADDING = 128  # rows between the accumulators of two sequences


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise the errors that flash-attn would."""
    if not q.is_cuda:
        raise RuntimeError(f"flash-attn needs tensors on a GPU, and the queries are on {q.device}.")
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        kinds = ", ".join(str(t.dtype).removeprefix("torch.") for t in (q, k, v))
        raise RuntimeError(
            f"flash-attn takes queries, keys and values that are all float16 or all bfloat16, not {kinds}."
        )
    if q.shape[-1] > WIDEST_HEAD:
        raise RuntimeError(f"flash-attn takes heads of up to {WIDEST_HEAD} elements, and these have {q.shape[-1]}.")
    if q.shape[-2] % k.shape[-2]:
        raise RuntimeError(f"The {q.shape[-2]} heads of queries cannot share {k.shape[-2]} heads of keys evenly.")
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        raise RuntimeError("flash-attn needs an Ampere card or a newer one (compute capability 8.0).")


def floats(like: Tensor, *shape: int) -> Tensor:
    """Allocate an uninitialized float32 tensor on the same device."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def outputs(
    q: Tensor, statistics: tuple[int, ...], kept: tuple[int, ...] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the output, logsumexp, the probabilities (only to test dropout), and the generator's state."""
    out = torch.empty_like(q)
    sums = floats(q, *statistics)
    probabilities = q.new_empty(kept or (0,))
    return out, sums, probabilities, torch.empty(2, dtype=torch.int64, device=q.device)


def rounded(value: int, multiple: int = 128) -> int:
    return -(-value // multiple) * multiple


def _rounded_width(width: int) -> int:
    return rounded(width, 32 if width <= 128 else 64)


def split_accumulators(q: Tensor, sizes: tuple[int, int, int, int], width: int, splits: int = 0) -> Any:
    """Allocate partial outputs if few queries meet many keys and these are split. `sizes`: batch, heads, queries, keys."""
    batch, heads, queries, keys = sizes
    if splits < 1:
        keys_per_block = 256 if width <= 64 else 128 if width <= 128 else 64
        slots = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
        splits = flash_splits(batch * heads * ceil(queries / 64), slots, ceil(keys / keys_per_block))
    if splits == 1:
        return None
    sums = floats(q, splits, batch, heads, queries)
    return sums, floats(q, splits, batch, heads, queries, _rounded_width(width))


def heads_become_length(
    queries: int, q: Tensor, k: Tensor, dropout: float, window: tuple[int, int], slopes: Any
) -> bool:
    """Whether heads that share keys are computed as queries, which is faster for a single query."""
    return queries == 1 and q.shape[-2] > k.shape[-2] and max(window) < 0 and not dropout and slopes is None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    sequences: int | None,
    deterministic: bool,
) -> Tensor:
    """Allocate the accumulators of a backward pass and return the softmax sums. `sequences` is None for a batch."""
    heads, width = q.shape[-2], _rounded_width(q.shape[-1])
    batch, rows = (
        (q.shape[0], rounded(q.shape[1])) if sequences is None else (sequences, q.shape[0] + _PADDING * sequences)
    )
    sums = floats(q, batch, heads, rows) if sequences is None else floats(q, heads, rows)
    shape = (batch, rows, heads, width) if sequences is None else (rows, heads, width)
    if deterministic:  # every SM adds to its own accumulator
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        dq_sum = torch.zeros(ceil(processors / (batch * heads)), *shape, dtype=torch.float32, device=q.device)
    else:
        dq_sum = floats(q, *shape)
    if k.shape[-2] != heads:  # a gradient for every query head, summed over those that share keys
        expanded = [t.new_empty(*k.shape[:-2], heads, k.shape[-1]) for t in (k, v)]
        for gradient, each in zip(gradients[1:], expanded, strict=True):
            torch.sum(each.unflatten(-2, (k.shape[-2], -1)), dim=-2, out=gradient)
    del dq_sum
    return sums
