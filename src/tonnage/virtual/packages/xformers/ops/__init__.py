"""The public functions of `xformers.ops`."""

from .fmha import (
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    memory_efficient_attention,
    memory_efficient_attention_forward,
)
from .fmha.attn_bias import AttentionBias, LowerTriangularMask
from .inference import RMSNorm, rope_padded
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
