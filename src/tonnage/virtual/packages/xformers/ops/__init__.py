"""The public functions of `xformers.ops`; those that are here have no backward and allocate one tensor like their input."""

from typing import Any

import torch
from torch import Tensor, nn

from .fmha import (
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    memory_efficient_attention,
    memory_efficient_attention_forward,
)
from .fmha.attn_bias import AttentionBias, LowerTriangularMask
from .swiglu_op import SwiGLU, swiglu
from .unbind import unbind

__all__ = [
    "AttentionBias",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "RMSNorm",
    "SwiGLU",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "rope_padded",
    "swiglu",
    "unbind",
]


def _refuse_gradients(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError("xformers has no gradient for this; run it under torch.no_grad().")


class RMSNorm(nn.Module):
    """The RMS norm of the last dimension."""

    def __init__(self, dim: int, include_weight: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if include_weight else None

    def forward(self, x: Tensor) -> Tensor:
        _refuse_gradients(x, self.weight)
        return torch.empty_like(x)

    def increment_and_forward_(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the norm of the sum, which is stored in the first argument."""
        _refuse_gradients(x, y, self.weight)
        return torch.empty_like(x)


def rope_padded(
    xq: Tensor, xk: Tensor, xv: Tensor, cache_k: Tensor, cache_v: Tensor, attn_bias: Any, *,
    out_q: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Return the rotated queries, and write keys and values into a padded cache."""
    _refuse_gradients(xq, xk, xv, cache_k, cache_v)
    if cache_k.shape[1] != attn_bias.k_seqinfo.seqstart_py[-1] or xq.shape[1] != attn_bias.q_seqinfo.seqstart_py[-1]:
        raise ValueError(
            f"The mask does not fit queries of shape {tuple(xq.shape)} and a cache of {tuple(cache_k.shape)}."
        )
    return xq.new_empty(xq.shape) if out_q is None else out_q
