"""Transient memory of inference: what a forward pass, the sampler and CUDA graphs hold beside weights and cache.

Nothing is saved for a backward pass, so the peak is that of the widest layer or of the sampler. Kernels are fused as
engines fuse them (norm with residual, gate with up), and tensors live as long as a caller holds them.
"""

from dataclasses import dataclass

from tonnage.budget.serving.weights import StageLayers
from tonnage.models.shape import AttentionKind, LayerShape, ModelShape


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass of `tokens`, of which `sequences` end in logits."""

    tokens: int
    sequences: int
    tp: int
    compute_bytes: int


def layer_elements(layer: LayerShape, hidden: int, tp: int, *, held: int) -> int:
    """Return elements per token at the widest point of a layer: `held` hidden-size vectors and its own tensors."""
    # The MLP: gate and up in one matrix, then their product. Experts have buffers of their own.
    mlp, mixer = layer.feed_forward, layer.attention
    wide = attended = 0
    if mlp is not None:
        width = mlp.shared_intermediate if mlp.experts else mlp.intermediate
        wide = (3 if mlp.gated else 2) * -(-width // tp)
    # Attention: projected queries, keys and values, its inputs and its output.
    if mixer is not None and mixer.kind is not AttentionKind.RECURRENT:
        heads, kv_heads = -(-mixer.heads // tp), max(1, -(-mixer.kv_heads // tp))
        query, output = heads * mixer.head_dim, heads * mixer.value_head_dim
        attended = query + kv_heads * (mixer.head_dim + mixer.value_head_dim) + output
        if mixer.kind is AttentionKind.LATENT:
            attended = 2 * query + heads * (mixer.head_dim - mixer.rope_dim + mixer.value_head_dim) + output
    return held * hidden + max(attended, wide)


def expert_elements(layer: LayerShape, hidden: int, tp: int) -> int:
    """Return elements per token in the two buffers of a fused mixture-of-experts kernel."""
    mlp = layer.feed_forward
    if mlp is None or not mlp.experts:
        return 0
    width = -(-mlp.intermediate // tp)
    return mlp.experts_per_token * (max(width, hidden) + max((2 if mlp.gated else 1) * width, hidden))


def forward_bytes(shape: ModelShape, stage: StageLayers, at: ForwardPass, *, held: int, experts: bool = True) -> int:
    """Return the peak of a stage's layers; `experts` False excludes the buffers of mixtures."""
    elements = 0
    for layer, _ in stage.kinds:
        buffers = expert_elements(layer, shape.hidden, at.tp) if experts else 0
        elements = max(elements, layer_elements(layer, shape.hidden, at.tp, held=held) + buffers)
    between = 0 if stage.first and stage.last else 2 * shape.hidden
    return at.tokens * (elements + between) * at.compute_bytes


def expert_bytes(shape: ModelShape, stage: StageLayers, at: ForwardPass) -> int:
    """Return the buffers of mixtures alone."""
    elements = max((expert_elements(layer, shape.hidden, at.tp) for layer, _ in stage.kinds), default=0)
    return at.tokens * elements * at.compute_bytes


def sampler_bytes(shape: ModelShape, at: ForwardPass, bytes_per_word: int, rows: int = 0) -> int:
    """Return the logits of all sequences with the sampler's copies, `rows` more in FP32, and the hidden states.

    FP32 models need no FP32 copy of their logits.
    """
    per_word = bytes_per_word - 2 if at.compute_bytes == 4 else bytes_per_word
    states = (at.tokens + 2 * at.sequences) * shape.hidden * at.compute_bytes
    return at.sequences * shape.vocab * per_word + rows * shape.vocab * 4 + states


def graph_sizes(largest: int) -> int:
    """Return how many batch sizes are captured: 1, 2, 4, then multiples of 8, from 256 on of 16."""
    fine = len(range(8, min(largest, 255) + 1, 8))
    return sum(size <= largest for size in (1, 2, 4)) + fine + len(range(256, largest + 1, 16))
