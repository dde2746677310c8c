"""Attention in tiles of query rows: only one tile's scores exist at a time, in forward and backward.

    mixed = tiled_attention(query, key, value, Scores(scaling=0.125, causal=True, soft_cap=50.0), tile_rows=256)

This is for what fused kernels cannot do: soft caps, sinks, additive biases with gradients. A tile holds all keys
that its rows may see, so its softmax is the plain one; backward recomputes it from queries and keys. Memory grows
with the sequence length, not its square. For models, see `techniques.tiled_attention`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores are computed and which of them count; learned parts (bias, sinks) are passed separately."""

    scaling: float
    soft_cap: float | None = None
    causal: bool = False
    window: int | None = None  # how many keys a causal row sees, itself included
    keys: Tensor | None = None  # (batch, keys): True for keys that are not padding
    mask: Tensor | None = None  # (batch or 1, heads or 1, queries or 1, keys), True where a score counts
    dropout: float = 0.0
    seed: int = 0  # for dropout


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    *,
    tile_rows: int,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of (batch, heads, rows, width); several query heads may share one key head.

    `bias` is added to the scores and broadcasts to them; `sinks` holds one score per head that joins the softmax
    without a value. A row that sees no key gives zeros.
    """
    return _TiledAttention.apply(query, key, value, bias, sinks, scores, tile_rows)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        scores: Scores,
        tile_rows: int,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, bias, sinks)
        ctx.scores, ctx.tile_rows = scores, tile_rows
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        for tile in _tiles(query, key, scores, tile_rows):
            weights = tile.weights(query, key, bias, sinks)
            dropped = tile.drop(weights.counted)
            output[:, :, tile.rows] = tile.mix(dropped.to(value.dtype), value)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks = ctx.saved_tensors
        # Sums over tiles, in a dtype wide enough for them.
        wide = torch.promote_types(query.dtype, torch.float32)
        to_query = torch.empty_like(query)
        to_key, to_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        to_bias, to_sinks = (
            torch.zeros_like(leaf, dtype=wide) if leaf is not None and needed else None
            for leaf, needed in zip((bias, sinks), ctx.needs_input_grad[3:5], strict=True)
        )
        for tile in _tiles(query, key, ctx.scores, ctx.tile_rows):
            weights = tile.weights(query, key, bias, sinks)
            above = tile.fold(upstream)
            to_value[:, :, tile.keys] += tile.fold_heads(tile.drop(weights.counted).to(value.dtype)).mT @ above
            towards_weights = tile.unfold(above @ value[:, :, tile.keys].mT).to(weights.counted.dtype)
            towards_weights = tile.drop(towards_weights)
            mean = (weights.counted * towards_weights).sum(dim=-1, keepdim=True)
            towards_scores = towards_weights.sub_(mean).mul_(weights.counted)
            if to_sinks is not None and weights.sink is not None:
                to_sinks.sub_((weights.sink * mean).sum(dim=(0, 2, 3)))
            if to_bias is not None:
                region = tile.region(to_bias)  # a view; what was broadcast to the tile is added here
                region += towards_scores.sum_to_size(region.shape)
            if weights.bend is not None:
                towards_scores = torch.ops.aten.tanh_backward(towards_scores, weights.bend)
            products = tile.fold_heads(towards_scores.mul_(tile.scores.scaling).to(query.dtype))
            to_query[:, :, tile.rows] = tile.unfold(products @ key[:, :, tile.keys])
            to_key[:, :, tile.keys] += products.mT @ tile.fold(query)
            del weights, above, mean, towards_weights, towards_scores, products  # before the next tile's are allocated
        leaves, sums = (query, key, value, bias, sinks), (to_query, to_key, to_value, to_bias, to_sinks)
        found = zip(sums, leaves, strict=True)
        return *(None if made is None else made.to(leaf.dtype) for made, leaf in found), None, None


@dataclass(frozen=True, kw_only=True)
class _Weights:
    counted: Tensor  # of each key, before dropout
    sink: Tensor | None  # of the sink
    bend: Tensor | None  # tanh of the soft cap


@dataclass(frozen=True)
class _Tile:
    """Some query rows and all keys that they may see."""

    scores: Scores
    rows: slice
    keys: slice
    groups: int  # query heads per key head
    wide: torch.dtype

    def fold(self, tensor: Tensor) -> Tensor:
        """Return its rows of (batch, heads, rows, width), with heads that share keys side by side."""
        return self.fold_heads(tensor[:, :, self.rows])

    def fold_heads(self, tensor: Tensor) -> Tensor:
        batch, heads, rows, width = tensor.shape
        return tensor.reshape(batch, heads // self.groups, self.groups * rows, width)

    def unfold(self, tensor: Tensor) -> Tensor:
        batch, heads, rows, width = tensor.shape
        return tensor.reshape(batch, heads * self.groups, rows // self.groups, width)

    def mix(self, weights: Tensor, value: Tensor) -> Tensor:
        return self.unfold(self.fold_heads(weights) @ value[:, :, self.keys])

    def weights(self, query: Tensor, key: Tensor, bias: Tensor | None, sinks: Tensor | None) -> _Weights:
        products = self.fold(query) @ key[:, :, self.keys].mT
        values = self.unfold(products).to(self.wide) * self.scores.scaling
        bend = None
        if self.scores.soft_cap is not None:
            bend = values.div_(self.scores.soft_cap).tanh_()
            values = bend * self.scores.soft_cap
        if bias is not None:
            values = values + self.region(bias)
        for counts in self._masks(values.device):
            values.masked_fill_(~counts, float("-inf"))
        # Softmax.
        largest = values.amax(dim=-1, keepdim=True)
        sink = None if sinks is None else sinks.to(self.wide).view(1, -1, 1, 1)
        # A row without keys has no maximum; without a lower bound it would become NaN.
        largest = largest.clamp_min_(torch.finfo(self.wide).min) if sink is None else torch.maximum(largest, sink)
        weights = values.sub_(largest).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        if sink is not None:
            sink = (sink - largest).exp_()
            total += sink
            sink = sink / total
        return _Weights(counted=weights.div_(total.clamp_min_(torch.finfo(self.wide).tiny)), sink=sink, bend=bend)

    def _masks(self, device: torch.device) -> list[Tensor]:
        """Return the masks of every rule; they broadcast to the scores."""
        masks = []
        if self.scores.causal:
            rows = torch.arange(self.rows.start, self.rows.stop, device=device)[:, None]
            keys = torch.arange(self.keys.start, self.keys.stop, device=device)
            masks.append(keys <= rows)
            if self.scores.window is not None:
                masks.append(keys > rows - self.scores.window)
        if self.scores.keys is not None:
            masks.append(self.scores.keys[:, None, None, self.keys])
        if self.scores.mask is not None:
            masks.append(self.region(self.scores.mask))
        return masks

    def region(self, whole: Tensor) -> Tensor:
        """Return the tile's part of a tensor that broadcasts to all scores."""
        return whole[:, :, self.rows if whole.shape[2] > 1 else slice(None), self.keys]

    def drop(self, weights: Tensor) -> Tensor:
        """Apply dropout, with the same mask in forward and backward."""
        rate = self.scores.dropout
        if not rate:
            return weights
        generator = torch.Generator(weights.device).manual_seed(self.scores.seed + self.rows.start)
        kept = torch.rand(weights.shape, device=weights.device, generator=generator) >= rate
        return weights * kept / (1 - rate)


def _tiles(query: Tensor, key: Tensor, scores: Scores, tile_rows: int) -> list[_Tile]:
    count, key_count = query.shape[2], key.shape[2]
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    tiles = []
    for start in range(0, count, tile_rows):
        stop = min(start + tile_rows, count)
        first = max(0, start - scores.window + 1) if scores.causal and scores.window is not None else 0
        keys = slice(first, min(stop, key_count) if scores.causal else key_count)
        tiles.append(_Tile(scores, slice(start, stop), keys, groups, wide))
    return tiles
