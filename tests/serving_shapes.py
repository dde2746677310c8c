"""Model shapes made by hand, so that what is tested here does not rest on how configurations are read."""

from typing import Any

from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.budget.serving.own_engine import BATCHED_TOKENS, MAX_SEQS
from tonnage.models.shape import AttentionKind, AttentionShape, FeedForward, LayerShape, LayerStack, ModelShape


def own_options(**asked: Any) -> ServingConfiguration:
    """The options of Tonnage's own engine as they are when none is given, but for these."""
    usual: dict[str, Any] = {"weights": "bf16", "kv": "bf16", "max_seqs": MAX_SEQS, "batched_tokens": BATCHED_TOKENS}
    return ServingConfiguration(engine="tonnage", **(usual | asked))


def attention(
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    *,
    kind: AttentionKind = AttentionKind.FULL,
    window: int = 0,
) -> AttentionShape:
    """Keys and values of one width."""
    return AttentionShape(
        kind=kind, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=head_dim, window=window
    )  # fmt: skip


def latent(heads: int = 128) -> AttentionShape:
    """DeepSeek-V3's."""
    return AttentionShape(
        kind=AttentionKind.LATENT, heads=heads, kv_heads=heads, head_dim=192, value_head_dim=128, latent_rank=512,
        query_rank=1536, rope_dim=64,
    )  # fmt: skip


def recurrent(state_elements: int) -> AttentionShape:
    """A layer with a state of fixed size."""
    return AttentionShape(
        kind=AttentionKind.RECURRENT, heads=32, kv_heads=32, head_dim=128, value_head_dim=128,
        state_elements=state_elements,
    )  # fmt: skip


def layer(mixer: AttentionShape | None, hidden: int = 4096, intermediate: int = 14336, experts: int = 0) -> LayerShape:
    """A gated block without biases."""
    width = mixer.heads * mixer.head_dim if mixer else 0
    keys = mixer.kv_heads * (mixer.head_dim + mixer.value_head_dim) if mixer else 0
    one = 3 * hidden * intermediate
    return LayerShape(
        attention=mixer,
        feed_forward=FeedForward(
            intermediate=intermediate, gated=True, experts=experts, experts_per_token=2 if experts else 0
        ),
        attention_parameters=hidden * (2 * width + keys),
        feed_forward_parameters=one * experts + experts * hidden if experts else one,
        expert_parameters=one if experts else 0,
        norm_parameters=2 * hidden,
        rms_norm=True,
    )


def model(layers: list[LayerShape], *, hidden: int = 4096, vocab: int = 128256, tied: bool = False) -> ModelShape:
    """A decoder of these layers."""
    return ModelShape(
        name="by-hand",
        architecture="llama",
        stacks=(LayerStack(layers=tuple(layers), hidden=hidden),),
        vocab=vocab,
        tied=tied,
        embedding_parameters=vocab * hidden,
        head_parameters=0 if tied else vocab * hidden,
        other_parameters=hidden,
        max_positions=131072,
    )


LLAMA_8B = model([layer(attention())] * 32)
LLAMA_70B = model([layer(attention(64), 8192, 28672)] * 80, hidden=8192)
LLAMA_2_70B = model([layer(attention(64), 8192, 28672)] * 80, hidden=8192, vocab=32000)
QWEN3_8B = model([layer(attention(), 4096, 12288)] * 36, vocab=151936)
