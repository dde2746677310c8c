"""Seconds of one micro-batch through one layer, and through the head and loss: forward, backward, recomputed.

An operator is a matrix product, fused attention, or bound by the bytes that it moves; in eager mode a layer takes at least as
long as the host takes to issue its kernels. Everything that moves bytes is counted as PyTorch runs it: transformers' eager
kernels one by one, or fused ones under `torch.compile` and in Megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tonnage.budget.configuration import Configuration, Number, Quantity
from tonnage.budget.frameworks import framework_of
from tonnage.budget.roofline import Calibration, Roofline
from tonnage.budget.styles import Style, style_of
from tonnage.models.shape import Attention, AttentionKind, FeedForward, Layer, ModelShape

# The backward of a fused attention kernel: five products for the forward's two.
_ATTENTION_BACKWARD = 2.5
# Bytes of element-wise backwards against their forwards, counted operator by operator on transformers' eager blocks.
_NORM_BACKWARD = 2.8  # spelled out in Python; 2.5 as one kernel
_NATIVE_NORM_BACKWARD = 2.5
_GATED_BACKWARD = 1.8
_CHAIN_BACKWARD = 1.5
_SIMPLE_BACKWARD = 1.2
_SCORES_BACKWARD = 2.0
# A layer's kernels once fused, against eager ones: 12 of 40 (seven products, attention, four fused groups).
_FUSED_LAUNCHES = 0.3
# Eager attention passes over its scores: written, scaled, masked, softmax in FP32, cast, read.
_EAGER_SCORE_PASSES = 10
# One multiply-add and one decay for each number of a recurrent state and token, forward.
_RECURRENT_OPERATIONS = 6
_FP32_BYTES = 4


class Pass(NamedTuple):
    """Seconds. `recompute_s` is what checkpointing adds to the backward where the layer is recomputed in full."""

    forward_s: Quantity
    backward_s: Quantity
    recompute_s: Quantity = 0.0


class Work(NamedTuple):
    """Seconds that a layer keeps the GPU busy, whatever is recomputed of it."""

    products_s: Quantity
    closing_s: Quantity  # the last of the products
    attention_s: Quantity
    elementwise_s: Quantity
    backward_s: Quantity
    attention_backward_s: Quantity  # a part of that

    @property
    def forward_s(self) -> Quantity:
        """All of it, once."""
        return self.products_s + self.attention_s + self.elementwise_s


class Product(NamedTuple):
    """A matrix product over tokens, as one GPU sees it: `times` [rows, k] × [k, n]."""

    rows: Quantity
    n: Quantity
    k: Quantity
    times: Quantity = 1.0


@dataclass(frozen=True, slots=True)
class LayerClock:
    """A model under one configuration (or many) on one card."""

    shape: ModelShape
    configuration: Configuration
    roofline: Roofline

    @property
    def tokens(self) -> Quantity:
        """Of a micro-batch, on one GPU."""
        return self.configuration.micro_batch * self.configuration.seq / self.configuration.cp

    @property
    def residual_bytes(self) -> int:
        """Of a number between blocks: autocast leaves them in FP32, sharded mixed precision does not."""
        return _FP32_BYTES if self.configuration.autocast else self.configuration.compute_bytes

    def work(self, layer: Layer, hidden: int) -> Work:
        """One layer, all operators."""
        products = list(self.products(layer, hidden))
        products_s = [self._forward_s(product) for product in products]
        elementwise_s, elementwise_backward_s = self._elementwise_s(layer, hidden, products)
        attention_s, attention_backward_s = self._attention_s(layer)
        backward_s = sum(map(self._backward_s, products)) + attention_backward_s + elementwise_backward_s
        return Work(sum(products_s), products_s[-1], attention_s, elementwise_s, backward_s, attention_backward_s)

    # ── matrix products ──

    def products(self, layer: Layer, hidden: int) -> Iterator[Product]:
        """Of one layer, in order; the last one closes the block."""
        tp, rows = self.configuration.tp, self.tokens
        for attention in (layer.attention, layer.cross_attention):
            if attention is not None:
                yield from _attention_products(attention, layer, hidden, rows, tp)
        if layer.feed_forward is not None:
            yield from self._feed_forward_products(layer.feed_forward, hidden)

    def _feed_forward_products(self, mlp: FeedForward, hidden: int) -> Iterator[Product]:
        tp, ep, rows = self.configuration.tp, self.configuration.ep, self.tokens
        widths: list[tuple[int, Quantity, Quantity]] = [(mlp.shared_intermediate, rows, 1.0)]
        if not mlp.experts:
            widths = [(mlp.intermediate, rows, 1.0)]
        if mlp.experts:
            widths.append((mlp.intermediate, rows * mlp.experts_per_token * ep / mlp.experts, mlp.experts / ep))
        for width, tokens, count in widths:
            if width:
                up = Product(tokens, width / tp, hidden, count * (2 if mlp.gated else 1))
                yield up
                yield Product(tokens, hidden, width / tp, count)

    def _forward_s(self, product: Product) -> Quantity:
        return product.times * self.roofline.matmul_s(product.rows, product.n, product.k)

    def _backward_s(self, product: Product) -> Quantity:
        """The gradient of the input and, unless the weight is frozen, of the weight."""
        input_s = self.roofline.matmul_s(product.rows, product.k, product.n)
        if self.configuration.lora_rank:
            return product.times * input_s
        return product.times * (input_s + self.roofline.matmul_s(product.k, product.n, product.rows))

    # ── attention ──

    def _attention_s(self, layer: Layer) -> tuple[Quantity, Quantity]:
        """Forward and backward of scores and their use."""
        forward_s: Quantity = 0.0
        backward_s: Quantity = 0.0
        for attention in (layer.attention, layer.cross_attention):
            if attention is None:
                continue
            one = self._eager_s(attention) if self.configuration.attention == "eager" else self._fused_s(attention)
            forward_s, backward_s = forward_s + one[0], backward_s + one[1]
        return forward_s, backward_s

    def _share(self) -> Quantity:
        """Sequences times the part of each one's heads and queries that this GPU has."""
        return self.configuration.micro_batch / (self.configuration.tp * self.configuration.cp)

    def _fused_s(self, attention: Attention) -> tuple[Quantity, Quantity]:
        seq = self.configuration.seq
        operations: Quantity
        if attention.kind is AttentionKind.RECURRENT:
            operations = 1.0 * _RECURRENT_OPERATIONS * attention.state_elements * seq
        else:
            operations = 2 * _pairs(attention, seq) * attention.heads * (attention.head_dim + attention.value_head_dim)
        seconds = self.roofline.attention_s(operations * self._share())
        merged_s = self._merged_s(attention)
        return seconds + merged_s, _ATTENTION_BACKWARD * seconds + merged_s

    def _merged_s(self, attention: Attention) -> Quantity:
        """A ring of context-parallel ranks merges an FP32 output for each rank but its own: two read, one written."""
        outputs = self.tokens * attention.heads * attention.value_head_dim / self.configuration.tp
        return self.roofline.memory_s(3 * _FP32_BYTES * outputs * (self.configuration.cp - 1))

    def _eager_s(self, attention: Attention) -> tuple[Quantity, Quantity]:
        """Two products over every pair, masked or not, and passes over the scores in memory."""
        seq = self.configuration.seq
        heads = attention.heads * self._share()
        products_s = self.roofline.matmul_s(seq, seq, attention.head_dim)
        products_s = products_s + self.roofline.matmul_s(seq, attention.value_head_dim, seq)
        score_bytes = _EAGER_SCORE_PASSES * self.roofline.element_bytes * (seq * seq * 1.0)
        scores_s = self.roofline.memory_s(score_bytes)
        return heads * (products_s + scores_s), heads * (2 * products_s + _SCORES_BACKWARD * scores_s)

    # ── what is bound by bytes ──

    def _elementwise_s(self, layer: Layer, hidden: int, products: list[Product]) -> tuple[Quantity, Quantity]:
        """Norms, rotary positions, activation, dropout, residual adds, casts: forward and backward."""
        style = style_of(self.shape, layer, self.configuration)
        tp = self.configuration.tp
        spread = tp if self.configuration.sequence_parallel else 1
        norms, norms_factor = self._norm_bytes(layer, style)
        activation, activation_factor = self._activation_bytes(layer.feed_forward, style)
        stream, heads = self._stream_bytes(style), self._heads_bytes(layer, style)
        forward = (norms + stream) * hidden / spread + (heads + activation) / tp
        backward = (norms_factor * norms + _SIMPLE_BACKWARD * stream) * hidden / spread
        backward = backward + (_SIMPLE_BACKWARD * heads + activation_factor * activation) / tp
        cast_bytes = self._cast_bytes(products)
        memory_s = self.roofline.memory_s
        return memory_s(self.tokens * forward + cast_bytes), memory_s(self.tokens * backward + cast_bytes)

    def _stream_bytes(self, style: Style) -> int:
        """Of one hidden number: two residual adds with their dropout."""
        residual, compute = self.residual_bytes, self.configuration.compute_bytes
        dropout = 2 * (2 * compute + 1) if style.dropout else 0
        return 2 * (2 * residual + compute) + dropout

    def _norm_bytes(self, layer: Layer, style: Style) -> tuple[int, float]:
        """Of one hidden number, and the factor of the backward. In Python: to FP32, squared, averaged, scaled, back, weighed."""
        residual = self.residual_bytes
        if style.norm == "native":
            return layer.norms * 2 * residual, _NATIVE_NORM_BACKWARD
        casts = 2 * (residual + _FP32_BYTES) if residual < _FP32_BYTES else 0
        return layer.norms * (5 * _FP32_BYTES + casts + 2 * residual), _NORM_BACKWARD

    def _heads_bytes(self, layer: Layer, style: Style) -> int:
        """Of one token: rotary positions (two products, a rotation, a sum; or one kernel), and heads put side by side."""
        rotary = 0 if style.rotary == "none" else 2 if style.fused else 10
        moved = 0
        for mixer in (layer.attention, layer.cross_attention):
            if mixer is not None:
                turned = (mixer.heads + mixer.kv_heads) * mixer.head_dim
                moved += rotary * turned + 2 * mixer.heads * mixer.value_head_dim
        return moved * self.configuration.compute_bytes

    def _activation_bytes(self, mlp: FeedForward | None, style: Style) -> tuple[int, float]:
        """Of one token, and the factor of the backward."""
        if mlp is None:
            return 0, _SIMPLE_BACKWARD
        compute = self.configuration.compute_bytes
        width = _active_width(mlp)
        if mlp.gated:
            return width * compute * (3 if style.fused else 5), _GATED_BACKWARD
        if style.activation == "chain" and not style.fused:
            # GELU by tanh in Python: eight kernels, most of them in FP32 under autocast.
            return width * (4 * compute + 14 * self.residual_bytes), _CHAIN_BACKWARD
        return width * compute * 2, _GATED_BACKWARD

    def _cast_bytes(self, products: list[Product]) -> Quantity:
        """Autocast casts weights once and every product's input; FP8 reads both twice, for their largest number first."""
        configuration = self.configuration
        if configuration.precision == "fp8":
            return sum(p.times * (p.n * p.k + p.rows * p.k) * (2 * configuration.compute_bytes + 1) for p in products)
        if not configuration.autocast:
            return 0.0
        weight_bytes = _FP32_BYTES + configuration.compute_bytes
        input_bytes = self.residual_bytes + configuration.compute_bytes
        return sum(p.times * (p.n * p.k * weight_bytes + p.rows * p.k * input_bytes) for p in products)

    # ── the head ──

    def head_pass(self) -> Pass:
        """Logits and cross-entropy, where the model has them."""
        shape = self.shape
        if not (shape.logits and shape.vocab):
            return Pass(0.0, 0.0)
        width = shape.vocab / np.asarray(self.configuration.tp)
        line = replace(self.roofline, precision=self.roofline.wide)
        hidden, rows = shape.hidden, self.tokens
        odd = np.ceil(width).astype(np.int64)
        product_s = line.matmul_s(rows, width, hidden, width=odd)
        backward_s = line.matmul_s(rows, hidden, width, width=odd)
        if not self.configuration.lora_rank:
            backward_s = backward_s + line.matmul_s(hidden, width, rows, width=odd)
        forward_bytes, backward_bytes = self._loss_bytes()
        forward_s = product_s + line.memory_s(rows * width * forward_bytes)
        backward_s = backward_s + line.memory_s(rows * width * backward_bytes)
        again_s = product_s if self.configuration.loss == "chunked" else 0.0 * product_s
        return Pass(forward_s, backward_s, again_s)

    def _loss_bytes(self) -> tuple[int, int]:
        """Of one logit: to FP32, log-softmax; its gradient filled, the softmax's, back again."""
        compute = self.configuration.compute_bytes
        if fused_kernels(self.configuration):
            return 2 * compute, 2 * compute
        cast = compute + _FP32_BYTES if compute < _FP32_BYTES else 0
        return 2 * _FP32_BYTES + cast, 4 * _FP32_BYTES + cast


def layer_pass(work: Work, configuration: Configuration, shares: Calibration) -> Pass:
    """With what is recomputed, at the pace of the GPU or of the host, whichever is slower."""
    fused = fused_kernels(configuration)
    if configuration.checkpoint == "selective":
        # Fused frameworks run the scores again; elsewhere every other product is, and what is cheap.
        again_s = work.attention_s if fused else work.products_s / 2 + work.elementwise_s
    else:
        # PyTorch stops at the last tensor that the backward needs: the closing product is not run again.
        again_s = work.forward_s - work.closing_s
    launches = _FUSED_LAUNCHES if fused else 1.0
    wrapping_s = 0.0 if configuration.checkpoint == "none" else shares.host_checkpoint_s_per_layer
    issue_forward_s = launches * shares.host_forward_s_per_layer
    issue_backward_s = launches * shares.host_backward_s_per_layer
    forward_s = np.maximum(work.forward_s, issue_forward_s + wrapping_s)
    backward_s = np.maximum(work.backward_s, issue_backward_s)
    both_s = np.maximum(work.backward_s + again_s, issue_backward_s + issue_forward_s)
    return Pass(forward_s, backward_s, both_s - backward_s)


def fused_kernels(configuration: Configuration) -> bool:
    """Whether element-wise operators run in few kernels."""
    return configuration.compile or framework_of(configuration).written == "fused"


def _attention_products(
    attention: Attention, layer: Layer, hidden: int, rows: Quantity, tp: Number
) -> Iterator[Product]:
    if attention.kind in (AttentionKind.LATENT, AttentionKind.RECURRENT):
        # Many small projections: counted as one in and one out with as many weights.
        yield Product(rows, layer.attention_parameters / (2 * hidden) / tp, hidden)
        yield Product(rows, hidden, layer.attention_parameters / (2 * hidden) / tp)
        return
    queries = attention.heads * attention.head_dim / tp
    yield Product(rows, queries, hidden)
    # Beyond the number of key and value heads, tensor parallelism repeats them.
    keys = np.maximum(attention.kv_heads / tp, 1) * attention.head_dim
    yield Product(rows, keys, hidden, 2)
    yield Product(rows, hidden, attention.heads * attention.value_head_dim / tp)


def _pairs(attention: Attention, seq: Number) -> Quantity:
    """Query and key pairs of one sequence that the kernel computes."""
    length = seq * 1.0
    if attention.window:
        window = np.minimum(attention.window, length)
        return window * length - window * window / 2 if attention.causal else window * length
    return length * length / 2 if attention.causal else length * length


def _active_width(mlp: FeedForward) -> int:
    return mlp.intermediate * mlp.experts_per_token + mlp.shared_intermediate if mlp.experts else mlp.intermediate
