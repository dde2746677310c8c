"""A weight matrix: plain, or stored in eight bits with one scale per output channel.

Only weights are quantized: they are read at half the bytes and multiplied in the activations' precision. This module
does not know what a matrix is for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from tonnage.serve.config import Weights
from tonnage.serve.kernels import matmul8

EIGHT_BIT: dict[Weights, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Elements quantized at once, which limits the FP32 temporaries.
_AT_ONCE = 2**20


@dataclass(slots=True, eq=False)
class Dense:
    """weight [n, k], and an optional bias [n]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)


@dataclass(slots=True, eq=False)
class EightBit:
    """weight [n, k] in INT8 or FP8; each element represents its value times its row's scale."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        out = matmul8(rows, self.weight, self.scales)
        return out if self.bias is None else out + self.bias


def quantise(source: Tensor, weight: Tensor, scales: Tensor) -> None:
    """Fill `weight` [..., n, k] and `scales` [..., n] from a matrix or a stack of them."""
    flat, flat_scales, given = weight.view(-1, weight.shape[-1]), scales.view(-1), source.reshape(-1, source.shape[-1])
    largest = _LARGEST[weight.dtype]
    step = max(1, _AT_ONCE // flat.shape[1])
    for start in range(0, flat.shape[0], step):
        own = slice(start, start + step)
        rows = given[own].to(device=weight.device, dtype=torch.float32)
        scale = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)).clamp(min=1e-12) / largest
        rows = rows / scale[:, None]
        flat[own] = rows.round_() if weight.dtype == torch.int8 else rows
        flat_scales[own] = scale
