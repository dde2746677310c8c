"""The weights of a decoder: allocated once on the device, merged as the pass needs them, and filled piece by piece.

Names are those of transformers checkpoints. Query, key and value are one matrix, gate and up another; each tensor of
the checkpoint is a range of rows. A matrix is plain, or stored in eight bits with one scale per output channel: read at
half the bytes, multiplied in the activations' precision. This module reads no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from tonnage.serve.config import Weights
from tonnage.serve.kernels import matmul8
from tonnage.serve.models.experts import ExpertStack

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


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """The part of a merged weight that one checkpoint tensor fills; `holds` names the pieces it combines."""

    weight: Tensor
    scales: Tensor | None = None
    holds: tuple[str, ...] = ()

    def fill(self, source: Tensor) -> None:
        """Copy in the weight's precision, or quantize."""
        if self.scales is None:
            self.weight.copy_(source)
        else:
            quantise(source, self.weight, self.scales)

    def fill_random(self, generator: torch.Generator, dtype: torch.dtype) -> None:
        """Fill with small random numbers."""
        if self.scales is None:
            self.weight.normal_(0, 0.02, generator=generator)
        else:
            sampled = torch.empty(self.weight.shape, device=self.weight.device, dtype=dtype)
            self.fill(sampled.normal_(0, 0.02, generator=generator))


class Builder:
    """Allocates weights, layer matrices in eight bits if `weights` says so, and keeps the pieces that fill them by name."""

    def __init__(self, device: torch.device, dtype: torch.dtype, weights: Weights | None) -> None:
        self.device, self.dtype, self.weights = device, dtype, weights
        self.pieces: dict[str, WeightPiece] = {}
        self.fused: dict[str, WeightPiece] = {}  # several pieces as one tensor, as in some files
        self.bytes = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a weight that is one tensor of the checkpoint, in full precision."""
        made = self._empty(shape, self.dtype)
        self.pieces[name] = WeightPiece(made)
        return made

    def matrix(self, prefix: str, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool) -> Dense | EightBit:
        """Return one matrix of the parts, each with its number of rows, concatenated."""
        count = sum(rows for _, rows in parts)
        weight, scales = self._weight(count, columns)
        offsets = self._empty((count,), self.dtype) if bias else None
        start = 0
        for name, rows in parts:
            own = slice(start, start + rows)
            self.pieces[f"{prefix}{name}.weight"] = WeightPiece(weight[own], None if scales is None else scales[own])
            if offsets is not None:
                self.pieces[f"{prefix}{name}.bias"] = WeightPiece(offsets[own])
            start += rows
        return Dense(weight, offsets) if scales is None else EightBit(weight, scales, offsets)

    def stack(
        self, prefix: str, fused: str, parts: Sequence[tuple[str, int]], columns: int, experts: int
    ) -> ExpertStack:
        """Do the same for each expert of a layer; `fused` names the whole tensor."""
        weight, scales = self._weight(experts, sum(rows for _, rows in parts), columns)
        made: dict[str, WeightPiece] = {}
        for expert in range(experts):
            start = 0
            for name, rows in parts:
                own = (expert, slice(start, start + rows))
                made[f"{prefix}{expert}.{name}.weight"] = WeightPiece(
                    weight[own], None if scales is None else scales[own]
                )
                start += rows
        self.pieces |= made
        self.fused[prefix + fused] = WeightPiece(weight, scales, holds=tuple(made))
        return ExpertStack(weight, scales, self.dtype)

    def _weight(self, *shape: int) -> tuple[Tensor, Tensor | None]:
        if self.weights is None:
            return self._empty(shape, self.dtype), None
        return self._empty(shape, EIGHT_BIT[self.weights]), self._empty(shape[:-1], torch.float32)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(*shape, dtype=dtype, device=self.device)
        self.bytes += made.nbytes
        return made
