"""The weights of a decoder: allocated once on the device, merged as the pass needs them, and filled piece by piece.

Names are those of transformers checkpoints. Query, key and value are one matrix, gate and up another; each tensor of
the checkpoint is a range of rows. A matrix is plain, or stored in eight bits with one scale per output channel: read at
half the bytes, multiplied in the activations' precision. This module reads no files.

In a mixture of experts, tokens are sorted by expert, so that one grouped product computes them all. It finds the group
bounds on the device, so nothing waits for the host and a captured graph stays valid whatever the tokens choose. Without
such a kernel (CPU, FP32, GPUs before Hopper) experts run in turn, and the host reads the bounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from tonnage.serve.config import Weights
from tonnage.serve.kernels import matmul8

Activate = Callable[[Tensor], Tensor]


class ExpertStack:
    """One matrix per expert, weight [experts, n, k]; with scales [experts, n] if stored in eight bits."""

    __slots__ = ("grouped", "scales", "weight")

    def __init__(self, weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.scales = weight, scales
        # The grouped product takes BF16 on Hopper and later, with matrix rows aligned to 16 bytes.
        aligned = dtype == torch.bfloat16 and not weight.shape[-1] % 8 and not weight.shape[-2] % 8
        cuda = weight.device.type == "cuda"
        self.grouped = cuda and aligned and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)

    def __call__(self, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows sorted by expert [r]; those of expert e end before `ends[e]`."""
        if self.grouped:
            out = torch._grouped_mm(rows, self.weight.to(rows.dtype).transpose(1, 2), offs=ends)
        else:
            out = _in_turn(rows, self.weight, ends)
        return out if self.scales is None else (out * self.scales[experts]).to(rows.dtype)


def _in_turn(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out, start = rows.new_empty(rows.shape[0], weight.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = linear(rows[start:end], weight[expert].to(rows.dtype))
        start = end
    return out


@dataclass(slots=True, eq=False)
class Experts:
    """The router and the experts of one layer."""

    router: Tensor
    gate_up: ExpertStack
    down: ExpertStack
    activate: Activate
    per_token: int
    normalised: bool
    numbers: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = torch.arange(self.router.shape[0], device=self.router.device)

    @property
    def capturable(self) -> bool:
        """Whether it runs without the host reading anything."""
        return self.gate_up.grouped and self.down.grouped

    def __call__(self, hidden: Tensor) -> Tensor:
        probabilities = linear(hidden, self.router).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        experts, order = chosen.view(-1).sort(stable=True)
        ends = torch.searchsorted(experts, self.numbers, right=True, out_int32=True)
        rows = hidden[order // self.per_token]
        answers = self.down(self.activate(self.gate_up(rows, experts, ends)), experts, ends)
        unsorted = torch.empty_like(answers)
        unsorted[order] = answers
        return torch.bmm(weights[:, None], unsorted.view(*chosen.shape, -1))[:, 0]


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
