"""The KV cache: bytes a token, pages, and how many of them a sequence takes.

A *page* holds `block` tokens of one layer. Layers that keep the same tokens (all full, all of one window, all recurrent)
form groups of equal size, and a *block* is one page in each layer of one group, so that blocks of every group come from
one pool. A model with one kind of layer has one group, and its block is a page in every layer.

| kind      | bytes a token in one layer                              | pages a sequence takes                   |
|-----------|---------------------------------------------------------|------------------------------------------|
| full      | KV heads × (head dim + value dim) × bytes               | tokens / block, rounded up               |
| sliding   | the same                                                | the window and what is computed, plus 1  |
| latent    | (latent rank + rotary dim) × bytes: no heads, no split  | tokens / block, rounded up               |
| recurrent | none: a state of fixed size                             | one                                      |

Tensor parallelism splits KV heads, and repeats them where there are more ranks than heads. This module knows neither
weights nor the card.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tonnage.models.shape import AttentionKind, AttentionShape, LayerShape

# Block sizes of hybrids with recurrent layers are multiples of this.
_BLOCK_STEP = 16
# Recurrent states are kept in 16 bits.
_STATE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How keys and values are stored. `scale_bytes` is per head and token, for keys and for values each."""

    name: str
    bits: int
    scale_bytes: int = 0

    def vector_bytes(self, elements: int) -> int:
        """Return the bytes of one head's key or value for one token, with its scale."""
        return -(-elements * self.bits // 8) + self.scale_bytes


# FP8 has one scale per layer, which is negligible; INT4 has an FP16 scale and zero point per vector.
KV_FORMATS = {name: KvFormat(name, bits) for name, bits in (("fp32", 32), ("fp16", 16), ("bf16", 16), ("fp8", 8))}
KV_FORMATS["int4"] = KvFormat("int4", 4, scale_bytes=4)


def kv_heads_of(attention: AttentionShape, tp: int) -> int:
    """Return the KV heads that one rank holds."""
    return max(1, -(-attention.kv_heads // tp))


def token_bytes(attention: AttentionShape | None, form: KvFormat, tp: int = 1) -> int:
    """Return the bytes per token in one layer on one rank."""
    if attention is None or attention.kind is AttentionKind.RECURRENT:
        return 0
    if attention.kind is AttentionKind.LATENT:
        return form.vector_bytes(attention.latent_rank + attention.rope_dim)
    one_head = form.vector_bytes(attention.head_dim) + form.vector_bytes(attention.value_head_dim)
    return kv_heads_of(attention, tp) * one_head


def state_bytes(attention: AttentionShape | None, tp: int = 1) -> int:
    """Return the bytes that a recurrent layer keeps per sequence on one rank."""
    if attention is None or attention.kind is not AttentionKind.RECURRENT:
        return 0
    return -(-attention.state_elements // tp) * _STATE_BYTES


def blocks_for(tokens: int, block: int) -> int:
    """Return the pages of `block` tokens needed for `tokens`."""
    return -(-tokens // block)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table. `window` is 0 for full attention."""

    kind: AttentionKind
    window: int = 0

    def blocks(self, tokens: int, block: int, batched_tokens: int) -> int:
        """Return the most blocks that a sequence of that length holds at once."""
        if self.window:
            # A window may begin inside a block, and the tokens being computed are kept beside it.
            return blocks_for(min(self.window - 1 + batched_tokens, tokens), block) + 1
        return 1 if self.kind is AttentionKind.RECURRENT else blocks_for(tokens, block)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the layers of one rank share a pool of blocks."""

    block: int
    bytes_per_block: int
    groups: tuple[LayerGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes per additional token while no window is full: one block's share in each group."""
        growing = sum(group.kind is not AttentionKind.RECURRENT for group in self.groups)
        return -(-self.bytes_per_block * growing // self.block)

    def tokens(self, blocks: int) -> int:
        """Return the tokens that fit in `blocks`, split evenly over the groups."""
        return blocks // len(self.groups) * self.block if self.groups else 0

    def sequence_blocks(self, tokens: int, batched_tokens: int) -> int:
        """Return the most blocks that one sequence holds."""
        return sum(group.blocks(tokens, self.block, batched_tokens) for group in self.groups)

    def shared_blocks(self, prefix: int) -> int:
        """Return the blocks of a common prefix that sequences can share: full blocks of full-attention layers."""
        full = sum(not group.window and group.kind is not AttentionKind.RECURRENT for group in self.groups)
        return prefix // self.block * full

    def needed_blocks(self, users: int, tokens: int, batched_tokens: int, prefix: int = 0) -> int:
        """Return the blocks for `users` sequences of `tokens` tokens that share a `prefix`."""
        shared = self.shared_blocks(min(prefix, tokens))
        return shared + users * (self.sequence_blocks(tokens, batched_tokens) - shared)


def kv_layout(
    kinds: Iterable[tuple[LayerShape, int]], form: KvFormat, *, block: int = 16, tp: int = 1, grouped: bool = True,
    extra_bytes: int = 0,
) -> KvLayout:  # fmt: skip
    """Return the layout of one rank's layers, given each distinct layer and its count.

    `grouped` False: every layer keeps all tokens, even with a window. `extra_bytes` is what each layer keeps per token
    beside keys and values, such as an index.
    """
    groups: Counter[LayerGroup] = Counter()
    sizes: Counter[int] = Counter()
    states = 0
    for layer, count in kinds:
        if (mixer := layer.attention) is None:
            continue
        # Latent attention keeps every token, as full attention does.
        kind = AttentionKind.FULL if mixer.kind is AttentionKind.LATENT else mixer.kind
        groups[LayerGroup(kind, mixer.window)] += count
        size = token_bytes(mixer, form, tp)
        sizes[size + extra_bytes if size else 0] += count
        states = max(states, state_bytes(mixer, tp))
    if states and not max(sizes):
        return KvLayout(block, states * sum(groups.values()), tuple(groups))
    if states:
        # Grow the block until its page holds a recurrent state: a page is either.
        tokens = -(-states // max(sizes))
        grown = max(block, -(-tokens // _BLOCK_STEP) * _BLOCK_STEP)
        return _grouped(groups, grown * max(sizes), grown)
    if len(groups) > 1 and grouped and len(sizes) == 1:
        return _grouped(groups, max(sizes) * block, block)
    only = next(iter(groups)) if len(groups) == 1 and grouped else LayerGroup(AttentionKind.FULL)
    return KvLayout(block, sum(size * count for size, count in sizes.items()) * block, (only,) if groups else ())


def _grouped(kinds: Counter[LayerGroup], page_bytes: int, block: int) -> KvLayout:
    """Size groups by the rarest kind, or by the commonest if the counts are close and padding is cheaper."""
    least, most = min(kinds.values()), max(kinds.values())
    size = most if most < least * 1.5 else least
    groups = [group for group, count in kinds.items() for _ in range(-(-count // size))]
    return KvLayout(block, page_bytes * size, tuple(groups))


class Waste(NamedTuple):
    """Shares of what is reserved that hold no token: in rows of the maximum length, and in pages."""

    contiguous_share: float
    paged_share: float


def average_waste(users: int, mean_tokens: int, context: int, block: int) -> Waste:
    """Return the waste for lengths known only on average: a last block is half full."""
    used = users * mean_tokens
    return Waste(1 - used / (users * context), 1 - used / (used + users * (block - 1) // 2))
