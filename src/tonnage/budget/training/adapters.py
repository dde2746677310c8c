"""LoRA: which matrices have adapters, how many parameters they have, and how the frozen base is stored.

| targets      | matrices of every block                                     |
|--------------|-------------------------------------------------------------|
| attention    | q_proj, k_proj, v_proj, o_proj                              |
| mlp          | gate_proj, up_proj, down_proj, those of shared experts too  |
| all-linear   | both                                                        |
| experts      | all matrices of the routed experts                          |

`all-linear` has the meaning of PEFT, TRL and torchtune: in current transformers, experts are three-dimensional parameters, not
linear layers, and must be named. Latent attention has two matrices for a query (`q_proj`), one that compresses keys and values
(`k_proj`) and one that expands them (`v_proj`).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from tonnage.errors import BadLayout
from tonnage.models.shape import AttentionKind, LayerShape, ModelShape

Base = Literal["16-bit", "fp8", "nf4", "nf4-single"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL_LINEAR = (*ATTENTION, *MLP)
EXPERTS = "experts"
_GROUPS = {"all-linear": ALL_LINEAR, "attention": ATTENTION, "mlp": MLP, EXPERTS: (EXPERTS,)}
# bitsandbytes' NF4 has an FP32 scale per 64 weights; with double quantization, 8 bits per scale and an FP32 scale per
# 256 of them. FP8's scale per row or block is negligible.
NF4_BLOCK, SCALES_BLOCK = 64, 256
# Bits per weight of a base block.
BASE_BITS: dict[Base, float] = {
    "fp8": 8.0,
    "nf4": 4 + 8 / NF4_BLOCK + 32 / (NF4_BLOCK * SCALES_BLOCK),
    "nf4-single": 4 + 32 / NF4_BLOCK,
}


def parse_targets(text: str) -> tuple[str, ...]:
    """Parse "all-linear", "attention,experts" or "q_proj,v_proj"."""
    chosen: set[str] = set()
    for word in text.split(","):
        names = _GROUPS.get(word.strip()) or [name for name in ALL_LINEAR if name == word.strip()]
        if not names:
            hint = f"Write some of {', '.join(_GROUPS)}, {', '.join(ALL_LINEAR)}."
            raise BadLayout(f"--lora-targets {text}: {word.strip()!r} is no matrix of a block.", hint=hint)
        chosen |= set(names)
    return tuple(name for name in (*ALL_LINEAR, EXPERTS) if name in chosen)


def target_words(targets: tuple[str, ...]) -> str:
    """Format targets as `--lora-targets` takes them."""
    words, left = [], list(targets)
    for group, names in _GROUPS.items():
        if set(names) <= set(left):
            words.append(group)
            left = [name for name in left if name not in names]
    return ",".join([*left, *words])


def matrices(layer: LayerShape, hidden: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, inputs and outputs of a block's matrices; an expert's once per expert."""
    for mixer in (layer.attention, layer.cross_attention):
        if mixer is None:
            continue
        queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        if mixer.kind is AttentionKind.LATENT:
            if mixer.query_rank:
                yield "q_proj", hidden, mixer.query_rank
            yield "q_proj", mixer.query_rank or hidden, queries
            yield "k_proj", hidden, mixer.latent_rank + mixer.rope_dim
            yield "v_proj", mixer.latent_rank, mixer.heads * (mixer.head_dim - mixer.rope_dim + mixer.value_head_dim)
        else:
            yield "q_proj", hidden, queries
            yield "k_proj", hidden, keys
            yield "v_proj", hidden, mixer.kv_heads * mixer.value_head_dim
        yield "o_proj", mixer.heads * mixer.value_head_dim, hidden
    mlp = layer.feed_forward
    if mlp is None:
        return
    up = MLP[:2] if mlp.gated else MLP[1:2]
    dense = mlp.shared_intermediate if mlp.experts else mlp.intermediate
    if dense:
        yield from ((name, hidden, dense) for name in up)
        yield "down_proj", dense, hidden
    for _ in range(mlp.experts * (len(up) + 1)):
        yield EXPERTS, hidden, mlp.intermediate


@lru_cache(maxsize=16)  # a search asks for each of its plans
def lora_parameters(shape: ModelShape, rank: int, targets: tuple[str, ...]) -> tuple[int, int]:
    """Return the parameters of all adapters: in matrices that every token passes, and in experts."""
    counts = {False: 0, True: 0}
    for stack in shape.stacks:
        for layer, times in stack.groups():
            for name, inputs, outputs in () if layer.frozen else matrices(layer, stack.hidden):
                counts[name == EXPERTS] += times * rank * (inputs + outputs) * (name in targets)
    return counts[False], counts[True]


@lru_cache(maxsize=16)
def largest_matrix(shape: ModelShape) -> int:
    """Return the weights of the largest matrix of any block, counting experts one by one."""
    every = (matrices(layer, stack.hidden) for stack in shape.stacks for layer, _ in stack.groups())
    return max((inputs * outputs for some in every for _, inputs, outputs in some), default=0)
