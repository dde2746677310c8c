"""Selects the backend of scaled dot product attention on CUDA: the conditions of each, in order of priority.

It follows the host code of PyTorch 2.11 to 2.13. Lengths in nested tensors, and builds without one of the backends,
are not considered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tonnage.errors import NotModelled
from tonnage.virtual.kernels.library_sizes import attention_data
from tonnage.virtual.kernels.registry import kernel, own_operator
from tonnage.virtual.session import active

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3
_HALF = (torch.float16, torch.bfloat16)
_ordered: Any = None  # the device whose default order has been set


@dataclass(slots=True)
class Question:
    """The inputs of attention, with the card's compute capability and the PyTorch version."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    capability: tuple[int, int]
    version: tuple[int, int]

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass will follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))

    @property
    def is_nested(self) -> bool:
        return bool(self.query.is_nested or self.key.is_nested or self.value.is_nested)


@own_operator(
    "choose_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool causal, float? scale, "
    "bool grouped) -> int",
    composite=True,
)
def choose_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None, grouped: bool,
) -> int:  # fmt: skip
    """Return the first backend, in CUDA's order, that supports these inputs."""
    device = active().device
    asked = Question(
        query, key, value, mask, dropout, causal, grouped, device.gpu.compute_capability, device.torch_version
    )  # fmt: skip
    if asked.is_nested and query.layout is torch.strided:
        # Nested tensors of the older, strided layout have no shape; only math attention is modelled for them.
        if query.dtype in _HALF or not asked.needs_grad:
            raise NotModelled(
                "The virtual GPU does not model fused attention over nested tensors of the strided layout.",
                hint="Make them with layout=torch.jagged, which replaces it.",
            )
        return MATH
    global _ordered
    if _ordered is not device:
        # PyTorch sets the default order at the first choice; users may change it later.
        _ordered = device
        cudnn, major = attention_data()["cudnn"], device.gpu.compute_capability[0]
        is_new = device.torch_version >= tuple(cudnn["preferred_since"])
        preferred = is_new and major in cudnn["preferred_capability_majors"]
        order = [CUDNN, FLASH, EFFICIENT, MATH] if preferred else [FLASH, EFFICIENT, MATH, CUDNN]
        torch._C._set_sdp_priority_order(order)
    for backend in torch._C._get_sdp_priority_order():
        if backend in _TAKES and _TAKES[backend](asked):
            return int(backend)
    raise RuntimeError("No available kernel. Aborting execution.")


@kernel("_fused_sdp_choice")
def fused_sdp_choice(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> int:  # fmt: skip
    return choose_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def can_use(backend: int, params: Any, debug: bool = False) -> bool:
    """Implement `torch.backends.cuda.can_use_flash_attention` and similar, whose `params` are SDPAParams."""
    device, p = active().device, params
    inputs = (p.query, p.key, p.value, p.attn_mask, p.dropout, p.is_causal, p.enable_gqa)
    return _TAKES[backend](Question(*inputs, device.gpu.compute_capability, device.torch_version))


def _takes_cudnn(asked: Question) -> bool:
    data, (major, minor) = attention_data()["cudnn"], asked.capability
    query, key, mask = asked.query, asked.key, asked.mask
    deterministic = torch.are_deterministic_algorithms_enabled()
    if (
        not torch._C._get_cudnn_sdp_enabled()
        or asked.capability < (8, 0)
        or asked.is_nested
        or query.dtype not in _HALF
        or not _of_one_kind(asked)
        or (deterministic and not torch.is_deterministic_algorithms_warn_only_enabled())
    ):
        return False
    if mask is not None:
        if mask.requires_grad or mask.dim() not in (2, 4):
            return False
        full = (*query.shape[:3], key.shape[2])[-mask.dim() :]
        if any(size not in (1, whole) for size, whole in zip(mask.shape, full, strict=True)):
            return False
    width, value_width = query.shape[-1], asked.value.shape[-1]
    limit = data["head_dim_by_capability"].get(f"{major}.{minor}", data["head_dim"])
    if (width, value_width) == (192, 128) and major in data["wide_keys_capability_majors"]:
        limit = 192
    return (
        _dense_inputs(asked, grouping=True, same_key_value_heads=False, any_stride_of_one=True)
        and (asked.version < tuple(data["dropout_in_sixteenths_since"]) or (asked.dropout * 16).is_integer())
        and max(width, value_width) <= limit
        and width % 8 == value_width % 8 == 0
        and key.shape[2] != 1
        and (asked.dropout == 0 or query.shape[2] != 1)
        and max(query.shape[:2]) <= 65535
    )


def _takes_flash(asked: Question) -> bool:
    query, width, data = asked.query, asked.query.shape[-1], attention_data()["flash"]
    narrow = list(asked.capability) in data["narrow_capabilities"] and asked.needs_grad
    wide_backward = width > data["narrow_head_dim_without_dropout"] and asked.dropout == 0
    return (
        bool(torch._C._get_flash_sdp_enabled())
        and asked.mask is None
        and query.dtype in _HALF
        and asked.capability >= tuple(data["capability"])
        and _of_one_kind(asked)
        and width == asked.key.shape[-1] == asked.value.shape[-1]
        and width <= data["head_dim"]
        and (not narrow or width <= data["narrow_head_dim"] or wide_backward)
        and (asked.is_nested or not asked.causal or query.shape[-2] == asked.key.shape[-2])
        and (asked.is_nested or _dense_inputs(asked, grouping=True, any_stride_of_one=True))
    )


def _takes_efficient(asked: Question) -> bool:
    is_half, modern = asked.query.dtype in _HALF, asked.capability >= (8, 0)
    types = (*_HALF, torch.float32) if modern else (torch.float16, torch.float32)
    width, value_width = asked.query.shape[-1], asked.value.shape[-1]
    alignment = 1  # of the matrix products, in elements
    if modern or (asked.capability >= (7, 0) and is_half):
        alignment = 8 if is_half else 4
    return (
        bool(torch._C._get_mem_efficient_sdp_enabled())
        and asked.query.dtype in types
        and _of_one_kind(asked)
        and width == asked.key.shape[-1]
        and width > 0
        and value_width > 0
        and width % alignment == 0
        and value_width % alignment == 0
        and (asked.is_nested or _dense_inputs(asked, grouping=False))
    )


_TAKES: dict[int, Callable[[Question], bool]] = {
    MATH: lambda asked: bool(torch._C._get_math_sdp_enabled()),
    FLASH: _takes_flash,
    EFFICIENT: _takes_efficient,
    CUDNN: _takes_cudnn,
}


def _of_one_kind(asked: Question) -> bool:
    """Whether all inputs have four dimensions and the same dtype."""
    tensors = (asked.query, asked.key, asked.value)
    return all(tensor.dim() == 4 and tensor.dtype == asked.query.dtype for tensor in tensors)


def _dense_inputs(
    asked: Question, *, grouping: bool, same_key_value_heads: bool = True, any_stride_of_one: bool = False
) -> bool:
    """Check lengths, last strides, batches and heads, as every fused backend does."""
    query, key, value, mask = asked.query, asked.key, asked.value, asked.mask
    if query.shape[-2] == 0 or key.shape[-2] == 0 or not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    unit = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1 or (any_stride_of_one and query.shape[-1] == 1)
    if not unit or (mask is not None and mask.stride(-1) != 1):
        return False
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if asked.grouped and grouping:
        same = key_heads == value_heads if same_key_value_heads else heads % value_heads == 0
        return same and heads % key_heads == 0
    return heads == key_heads == value_heads
