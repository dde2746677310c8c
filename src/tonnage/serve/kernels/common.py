"""What kernels share: Triton or stand-ins for its names, and helpers of the plain versions, in FP32 (FP64 for FP64)."""

# mypy: disable-error-code="import-not-found, import-untyped, no-redef"

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tonnage.serve.batch import LayerCache

__all__ = ["HAS_TRITON", "attend", "jit", "next_power_of_2", "read_pages", "tl", "wide"]

jit: Any
tl: Any
try:
    import triton
    import triton.language as tl

    jit = triton.jit
    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
    tl = SimpleNamespace(constexpr=lambda value: value)

    def jit(function=None, **_options):
        return jit if function is None else function


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the compute dtype: FP64 for FP64 inputs, else FP32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def read_pages(layer: LayerCache, tables: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values [rows, blocks × block size, KV heads, head dim] of the blocks in each row of `tables`."""
    keys, values = (pages[tables].flatten(1, 2).to(dtype) for pages in (layer.keys, layer.values))
    if layer.key_scales is not None and layer.value_scales is not None:
        keys *= layer.key_scales[tables].flatten(1, 2).to(dtype).unsqueeze(-1)
        values *= layer.value_scales[tables].flatten(1, 2).to(dtype).unsqueeze(-1)
    return keys, values


def attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, *, scale: float, soft_cap: float) -> Tensor:
    """Compute attention of queries [B, L, H, hd] over [B, S, K, hd] where `visible` [B, L, S]; zeros if nothing is."""
    group = query.shape[2] // keys.shape[2]
    grouped = query.to(keys.dtype).unflatten(2, (keys.shape[2], group))
    scores = torch.einsum("blkgd,bskd->bkgls", grouped, keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a row that sees nothing is 0/0
    # Invisible entries may be uninitialized memory, and 0 × NaN is NaN.
    values = values.masked_fill(~visible.any(1)[..., None, None], 0.0)
    return torch.einsum("bkgls,bskd->blkgd", weights, values).flatten(2, 3).to(query.dtype)
