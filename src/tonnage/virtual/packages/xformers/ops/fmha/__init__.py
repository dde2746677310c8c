"""Attention: torch's FlashAttention 2 if it supports the inputs, else torch's CUTLASS kernels, as xformers chooses."""

from typing import Any

import torch
from torch import Tensor

from . import attn_bias
from .attn_bias import (
    AttentionBias,
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularMask,
)

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalMask",
    "BlockDiagonalMask",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
]

MemoryEfficientAttentionCutlassOp = ("cutlass", "cutlass")
MemoryEfficientAttentionFlashAttentionOp = ("flash", "flash")
Mask = Any  # a tensor, an AttentionBias, or None
_WIDEST_FLASH = 256
_NO_MASK, _FROM_TOP_LEFT, _FROM_BOTTOM_RIGHT = range(3)


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Mask = None, p: float = 0.0, scale: float | None = None,
    *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Attention of tensors of shape (batch, length, width), with heads, or groups and heads, before the width."""
    shape = (*query.shape[:-1], value.shape[-1])
    if query.dim() == 3:
        query, key, value = (t.unsqueeze(2) for t in (query, key, value))
        attn_bias = attn_bias.unsqueeze(1) if isinstance(attn_bias, Tensor) else attn_bias
    _check(query, key, value, attn_bias)
    learns = any(t.requires_grad for t in (query, key, value))
    if learns and query.dim() == 5:
        raise NotImplementedError(
            "xformers has no backward of attention with groups of heads: repeat the keys instead."
        )
    forward = op[0] if op else _chosen(query, key, value, attn_bias)
    if learns:
        backward = op[1] if op else forward
        return _Attention.apply(query, key, value, attn_bias, p, scale, forward, backward)[0].reshape(shape)
    if query.dim() == 5:  # merge groups and heads; expanded heads become one
        query, key, value = (
            t[:, :, :, 0] if t.stride(3) == 0 else t.reshape(*t.shape[:2], -1, t.shape[-1]) for t in (query, key, value)
        )
    attend = _flash if forward == "flash" else _cutlass
    return attend(query, key, value, attn_bias, p, scale, False)[0].reshape(shape)


def memory_efficient_attention_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    """Attention without gradients; `op` is a forward operator only."""
    if options.get("op"):
        options["op"] = (options["op"], None)
    return memory_efficient_attention(query.detach(), key.detach(), value.detach(), *rest, **options)


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"Queries, keys and values differ in type: {query.dtype}, {key.dtype}, {value.dtype}.")
    if query.shape[2:-1] != key.shape[2:-1] or query.shape[0] != key.shape[0]:
        raise ValueError(f"Queries of shape {tuple(query.shape)} do not fit keys of shape {tuple(key.shape)}.")
    if isinstance(mask, BlockDiagonalMask) and mask.q_seqinfo.seqstart_py[-1] != query.shape[1]:
        raise ValueError(
            f"The mask has {mask.q_seqinfo.seqstart_py[-1]} queries in all, and there are {query.shape[1]}."
        )


def _chosen(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> str:
    """Choose FlashAttention for half precision on Ampere and newer, unless the mask is a tensor or unsupported."""
    fits = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] == value.shape[-1] <= _WIDEST_FLASH
    aligned = query.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8, 0)
    from_top_left = isinstance(mask, LowerTriangularMask) and query.shape[1] != key.shape[1]
    if isinstance(mask, BlockDiagonalCausalMask):
        from_top_left = mask.q_seqinfo.seqstart_py != mask.k_seqinfo.seqstart_py
    return "flash" if fits and aligned and not from_top_left and not isinstance(mask, Tensor) else "cutlass"


def _ends(mask: Mask) -> tuple[Any, Any, Any, Any]:
    if not isinstance(mask, BlockDiagonalMask):
        return None, None, None, None
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    return queries.seqstart, keys.seqstart, queries.max_seqlen, keys.max_seqlen


def _flash_options(
    mask: Mask, query: Tensor, key: Tensor, scale: float | None
) -> tuple[tuple[Any, ...], bool, dict[str, Any]]:
    starts_q, starts_k, longest_q, longest_k = _ends(mask)
    window = (-1, -1)
    if isinstance(mask, LowerTriangularFromBottomRightLocalAttentionMask):
        window = (mask._window_size - 1, -1)
    elif isinstance(mask, LocalAttentionFromBottomRightMask):
        window = (mask.window_left, mask.window_right)
    lengths = (starts_q, starts_k, longest_q or query.shape[1], longest_k or key.shape[1])
    options = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
    return lengths, isinstance(mask, AttentionBias) and mask.causal, options


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Mask, p: float, scale: float | None, _: bool) -> Any:
    lengths, causal, options = _flash_options(mask, q, k, scale)
    if lengths[0] is not None:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        options["seqused_k"] = getattr(mask.k_seqinfo, "seqlen", None)
    return torch.ops.aten._flash_attention_forward(q, k, v, *lengths, p, causal, False, **options)[:3]


def _mask_kind(mask: Mask) -> int:
    if not isinstance(mask, AttentionBias) or not mask.causal:
        return _NO_MASK
    return _FROM_BOTTOM_RIGHT if mask.from_bottom_right else _FROM_TOP_LEFT


def _cutlass(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, p: float, scale: float | None, learns: bool
) -> tuple[Any, ...]:
    bias = mask if isinstance(mask, Tensor) else None
    out, sums, *state = torch.ops.aten._efficient_attention_forward(
        q, k, v, bias, *_ends(mask), p, _mask_kind(mask), learns, scale=scale
    )
    return out, sums, state[:2]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        p: float,
        scale: float | None,
        forward: str,
        backward: str,
    ) -> Any:
        out, sums, state = (_flash if forward == "flash" else _cutlass)(q, k, v, mask, p, scale, True)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.mask, ctx.options, ctx.backward, ctx.state = mask, (p, scale), backward, state if p else None
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        grad, (p, scale) = grad.reshape(out.shape), ctx.options
        if ctx.backward == "flash":
            lengths, causal, options = _flash_options(ctx.mask, q, k, scale)
            shapes = [t.shape for t in (q, k, v)]
            if lengths[0] is not None:
                q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            made = torch.ops.aten._flash_attention_backward(
                grad.contiguous(), q, k, v, out, sums, *lengths, p, causal, ctx.state, ctx.state, **options
            )
            return *(t.reshape(shape) for t, shape in zip(made, shapes, strict=True)), None, None, None, None, None
        starts_q, starts_k, longest_q, longest_k = _ends(ctx.mask)
        bias = ctx.mask if isinstance(ctx.mask, Tensor) else None
        learns = bias is not None and bias.requires_grad
        seed, offset = ctx.state or (torch.Tensor(), torch.Tensor())
        *made, bias_gradient = torch.ops.aten._efficient_attention_backward(
            grad, q, k, v, bias, out, starts_q, starts_k, longest_q or -1, longest_k or -1, sums, p, seed, offset,
            _mask_kind(ctx.mask), learns, scale=scale,
        )  # fmt: skip
        return *made, bias_gradient if learns else None, None, None, None, None
