"""Operations of matrix products, convolutions and attention: what recomputing them would repeat. It knows no times."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

# Arguments of products that say nothing about their size.
_NO_SHAPE = frozenset({"out", "out_dtype", "alpha", "beta"})


def matrix_operations(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Of a matrix product, convolution or attention; 0 for anything else."""
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0.0
    if "attention" in func.overloadpacket.__name__:
        return _attention_operations(func.overloadpacket.__name__, args)
    positional = [value for value in args if not isinstance(value, torch.dtype)]
    named = {name: value for name, value in kwargs.items() if name not in _NO_SHAPE}
    return float(count(*positional, **named, out_val=result))


def _attention_operations(name: str, args: Any) -> float:
    """Two products forward, five backward. (PyTorch's own count refuses grouped queries in 2.11.)"""
    tensors = [value for value in args if isinstance(value, Tensor) and value.dim() == 4]
    backward = "backward" in name
    query, key, value = tensors[1:4] if backward else tensors[:3]
    rows, heads, length, width = query.shape
    causal = any(argument is True for argument in args)
    forward = 2 * rows * heads * length * key.shape[2] * (width + value.shape[3]) * (0.5 if causal else 1.0)
    return forward * 2.5 if backward else forward
