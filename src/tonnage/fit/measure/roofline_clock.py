"""Seconds that operators would take on a card, from their arithmetic and their bytes. It runs nothing itself.

The shares of the peaks that are reached are the planner's (`budget/data/calibration.toml`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tonnage.budget.roofline import calibration, peak_rate
from tonnage.hardware import Gpu, find_cuda_gpu

_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16-mixed", torch.float32: "fp32"}
# Arguments of products that say nothing about their size.
_NO_SHAPE = frozenset({"out", "out_dtype", "alpha", "beta"})


def card_of(device: torch.device) -> Gpu:
    """The card of the catalogue that PyTorch's name means."""
    return find_cuda_gpu(torch.cuda.get_device_name(device))


class RooflineClock(TorchDispatchMode):
    """Adds up what is called inside; `seconds` is the sum."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.gpu = card_of(device)
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seconds += operator_seconds(self.gpu, func, args, kwargs or {}, result)
        return result


def operator_seconds(gpu: Gpu, func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """The larger of arithmetic and memory traffic; views take no time."""
    if func.is_view:
        return 0.0
    tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
    if not any(tensor.is_cuda for tensor in tensors):
        return 0.0
    shares = calibration()
    moved_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    seconds = moved_bytes / (gpu.bandwidth_bytes_per_s * shares.memory_ceiling)
    operations = matrix_operations(func, args, kwargs, result)
    if not operations:
        return seconds
    attention = "attention" in func.overloadpacket.__name__
    ceiling = shares.attention_ceiling if attention else shares.matmul_ceiling
    # Factors may be narrower than what they are added to.
    factors = [tensor.dtype for tensor in tensors[:3] if tensor.is_floating_point()]
    rate = peak_rate(gpu, _precision(min(factors, key=lambda dtype: dtype.itemsize))) * ceiling
    return float(max(seconds, operations / rate))


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


def _precision(dtype: torch.dtype) -> Any:
    if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return _PRECISIONS.get(dtype, "fp32")
