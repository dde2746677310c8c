"""Rotary position embeddings, applied to queries and keys separately or together."""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.triton.rotary import apply_rotary  # noqa: TID252 (its name here is flash_attn)


class _Rotation(torch.autograd.Function):
    """Rotates one tensor; backward rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = options
        return apply_rotary(x, cos, sin, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return apply_rotary(grad, cos, sin, **ctx.options, conjugate=True), None, None, None


class _InPlace(torch.autograd.Function):
    """Rotates parts of a tensor in place: nothing is allocated, in backward either."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return packed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> Any:  # fmt: skip
    """Rotate queries or keys by position."""
    options = {"seqlen_offsets": seqlen_offsets, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "inplace": inplace}
    return _Rotation.apply(x, cos, sin, options)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
) -> Any:  # fmt: skip
    """Rotate queries and keys of a packed tensor in place."""
    return _InPlace.apply(qkv, cos, sin)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Any:
    """Rotate keys of a packed tensor in place."""
    return _InPlace.apply(kv, cos, sin)


class RotaryEmbedding(nn.Module):
    """Caches cosines and sines for the positions requested so far, and rotates with them."""

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
        device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if scale_base is not None:
            raise NotImplementedError("The stand-in of flash-attn's rotary positions does not know scale_base (xPos).")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._length = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None

    def _frequencies(self, device: Any) -> Tensor:
        return 1.0 / (self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim))

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        kept = self._cos_cached
        if kept is not None and seqlen <= self._length and kept.device == device and kept.dtype == dtype:
            return
        self._length = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        frequencies: Any = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._frequencies(device)
        angles = torch.outer(positions, frequencies)
        self._cos_cached, self._sin_cached = torch.cos(angles).to(dtype), torch.sin(angles).to(dtype)

    def forward(
        self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0, max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:  # fmt: skip
        """Rotate a packed tensor, or queries and packed keys and values, in place."""
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        assert self._cos_cached is not None and self._sin_cached is not None
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, self._cos_cached, self._sin_cached)
        q = apply_rotary_emb(qkv, self._cos_cached, self._sin_cached, inplace=True, seqlen_offsets=seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, self._cos_cached, self._sin_cached)
