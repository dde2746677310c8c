"""The passing memory of inference: what a forward pass, the sampler and CUDA graphs hold beside weights and cache.

Nothing is saved for a backward pass, so the peak is that of the worst layer, or of the sampler after them. Kernels are
fused as engines fuse them (norm with residual, gate with up), and tensors live as long as a caller holds them. This
module does not know which engine runs or how much the card has.
"""

from dataclasses import dataclass

from tonnage.budget.weights import Stage
from tonnage.hardware import Gpu
from tonnage.models.shape import AttentionKind, Layer, ModelShape
from tonnage.units import KIB, MIB


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of `tokens`, of which `sequences` end in logits."""

    tokens: int
    sequences: int
    tp: int
    compute_bytes: int


def layer_elements(layer: Layer, hidden: int, tp: int, *, held: int) -> int:
    """Numbers alive for one token at the worst point of a layer: `held` vectors of the model's width, and its own."""
    return held * hidden + max(_attention_elements(layer, tp), _mlp_elements(layer, tp))


def _mlp_elements(layer: Layer, tp: int) -> int:
    """Gate and up in one matrix, then their product; a mixture's experts have buffers of their own."""
    mlp = layer.feed_forward
    if mlp is None:
        return 0
    width = mlp.shared_intermediate if mlp.experts else mlp.intermediate
    return (3 if mlp.gated else 2) * -(-width // tp)


def _attention_elements(layer: Layer, tp: int) -> int:
    """Queries, keys and values as they are projected, what attention reads of them, and its output."""
    mixer = layer.attention
    if mixer is None or mixer.kind is AttentionKind.RECURRENT:
        return 0
    heads, kv_heads = -(-mixer.heads // tp), max(1, -(-mixer.kv_heads // tp))
    query, output = heads * mixer.head_dim, heads * mixer.value_head_dim
    if mixer.kind is AttentionKind.LATENT:
        return 2 * query + heads * (mixer.head_dim - mixer.rope_dim + mixer.value_head_dim) + output
    return query + kv_heads * (mixer.head_dim + mixer.value_head_dim) + output


def expert_elements(layer: Layer, hidden: int, tp: int) -> int:
    """Numbers for one token in the two buffers of a mixture's fused kernel."""
    mlp = layer.feed_forward
    if mlp is None or not mlp.experts:
        return 0
    width = -(-mlp.intermediate // tp)
    return mlp.experts_per_token * (max(width, hidden) + max((2 if mlp.gated else 1) * width, hidden))


def forward_bytes(shape: ModelShape, stage: Stage, at: Pass, *, held: int, experts: bool = True) -> int:
    """The peak of the layers of a stage; `experts` False leaves out the buffers of mixtures."""
    elements = 0
    for layer, _ in stage.kinds:
        buffers = expert_elements(layer, shape.hidden, at.tp) if experts else 0
        elements = max(elements, layer_elements(layer, shape.hidden, at.tp, held=held) + buffers)
    between = 0 if stage.first and stage.last else 2 * shape.hidden
    return at.tokens * (elements + between) * at.compute_bytes


def expert_bytes(shape: ModelShape, stage: Stage, at: Pass) -> int:
    """The buffers of mixtures alone."""
    elements = max((expert_elements(layer, shape.hidden, at.tp) for layer, _ in stage.kinds), default=0)
    return at.tokens * elements * at.compute_bytes


def sampler_bytes(shape: ModelShape, at: Pass, bytes_per_word: int, rows: int = 0) -> int:
    """The logits of every sequence with the sampler's copies, `rows` more in FP32, and the states they came from.

    FP32 models need no FP32 copy of their logits.
    """
    per_word = bytes_per_word - 2 if at.compute_bytes == 4 else bytes_per_word
    states = (at.tokens + 2 * at.sequences) * shape.hidden * at.compute_bytes
    return at.sequences * shape.vocab * per_word + rows * shape.vocab * 4 + states


def cublas_workspace_bytes(gpu: Gpu) -> int:
    """What torch gives cuBLAS: 32 MiB from Hopper on, else 8 MiB and a little."""
    return 32 * MIB if gpu.compute_capability[0] >= 9 else 8 * MIB + 128 * KIB


def graph_sizes(largest: int) -> int:
    """How many batch sizes are captured: 1, 2, 4, then steps of 8, from 256 on steps of 16."""
    fine = len(range(8, min(largest, 255) + 1, 8))
    coarse = len(range(256, largest + 1, 16))
    return sum(size <= largest for size in (1, 2, 4)) + fine + coarse


def graph_bytes(graphs: int, layers: int, bytes_per_graph: int, bytes_per_layer: int) -> int:
    """The driver's own bytes for so many graphs of so many layers."""
    return graphs * (bytes_per_graph + layers * bytes_per_layer)
