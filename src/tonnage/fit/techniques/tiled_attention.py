"""Attention in tiles of query rows, for what no fused kernel computes: soft caps, sinks, biases with gradients.

A tile holds all keys that its rows may see, so its softmax is the plain one; backward recomputes it from queries and
keys. Memory grows with the sequence length, not its square. It is registered with transformers as another attention
implementation, with masks of one line per batch row instead of a square.
"""

import inspect
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tonnage.errors import TonnageError
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.fused_attention import (
    attention_models,
    dropout_of,
    eager_configs,
    set_implementation,
    why_not_dropout,
)
from tonnage.fit.training import Training

# Arguments of a model's eager attention that tiles support.
_KNOWN = set(
    "module query key value attention_mask dropout scaling softcap sliding_window s_aux is_causal position_bias "
    "kwargs".split()
)


class WindowMissing(TonnageError, RuntimeError):
    """Raised if a mask has a sliding window but the layer does not say how wide it is."""


class TiledAttention(Technique, name="tiled-attention"):
    """Computes `tile_rows` query rows at a time; `dropout="resampled"` accepts other random numbers."""

    tile_rows: int = 256
    dropout: str = "same"

    def why_not(self, training: Training) -> str | None:
        if self.tile_rows < 1:
            return f"tile_rows={self.tile_rows}: a tile has at least one row."
        for model in _eager_models(training.model):
            reason = _why_not_model(model) or why_not_dropout(dropout_of(model), self.dropout)
            if reason is not None:
                return reason
        return None if _eager_models(training.model) else "No model of transformers with eager attention was found."

    def place(self, training: Training, stack: ExitStack) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        name = f"tonnage_tiled_{self.tile_rows}"
        AttentionInterface.register(name, partial(attention_forward, tile_rows=self.tile_rows))
        AttentionMaskInterface.register(name, make_mask)
        for model in _eager_models(training.model):
            stack.callback(set_implementation(model, name))


def _eager_models(model: nn.Module) -> list[nn.Module]:
    return [part for part in attention_models(model).values() if eager_configs(part)]


def _why_not_model(model: nn.Module) -> str | None:
    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        return f"transformers lets {kind} use its own attention only."
    if any(getattr(config, "output_attentions", False) for config in eager_configs(model)):
        return f"{kind} is configured to return its attention weights (output_attentions), which are then not made."
    if any(getattr(module, "reorder_and_upcast_attn", False) for module in model.modules()):
        return f"{kind} computes its attention in another order (reorder_and_upcast_attn), which tiles would leave out."
    # Check the eager attention function of the file that defines each module, if any.
    files = (sys.modules.get(type(module).__module__) for module in model.modules())
    eager = {file.eager_attention_forward for file in files if file and hasattr(file, "eager_attention_forward")}
    unknown = sorted({name for function in eager for name in inspect.signature(function).parameters} - _KNOWN)
    return f"{kind}'s attention takes {', '.join(unknown)}, which tiles would leave out." if unknown else None


def make_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = None, attention_mask: Any = None, **rest: Any
) -> Tensor | None:
    """Return the smallest mask that expresses the rule; the first dimension is the batch:

    2 dimensions    causal, and which keys are not padding
    3 dimensions    the same with the layer's sliding window
    4 dimensions    the whole rule: True where a score counts; one row if all rows are equal
    """
    from transformers import masking_utils

    # Which of three known rules is it?
    kind = None
    if mask_function is masking_utils.causal_mask_function:
        kind = "causal"
    elif mask_function is masking_utils.bidirectional_mask_function:
        kind = "all"
    elif mask_function is not None and getattr(mask_function, "__qualname__", "") == "and_masks.<locals>.and_mask":
        parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
        names = {getattr(part, "__qualname__", "") for part in parts}
        if names == {"sliding_window_overlay.<locals>.inner_mask", "causal_mask_function"}:
            kind = "window"
    if kind is None or q_length != kv_length or int(rest.get("q_offset", 0)) or int(rest.get("kv_offset", 0)):
        rest |= {"mask_function": mask_function, "attention_mask": attention_mask}
        rest |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        whole: Tensor | None = masking_utils.sdpa_mask(batch_size, q_length, kv_length, **rest)
        return whole
    keys = torch.ones(batch_size, kv_length, dtype=torch.bool, device=rest.get("device", "cpu"))
    if attention_mask is not None:
        keys = attention_mask[:, :kv_length].bool()
    return {"causal": keys, "window": keys[:, None], "all": keys[:, None, None]}[kind]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tile_rows: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers calls."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(
        scaling=scaling,
        soft_cap=softcap,
        dropout=dropout,
        # From the host's generator, which recomputation in backward restores.
        seed=int(torch.randint(2**62, ())) if dropout else 0,
        **_rules(module, query, attention_mask, sliding_window, is_causal),
    )
    bias = position_bias
    if attention_mask is not None and attention_mask.is_floating_point():  # a user's additive mask
        bias = attention_mask if bias is None else bias + attention_mask
    sinks = getattr(module, "sinks", None) if s_aux is None else s_aux
    mixed = tiled_attention(query, key, value, scores, tile_rows=tile_rows, bias=bias, sinks=sinks)
    return mixed.transpose(1, 2).contiguous(), None


def _rules(
    module: nn.Module, query: Tensor, mask: Tensor | None, window: int | None, is_causal: bool | None
) -> dict[str, Any]:
    """Return which scores count, from a mask of `make_mask`; without one, from the layer's own flag."""
    if mask is None:
        flag = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return {"causal": bool(flag) and query.shape[2] > 1, "window": window if flag else None}
    if mask.dim() == 4:
        return {} if mask.is_floating_point() else {"mask": mask.bool()}
    if mask.dim() == 2:
        return {"causal": True, "keys": mask}
    if window is None:
        raise WindowMissing(
            f"{type(module).__name__} has a mask with a sliding window but does not say how wide it is.",
            hint="Leave tiled-attention out for this model.",
        )
    return {"causal": True, "window": window, "keys": mask[:, 0]}


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
    mixed: Tensor = _TiledAttention.apply(scores, tile_rows, query, key, value, bias, sinks)
    return mixed


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Scores, tile_rows: int, *leaves: Any) -> Tensor:
        ctx.save_for_backward(*leaves)
        ctx.scores, ctx.tile_rows = scores, tile_rows
        query, key, value, bias, sinks = leaves
        output: Tensor = query.new_empty(*query.shape[:-1], value.shape[-1])
        for tile in _tiles(query, key, scores, tile_rows):
            weights, _, _ = tile.weights(query, key, bias, sinks)
            dropped = tile.fold_heads(tile.drop(weights).to(value.dtype))
            output[:, :, tile.rows] = tile.unfold(dropped @ value[:, :, tile.keys])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks = leaves = ctx.saved_tensors
        # Sums over tiles, in a dtype wide enough for them.
        wide = torch.promote_types(query.dtype, torch.float32)
        to_query = torch.empty_like(query)
        to_key, to_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        to_bias, to_sinks = (
            torch.zeros_like(leaf, dtype=wide) if leaf is not None and needed else None
            for leaf, needed in zip((bias, sinks), ctx.needs_input_grad[5:], strict=True)
        )
        for tile in _tiles(query, key, ctx.scores, ctx.tile_rows):
            weights, sink, bend = tile.weights(query, key, bias, sinks)
            above = tile.fold(upstream)
            to_value[:, :, tile.keys] += tile.fold_heads(tile.drop(weights).to(value.dtype)).mT @ above
            towards_weights = tile.drop(tile.unfold(above @ value[:, :, tile.keys].mT).to(weights.dtype))
            mean = (weights * towards_weights).sum(dim=-1, keepdim=True)
            towards_scores = towards_weights.sub_(mean).mul_(weights)
            if to_sinks is not None and sink is not None:
                to_sinks.sub_((sink * mean).sum(dim=(0, 2, 3)))
            if to_bias is not None:
                region = tile.region(to_bias)  # a view; what was broadcast to the tile is added here
                region += towards_scores.sum_to_size(region.shape)
            if bend is not None:
                towards_scores = torch.ops.aten.tanh_backward(towards_scores, bend)
            products = tile.fold_heads(towards_scores.mul_(tile.scores.scaling).to(query.dtype))
            to_query[:, :, tile.rows] = tile.unfold(products @ key[:, :, tile.keys])
            to_key[:, :, tile.keys] += products.mT @ tile.fold(query)
            # Before the next tile's are allocated.
            del weights, sink, bend, above, mean, towards_weights, towards_scores, products
        found = zip((to_query, to_key, to_value, to_bias, to_sinks), leaves, strict=True)
        return None, None, *(None if made is None else made.to(leaf.dtype) for made, leaf in found)


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

    def weights(
        self, query: Tensor, key: Tensor, bias: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the weights of each key before dropout, that of the sink, and the tanh of the soft cap."""
        products = self.fold(query) @ key[:, :, self.keys].mT
        values = self.unfold(products).to(self.wide) * self.scores.scaling
        bend = None
        if self.scores.soft_cap is not None:
            bend = values.div_(self.scores.soft_cap).tanh_()
            values = bend * self.scores.soft_cap
        if bias is not None:
            values = values + self.region(bias)
        # The masks of every rule; they broadcast to the scores.
        masks = []
        if self.scores.causal:
            rows = torch.arange(self.rows.start, self.rows.stop, device=values.device)[:, None]
            keys = torch.arange(self.keys.start, self.keys.stop, device=values.device)
            masks.append(keys <= rows)
            if self.scores.window is not None:
                masks.append(keys > rows - self.scores.window)
        if self.scores.keys is not None:
            masks.append(self.scores.keys[:, None, None, self.keys])
        if self.scores.mask is not None:
            masks.append(self.region(self.scores.mask))
        for counts in masks:
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
        return weights.div_(total.clamp_min_(torch.finfo(self.wide).tiny)), sink, bend

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
