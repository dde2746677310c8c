"""Scaled dot product attention: which backend CUDA would choose, and what each allocates beside its outputs."""

import torch

from tonnage.virtual.kernels.registry import own_operator

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3


@own_operator(
    "choose_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool causal, float? scale, "
    "bool grouped) -> int",
    composite=True,
)
def choose_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float, causal: bool,
    scale: float | None, grouped: bool,
) -> int:  # fmt: skip
    """The first backend, in CUDA's order, that takes these inputs."""
    if mask is None and query.dtype in (torch.float16, torch.bfloat16) and torch.backends.cuda.flash_sdp_enabled():
        return FLASH
    if torch.backends.cuda.mem_efficient_sdp_enabled():
        return EFFICIENT
    return MATH
