"""Activations that the forward pass saves for the backward pass, counted tensor by tensor from a block's shape.

All figures are bytes per token. `SavedPerToken` separates them by what divides them: tensor parallelism, tensor parallelism only
with sequence parallelism, and what grows with the number of keys. How many blocks save what, and for how long, is up to
`moments`.
"""

from dataclasses import dataclass, replace

import numpy as np

from tonnage.budget.training.adapters import ATTENTION, EXPERTS, MLP
from tonnage.budget.training.configuration import Configuration, Number, Quantity
from tonnage.budget.training.styles import Style, style_of
from tonnage.models.shape import AttentionKind, AttentionShape, FeedForward, LayerShape, ModelShape

FP32 = 4


@dataclass(frozen=True, slots=True)
class SavedPerToken:
    """Saved bytes per token; `scores` per token and key."""

    split: Quantity = 0.0  # divided by tensor parallelism
    whole: Quantity = 0.0  # divided by it only with sequence parallelism
    # The same, but gathered as a matrix's input: whole unless it is gathered again in the backward pass.
    gathered: Quantity = 0.0
    scores: Quantity = 0.0

    def __add__(self, other: "SavedPerToken") -> "SavedPerToken":
        split, whole, gathered = self.split + other.split, self.whole + other.whole, self.gathered + other.gathered
        return SavedPerToken(split, whole, gathered, self.scores + other.scores)

    def __mul__(self, factor: float) -> "SavedPerToken":
        split, whole, gathered = self.split * factor, self.whole * factor, self.gathered * factor
        return SavedPerToken(split, whole, gathered, self.scores * factor)

    def per_token(self, config: Configuration, keys: Number) -> Quantity:
        """Return the bytes per token on one GPU, if a token attends to `keys` keys."""
        whole_over = config.tp if config.sequence_parallel else 1
        gathered_over = 1 if config.traits.parallel == "torch" else whole_over
        split = (self.split + self.scores * keys) / config.tp
        return split + self.whole / whole_over + self.gathered / gathered_over


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """What one block saves, by part; its input; what selective checkpointing saves; and gradients alive at once.

    `selective_only` is the part that only selective checkpointing saves. `fetched` is what exists beside the gradients
    if tensors return from the host one by one.
    """

    norms: SavedPerToken
    attention: SavedPerToken
    feed_forward: SavedPerToken
    entry: SavedPerToken
    selective: SavedPerToken
    selective_only: SavedPerToken
    backward: SavedPerToken
    fetched: SavedPerToken

    @property
    def kept(self) -> SavedPerToken:
        """Everything it saves without recomputation."""
        return self.norms + self.attention + self.feed_forward


@dataclass(frozen=True, slots=True)
class BlockWidths:
    """Elements per token in one block, and bytes per element in the residual stream and inside the block."""

    hidden: int
    queries: int
    keys: int
    values: int
    attended: int  # output of attention
    heads: int
    residual_bytes: int
    compute_bytes: int
    autocast: bool
    adapter_bytes: int  # per element that an adapter reads; 0: no adapters, everything is trained
    adapters_cast: bool  # each adapter reads its own copy, since it is wider than the base
    adapted: tuple[str, ...]  # matrices with an adapter
    drops: bool  # LoRA dropout: each adapter saves its own input and mask


def block_of(shape: ModelShape, layer: LayerShape, hidden: int, config: Configuration) -> BlockActivations:
    """Return what one block saves per token. If it and all before it are frozen, only a checkpoint's input remains."""
    if layer.frozen == "still":
        # PyTorch's checkpoint keeps the input even if no backward pass needs it.
        entry = SavedPerToken(whole=config.compute_bytes * hidden)
        nothing = SavedPerToken()
        return BlockActivations(nothing, nothing, nothing, entry, entry, nothing, nothing, nothing)
    config = configuration_of(layer, config)
    style = style_of(shape, layer, config)
    widths = widths_of(layer, hidden, config)
    selective, selective_only = _selective(layer, style, widths, config)
    backward = _backward(layer, style, widths, config)
    if config.framework == "deepspeed":
        # Ulysses sequence parallelism exchanges heads for tokens: the allocator cannot reuse either copy of queries,
        # keys, values and output before the GPU has reached them.
        elements = widths.queries + widths.keys + widths.values + widths.attended
        backward += SavedPerToken(split=2 * widths.compute_bytes * elements * (np.asarray(config.cp) > 1))
    fetched = SavedPerToken()
    if (mlp := layer.feed_forward) is not None:
        # The factors of the product or the activation's input, and what `_backward` counts as freed.
        factors = (2 if mlp.gated else 1) * widths.compute_bytes
        fetched = SavedPerToken(split=(factors + _read_last(widths) * mlp.gated) * _between(mlp))
    return BlockActivations(
        norms=_norms(layer, style, widths),
        attention=_attentions(layer, style, widths, config),
        feed_forward=_feed_forward(layer, style, widths, tiled=config.tiled_mlp),
        entry=SavedPerToken(whole=widths.residual_bytes * hidden),
        selective=selective,
        selective_only=selective_only,
        backward=backward,
        fetched=fetched,
    )


def configuration_of(layer: LayerShape, config: Configuration) -> Configuration:
    """Return the configuration of a frozen layer: in 16 bits, like the base of adapters, but without any."""
    return replace(config, lora_rank=1, lora_targets=()) if layer.frozen else config


def final_norm(shape: ModelShape, config: Configuration) -> SavedPerToken:
    """Return what the final norm saves, including the head's input. Both are frozen if the last layer is."""
    layer = shape.decoder.layers[-1]
    if layer.frozen == "still":
        return SavedPerToken()
    config = configuration_of(layer, config)
    style, widths = style_of(shape, layer, config), widths_of(layer, shape.hidden, config)
    return _norm(style, widths) + (SavedPerToken() if widths.adapter_bytes else _read(widths, 1))


def widths_of(layer: LayerShape, hidden: int, config: Configuration) -> BlockWidths:
    mixer = layer.attention
    heads = mixer.heads if mixer else 0
    # Adapters read the compute dtype, or in TRL what accelerate's autocast passes on.
    read_bytes = config.made_bytes if config.objective.plain else config.compute_bytes
    key_heads, key, value = (mixer.kv_heads, mixer.head_dim, mixer.value_head_dim) if mixer else (0, 0, 0)
    return BlockWidths(
        hidden=hidden,
        queries=heads * key,
        keys=key_heads * key,
        values=key_heads * value,
        attended=heads * value,
        heads=heads,
        residual_bytes=FP32 if config.autocast and not layer.narrow else config.compute_bytes,
        compute_bytes=config.compute_bytes,
        autocast=config.autocast,
        adapter_bytes=read_bytes if config.lora_rank else 0,
        adapters_cast=config.made_bytes > config.compute_bytes,
        adapted=config.lora_targets,
        drops=config.lora_dropout,
    )


def _norms(layer: LayerShape, style: Style, widths: BlockWidths) -> SavedPerToken:
    """Return what a block's norms save. Parallel norms with the same input save it once."""
    # Norms without weights are not in the shape's count.
    inputs = 1 if layer.parallel and style.norm == "native" else layer.norms or 2
    return _norm(style, widths) * inputs


def _norm(style: Style, widths: BlockWidths) -> SavedPerToken:
    """Return a norm's input and, if it is written in Python and trained, the normalized values. Statistics are ignored."""
    hidden, stream = widths.hidden, widths.residual_bytes
    if style.norm == "native":
        return SavedPerToken(whole=stream * hidden)
    if style.norm == "centred":
        return SavedPerToken(whole=3 * FP32 * hidden)
    if widths.adapter_bytes or style.norm == "wide":
        return SavedPerToken(whole=FP32 * hidden)
    normalised = FP32 if style.norm == "rms-wide" else stream
    return SavedPerToken(whole=(FP32 + normalised) * hidden)


def _read(widths: BlockWidths, readers: int) -> SavedPerToken:
    """Return a norm's output, saved once for all matrices that read it; autocast casts it for each of them."""
    copies = readers if widths.autocast else 1
    return SavedPerToken(gathered=copies * widths.compute_bytes * widths.hidden)


def _adapted(widths: BlockWidths, readers: int) -> SavedPerToken:
    """Return the inputs of adapters: one copy, or one each if they are wider than the base or use dropout."""
    copies = readers if widths.drops or widths.adapters_cast else min(readers, 1)
    return SavedPerToken(gathered=copies * (widths.adapter_bytes + widths.drops) * widths.hidden)


def _attentions(layer: LayerShape, style: Style, widths: BlockWidths, config: Configuration) -> SavedPerToken:
    kept = _mixer(layer.attention, style, widths, config) if layer.attention else SavedPerToken()
    if layer.cross_attention:
        # Tokens of two sequences have no relative distance, so no bias.
        style = replace(style, scores="") if style.biased else style
        kept += _mixer(layer.cross_attention, style, widths, config)
    return kept


def _mixer(mixer: AttentionShape, style: Style, widths: BlockWidths, config: Configuration) -> SavedPerToken:
    """Return queries, keys and values as the kernel reads them, its output, and the tensors between."""
    size = widths.compute_bytes
    kept = _read(widths, 1 if style.fused_qkv else 3)
    if widths.adapter_bytes:
        readers = sum(name in widths.adapted for name in ATTENTION[:3])
        own = (widths.drops or widths.adapters_cast) and "o_proj" in widths.adapted
        cast = (widths.adapter_bytes + widths.drops) * own
        kept = _adapted(widths, min(readers, 1) if style.fused_qkv else readers)
        kept += SavedPerToken(split=cast * widths.attended)
    if style.dropout:
        kept += SavedPerToken(whole=widths.hidden)
    if style.qk_norm:
        normalised = FP32 + (FP32 if style.norm == "rms-wide" else size)
        kept += SavedPerToken(split=(size if style.fused else normalised) * (widths.queries + widths.keys))
    if mixer.kind is AttentionKind.LATENT:
        # Both compressed vectors, normalized, and the keys without their rotary part, computed in one matrix with the
        # values.
        normed = size + (size if style.norm == "native" else FP32 + size)
        plain_keys = widths.keys - widths.heads * mixer.rope_dim
        kept += SavedPerToken(whole=normed * (mixer.latent_rank + mixer.query_rank), split=size * plain_keys)
    if style.scores:
        return kept + _scores(style, widths)
    if style.unfused_mqa and mixer.kv_heads == 1:
        split = 3 * FP32 * widths.queries + size * widths.attended
        return kept + SavedPerToken(split=split, scores=FP32 * widths.heads)
    heads = widths.queries + widths.keys + widths.values
    if style.repeated:
        heads = 2 * widths.queries + widths.attended
    elif style.fused_qkv and style.rotary != "none" and not style.fused:
        # Values are a view of the matrix's output. Transformer Engine copies them beside the rotated queries and keys.
        heads += widths.queries + widths.keys
    out = widths.attended * (2 if style.rotary == "cat" and size < FP32 else 1)
    kept += SavedPerToken(split=size * (heads + out) + FP32 * widths.heads)
    if config.traits.parallel == "torch":
        # Ring attention assembles its output by head; reading it by token makes a copy.
        kept += SavedPerToken(split=size * widths.attended * (np.asarray(config.cp) > 1))
    if config.framework == "megatron" and config.attention == "flash-2":
        # Megatron's layout is sequence first, FlashAttention 2's batch first: Transformer Engine copies its output
        # back.
        kept += SavedPerToken(split=size * widths.attended)
    return kept


def _scores(style: Style, widths: BlockWidths) -> SavedPerToken:
    """Return what unfused attention saves: its factors, the softmax, and with dropout its mask and output."""
    size, dropout = widths.compute_bytes, style.attention_dropout
    if style.scores == "eager":
        # KV heads repeated to match the query heads; the softmax in FP32 and again in the dtype it is used in.
        softmax = FP32 if style.upcast or widths.autocast else size
        used = size if softmax > size or dropout else 0
        heads = 2 * widths.queries + 2 * widths.attended
        return SavedPerToken(split=size * heads, scores=(softmax + used + bool(dropout)) * widths.heads)
    if style.scores == "math":  # all in FP32, with as many KV heads as query heads
        wide, heads = FP32, 2 * widths.queries + widths.attended
    else:  # as the backward pass reads them: in FP32, or as autocast casts them
        wide, heads = size if widths.autocast else FP32, widths.queries + widths.keys + widths.values
    scores = wide + (wide + 1 if dropout else 0)
    return SavedPerToken(split=wide * heads + size * widths.attended, scores=scores * widths.heads)


def _feed_forward(layer: LayerShape, style: Style, widths: BlockWidths, *, tiled: bool = False) -> SavedPerToken:
    """Return what the MLP saves. A tiled MLP saves only its input."""
    mlp = layer.feed_forward
    if mlp is None:
        return SavedPerToken()
    # The output of its norm. In a mixture only the router reads it; the experts' copies are counted with the experts.
    readers = 2 if mlp.gated and not style.fused_gate and not mlp.experts else 1
    if widths.adapter_bytes:
        dense = mlp.shared_intermediate if mlp.experts else mlp.intermediate
        adapted = sum(name in widths.adapted for name in MLP[:2]) if dense else 0
        kept = _adapted(widths, min(adapted, readers))
    else:
        # A parallel block with one norm already saved it for attention.
        shared = layer.parallel and layer.norms == 1 and not widths.autocast
        kept = SavedPerToken() if shared else _read(widths, readers)
    if tiled:
        return kept
    if style.dropout:
        kept += SavedPerToken(whole=widths.hidden)
    if mlp.experts:
        return kept + _experts(mlp, style, widths)
    return kept + SavedPerToken(split=_mlp_bytes(mlp, style, widths) * mlp.intermediate)


def _mlp_bytes(mlp: FeedForward, style: Style, widths: BlockWidths, closing: str = MLP[-1]) -> float:
    """Return bytes per intermediate element: inputs and output of the activation, and the gated product."""
    size, read = widths.compute_bytes, _read_last(widths, closing)
    if mlp.gated:
        return (2 if style.fused or style.liger else 3) * size + read
    if style.activation == "relu":
        return read or size
    if style.activation == "chain" and not style.fused:
        return (size + 3 * FP32 if widths.autocast else 4 * size) + read
    return size + read


def _experts(mlp: FeedForward, style: Style, widths: BlockWidths) -> SavedPerToken:
    """Return what a mixture saves: each token is copied to its experts, and their outputs are kept for weighting."""
    size = widths.residual_bytes
    between = _mlp_bytes(mlp, style, widths, EXPERTS) * size / widths.compute_bytes * mlp.intermediate
    # Copies for experts that are not trained are not saved.
    copies = 1 if widths.adapter_bytes and EXPERTS not in widths.adapted else 2
    shared = _mlp_bytes(mlp, style, widths) * mlp.shared_intermediate
    router = FP32 * mlp.experts + (FP32 * widths.hidden if style.wide_router else 0)
    return SavedPerToken(split=mlp.experts_per_token * (between + copies * size * widths.hidden) + shared, whole=router)


def _selective(
    layer: LayerShape, style: Style, widths: BlockWidths, config: Configuration
) -> tuple[SavedPerToken, SavedPerToken]:
    """Return what selective checkpointing saves, and the part that only it saves: the input and the last product.

    It saves all but the scores; or the input, attention's output, every other product and reduce-scatter outputs.
    """
    if config.traits.selective == "scores":
        block = _norms(layer, style, widths) + _feed_forward(layer, style, widths)
        kept = block + _attentions(layer, style, widths, config)
        return SavedPerToken(kept.split, kept.whole, kept.gathered), SavedPerToken()
    # The output widths of the matrices in execution order. A compiler drops the last product, which no gradient needs.
    every = [widths.queries, widths.keys, widths.values]
    every = [sum(every), widths.hidden] if style.fused_qkv else [*every, widths.hidden]
    if layer.feed_forward is not None:
        every += [_between(layer.feed_forward)] * (2 if layer.feed_forward.gated else 1) + [widths.hidden]
    products = every[: -1 if config.compile else None : 2]
    keeps_last = len(every) % 2 == 1 and not config.compile
    split = sum(width for width in products if width != widths.hidden) + widths.attended
    whole = sum(width for width in products if width == widths.hidden)
    size = widths.compute_bytes
    entry = widths.residual_bytes * widths.hidden
    # Sequence parallelism ends attention and MLP with a reduce-scatter.
    scatters = (np.asarray(config.tp) > 1) * float(config.sequence_parallel)
    scattered = size * widths.hidden * (bool(layer.attention) + bool(layer.feed_forward)) * scatters
    only = SavedPerToken(whole=(widths.residual_bytes + size * keeps_last) * widths.hidden)
    return SavedPerToken(size * split + FP32 * widths.heads, size * whole + entry + scattered), only


def _backward(layer: LayerShape, style: Style, widths: BlockWidths, config: Configuration) -> SavedPerToken:
    """Return the most gradients alive at once, in the MLP: of the product, its factors and the block's output.

    The input of a gated MLP's last matrix is freed by then. A tiled MLP has the gradients of one tile, beside
    everything it saves for it.
    """
    mlp = layer.feed_forward
    size = widths.compute_bytes
    if mlp is None:
        return SavedPerToken(whole=2 * widths.residual_bytes * widths.hidden)
    gradients = 3 * size - _read_last(widths) if mlp.gated else 2 * size
    if style.activation == "chain" and not style.fused:
        gradients = 3 * (FP32 if widths.autocast else size)
    stream = widths.residual_bytes * widths.hidden
    # With sequence parallelism it is gathered for the last matrix.
    gathered = stream * (np.asarray(config.tp) > 1)
    # Tiles of a tiled MLP: like DeepSpeed's `TiledMLP`, about tokens divided by the hidden size.
    tiles: Quantity = 1
    if config.tiled_mlp:
        tiles = np.ceil(np.asarray(config.seq) / config.cp / widths.hidden)[()]
    if not np.any(np.asarray(tiles) > 1):
        return SavedPerToken(split=gradients * _between(mlp), whole=stream, gathered=gathered)
    # So little that attention has more: its input, the gradients of queries, keys and values, and FP32 sums for
    # queries.
    tile = (gradients + _mlp_bytes(mlp, style, widths)) * _between(mlp) / tiles
    attention = size * (widths.attended + widths.queries + widths.keys + widths.values) + FP32 * widths.queries
    return SavedPerToken(split=np.maximum(tile, attention), whole=stream, gathered=gathered)


def _read_last(widths: BlockWidths, closing: str = MLP[-1]) -> int:
    """Return bytes per element of the input of the MLP's last matrix, as it or its adapter saves it."""
    if not widths.adapter_bytes:
        return widths.compute_bytes
    return widths.adapter_bytes + widths.drops if closing in widths.adapted else 0


def _between(mlp: FeedForward) -> int:
    """Return the MLP's intermediate elements per token, over all its experts."""
    return mlp.intermediate * max(mlp.experts_per_token, 1) + mlp.shared_intermediate
