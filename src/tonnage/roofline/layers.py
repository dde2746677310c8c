"""A model as items, from its shape alone: what each kind of layer must compute and move in one pass on one GPU.

| phase   | tokens in a pass | attention reads                       | and then                                   |
|---------|------------------|---------------------------------------|--------------------------------------------|
| prefill | batch × seq      | keys and values of the pass itself    |                                            |
| decode  | batch            | a KV cache of `seq` tokens a sequence |                                            |
| train   | batch × seq      | as prefill                            | a backward of two products for each one,   |
|         |                  |                                       | and an AdamW step on FP32 states           |

Every operator reads its inputs and writes its outputs once, with norms fused with residuals, fused attention, and gate and up as
one product: the best that kernels do today. That determines the bounds; real times are longer and are predicted by the planner
(`tonnage plan`). One GPU, no sharding. Mixtures read the experts that their tokens are expected to reach, routed evenly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tonnage.budget.serving.kv_cache import KvFormat, state_bytes, token_bytes
from tonnage.clock.operators import Work
from tonnage.errors import RequestError
from tonnage.models.shape import AttentionKind, AttentionShape, FeedForward, LayerShape, LayerStack, ModelShape
from tonnage.roofline.items import Item, RooflineProfile

Phase = Literal["prefill", "decode", "train"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "train")
_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# Fused attention's backward recomputes the scores: five products for the forward's two.
_ATTENTION_BACKWARD = 2.5
# One multiply-add and one decay per state element and token.
_RECURRENT_OPERATIONS = 6
# AdamW: parameter, gradient and both moments read, all but the gradient written; operations per parameter.
_ADAM_PASSES, _ADAM_OPERATIONS, _FP32_BYTES = 7, 12, 4
_NORM_OPERATIONS, _ACTIVATION_OPERATIONS, _LOSS_OPERATIONS = 6, 10, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPass:
    """One pass of one model."""

    shape: ModelShape
    phase: Phase
    batch: int
    seq: int

    @property
    def precision(self) -> str:
        """Precision of products: the dtype of the published weights, or bf16 if they are quantized."""
        return self.shape.dtype if self.shape.dtype in _ELEMENT_BYTES else "bf16"

    @property
    def element_bytes(self) -> int:
        """Bytes per element of weights and activations."""
        return _ELEMENT_BYTES[self.precision]

    def tokens(self, stack: LayerStack) -> int:
        """Return the tokens that pass a stack: one per sequence for a generating decoder."""
        if self.phase == "decode" and stack is self.shape.decoder:
            return self.batch
        return self.batch * (stack.tokens or self.seq)


def model_profile(shape: ModelShape, phase: Phase, *, batch: int, seq: int) -> RooflineProfile:
    """Return every part of a model, in the order of the pass."""
    for name, number in (("--batch", batch), ("--seq", seq)):
        if number < 1:
            raise RequestError(f"{name} {number} makes no sense.", hint=f"Give {name} 1 or more.")
    if phase == "decode" and not shape.decoder.causal:
        raise RequestError(f"{shape.name} does not generate: it has no decode phase.", hint="Use --phase prefill.")
    at = ModelPass(shape=shape, phase=phase, batch=batch, seq=seq)
    source = f"{shape.name}, {phase}, batch {batch:,}, {seq:,} tokens"
    items = list(_forward(at))
    if phase == "train":
        # Gradients of inputs and of weights: twice the work; fused attention has its own factor.
        for item in items[::-1]:
            work = _times(item.work, _ATTENTION_BACKWARD if item.kind == "attention" else 2.0)
            items.append(replace(item, name=f"{item.name}, backward", launches=2 * item.launches, work=work))
        parameters = shape.parameters
        step, detail = (
            Work(_ADAM_OPERATIONS * parameters, _ADAM_PASSES * _FP32_BYTES * parameters),
            f"{parameters:,} parameters",
        )
        items.append(Item(name="AdamW step", kind="optimizer", group="optimizer", work=step, detail=detail))
    return RooflineProfile(kind="model", source=source, items=tuple(items), notes=shape.notes)


def _forward(at: ModelPass) -> Iterator[Item]:
    for number, stack in enumerate(at.shape.stacks):
        if at.phase == "decode" and stack is not at.shape.decoder:
            continue
        name = "decoder " if stack is at.shape.decoder else f"encoder {number + 1} "
        name = name if len(at.shape.stacks) > 1 else ""
        kinds = list(dict.fromkeys(stack.layers))
        for kind, layer in enumerate(kinds):
            suffix = f" {chr(ord('a') + kind)}" if len(kinds) > 1 else ""
            group = f"{name}layer{suffix}".strip()
            count = stack.layers.count(layer)
            for item in _layer(at, stack, layer):
                work = _times(item.work, count)
                yield replace(item, group=group, calls=count, launches=count * item.launches, work=work)
    shape = at.shape
    if shape.logits and shape.vocab:
        # Of a prompt, only the last token's scores are needed.
        rows = at.tokens(shape.decoder) if at.phase == "train" or not shape.decoder.causal else at.batch
        yield replace(_product(at, "logits", rows, shape.vocab, shape.hidden), group="head")
        if at.phase == "train":
            elements = float(rows * shape.vocab)
            work = Work(_LOSS_OPERATIONS * elements, 2 * elements * at.element_bytes)
            yield Item(name="loss", kind="elementwise", group="head", work=work)


def _times(work: Work, factor: float) -> Work:
    return Work(factor * (work.operations or 0.0), factor * (work.moved_bytes or 0.0), work.precision)


def _layer(at: ModelPass, stack: LayerStack, layer: LayerShape) -> Iterator[Item]:
    tokens, hidden = at.tokens(stack), stack.hidden
    if layer.norms:
        # The residual is read and written with each: two in, two out.
        moved = 4.0 * layer.norms * tokens * hidden * at.element_bytes
        operations = float(_NORM_OPERATIONS * layer.norms * tokens * hidden)
        yield Item(name="norms and residuals", kind="elementwise", launches=layer.norms, work=Work(operations, moved))
    if layer.attention is not None:
        yield from _attention(at, stack, layer, layer.attention)
    if layer.cross_attention is not None:
        yield from _cross_attention(at, stack, layer.cross_attention)
    if layer.feed_forward is not None:
        yield from _feed_forward(at, tokens, hidden, layer.feed_forward)


def _product(at: ModelPass, name: str, rows: float, n: float, k: float, count: float = 1.0) -> Item:
    """Return `count` products of [rows, k] × [k, n]."""
    moved = count * (rows * k + k * n + rows * n) * at.element_bytes
    detail = f"{_words(rows)}×{_words(k)} · {_words(k)}×{_words(n)}" + (
        f", {_words(count)} of them" if count > 1 else ""
    )
    return Item(name=name, kind="product", detail=detail, work=Work(2.0 * count * rows * n * k, moved, at.precision))


def _words(number: float) -> str:
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def _attention(at: ModelPass, stack: LayerStack, layer: LayerShape, mixer: AttentionShape) -> Iterator[Item]:
    tokens, hidden = at.tokens(stack), stack.hidden
    if mixer.kind in (AttentionKind.LATENT, AttentionKind.RECURRENT):
        # Many small projections, modelled as one in and one out with the same number of weights.
        width = layer.attention_parameters / (2 * hidden)
        yield _product(at, "projections in", tokens, width, hidden)
        yield _mixing(at, stack, mixer)
        yield _product(at, "projection out", tokens, hidden, width)
        return
    width = mixer.heads * mixer.head_dim + mixer.kv_heads * (mixer.head_dim + mixer.value_head_dim)
    yield _product(at, "query, key, value", tokens, width, hidden)
    yield _mixing(at, stack, mixer)
    yield _product(at, "attention output", tokens, hidden, mixer.heads * mixer.value_head_dim)


def _mixing(at: ModelPass, stack: LayerStack, mixer: AttentionShape) -> Item:
    tokens = at.tokens(stack)
    if mixer.kind is AttentionKind.RECURRENT:
        operations = float(_RECURRENT_OPERATIONS * mixer.state_elements * tokens)
        moved = 2.0 * at.batch * state_bytes(mixer) + 2.0 * tokens * stack.hidden * at.element_bytes
        return Item(name="recurrence", kind="elementwise", work=Work(operations, moved))
    length = stack.tokens or at.seq
    if at.phase == "decode" and stack is at.shape.decoder:
        return _decoding(at, mixer, "attention", length)
    seen = min(mixer.window, length) if mixer.window else length
    pairs = at.batch * (seen * length - seen * seen / 2 if mixer.causal else float(seen * length))
    operations = 2.0 * pairs * mixer.heads * (mixer.head_dim + mixer.value_head_dim)
    width = mixer.heads * (mixer.head_dim + mixer.value_head_dim)
    kv_width = mixer.kv_heads * (mixer.head_dim + mixer.value_head_dim)
    moved = float(tokens * (width + kv_width) * at.element_bytes)
    return Item(
        name="attention", kind="attention", detail=f"{length:,} tokens", work=Work(operations, moved, at.precision)
    )


def _decoding(at: ModelPass, mixer: AttentionShape, name: str, length: int) -> Item:
    """Return one query per sequence against the cache; latent attention works on the compressed vectors."""
    seen = min(mixer.window, length) if mixer.window else length
    keys, values = mixer.head_dim, mixer.value_head_dim
    if mixer.kind is AttentionKind.LATENT:
        keys, values = mixer.latent_rank + mixer.rope_dim, mixer.latent_rank
    operations = 2.0 * at.batch * seen * mixer.heads * (keys + values)
    cache = float(at.batch * seen * token_bytes(mixer, KvFormat(at.precision, 8 * at.element_bytes)))
    moved = cache + at.batch * mixer.heads * (keys + values) * at.element_bytes
    return Item(name=name, kind="attention", detail=f"{seen:,} tokens kept", work=Work(operations, moved, at.precision))


def _cross_attention(at: ModelPass, stack: LayerStack, mixer: AttentionShape) -> Iterator[Item]:
    tokens, hidden = at.tokens(stack), stack.hidden
    source = at.shape.stacks[0].tokens or at.seq
    width = mixer.heads * mixer.head_dim
    yield _product(at, "cross query", tokens, width, hidden)
    if at.phase == "decode":
        yield _decoding(at, mixer, "cross attention", source)
    else:
        kv_width = mixer.kv_heads * (mixer.head_dim + mixer.value_head_dim)
        yield _product(at, "cross key, value", at.batch * source, kv_width, hidden)
        operations = 2.0 * tokens * source * mixer.heads * (mixer.head_dim + mixer.value_head_dim)
        moved = float((tokens * 2 * width + at.batch * source * kv_width) * at.element_bytes)
        yield Item(name="cross attention", kind="attention", work=Work(operations, moved, at.precision))
    yield _product(at, "cross output", tokens, hidden, mixer.heads * mixer.value_head_dim)


def _feed_forward(at: ModelPass, tokens: int, hidden: int, mlp: FeedForward) -> Iterator[Item]:
    if not mlp.experts:
        yield from _mlp(at, "MLP", tokens, hidden, mlp.intermediate, mlp.gated, 1.0)
        return
    yield _product(at, "router", tokens, mlp.experts, hidden)
    if mlp.shared_intermediate:
        yield from _mlp(at, "shared MLP", tokens, hidden, mlp.shared_intermediate, mlp.gated, 1.0)
    reached = mlp.experts * (1 - (1 - mlp.experts_per_token / mlp.experts) ** tokens)
    rows = tokens * mlp.experts_per_token / reached
    yield from _mlp(at, "experts", rows, hidden, mlp.intermediate, mlp.gated, reached)


def _mlp(at: ModelPass, name: str, rows: float, hidden: int, width: int, gated: bool, count: float) -> Iterator[Item]:
    fan = 2 if gated else 1
    yield _product(at, f"{name} gate, up" if gated else f"{name} up", rows, fan * width, hidden, count)
    elements = count * rows * width
    work = Work(_ACTIVATION_OPERATIONS * elements, (fan + 1) * elements * at.element_bytes)
    yield Item(name=f"{name} activation", kind="elementwise", work=work)
    yield _product(at, f"{name} down", rows, hidden, width, count)
