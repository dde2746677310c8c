"""The weights of a decoder: allocated once on the device, merged as the pass needs them, and filled piece by piece.

Names are those of transformers checkpoints. Query, key and value are one matrix, gate and up another; each tensor of
the checkpoint is a range of rows. This module reads no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tonnage.serve.config import Weights
from tonnage.serve.models.experts import ExpertStack
from tonnage.serve.models.linear import EIGHT_BIT, Dense, EightBit, quantise


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
    """Allocates weights, and keeps the pieces that fill them by name.

    Layer matrices are stored in eight bits if `weights` says so; norms, embedding, head and routers never are.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, weights: Weights | None) -> None:
        self.device = device
        self.dtype = dtype
        self.weights = weights
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
