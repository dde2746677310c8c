"""A model as the budget sees it: its layers (one `LayerShape` for all equal ones), and where its parameters are."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Literal


class AttentionKind(StrEnum):
    """What a layer keeps of earlier tokens."""

    FULL = "full"  # every key and value
    SLIDING = "sliding"  # those of a window
    LATENT = "latent"  # one compressed vector per token (DeepSeek's MLA)
    RECURRENT = "recurrent"  # a state of fixed size (Mamba, linear attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One attention (or state-space) mixer. `window` is 0 for full attention."""

    kind: AttentionKind = AttentionKind.FULL
    heads: int
    kv_heads: int
    head_dim: int  # of a query and key head
    value_head_dim: int  # of a value head: differs from `head_dim` in latent attention
    window: int = 0
    latent_rank: int = 0  # LATENT: the compressed keys and values of a token
    query_rank: int = 0  # LATENT: the compressed query, 0 if queries are not compressed
    rope_dim: int = 0  # LATENT: the rotary part kept beside the latent vector
    state_elements: int = 0  # RECURRENT: elements kept per sequence
    causal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The MLP of a layer: plain (two matrices) or gated (three), or a mixture of `experts`. Widths are of one expert."""

    intermediate: int
    gated: bool
    experts: int = 0  # 0: dense
    experts_per_token: int = 0
    shared_intermediate: int = 0  # width of shared experts; 0: none


# A frozen layer passes gradients on if something before it is trained; otherwise it saves nothing at all.
Frozen = Literal["", "passing", "still"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A transformer block. Parameters are exact counts; the parts sum to `parameters`."""

    attention: AttentionShape | None
    cross_attention: AttentionShape | None = None  # of an encoder-decoder's decoder
    feed_forward: FeedForward | None
    attention_parameters: int  # with biases, query and key norms, and cross-attention
    feed_forward_parameters: int  # of all experts, including router and shared experts
    expert_parameters: int = 0  # of one expert, 0 if dense
    norm_parameters: int
    norms: int = 2
    rms_norm: bool = False
    parallel: bool = False  # attention and MLP read the same input (GPT-J, Falcon, Pythia)
    written: str = ""  # the `model_type` of its part in a multi-part model; empty: the model's own
    frozen: Frozen = ""
    narrow: bool = False  # the residual stream comes from a frozen embedding, in 16 bits

    @property
    def parameters(self) -> int:
        """Parameters of the layer."""
        return self.attention_parameters + self.feed_forward_parameters + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        mlp = self.feed_forward
        idle = (mlp.experts - mlp.experts_per_token) * self.expert_parameters if mlp and mlp.experts else 0
        return self.parameters - idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """How a tower splits images into tokens, and how many the language model gets."""

    patch: int
    side: int = 0  # pixels of the tower's images; 0: variable
    beside: int = 0  # tokens beside the patches: class token, registers
    merge: int = 1  # patches along a side that become one token of the language model
    tokens: int = 0  # tokens of the language model per image, if the configuration says so
    tiles: int = 1  # the most tiles of a large image, beside an overview


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """The modules between a tower and the language model."""

    parameters: int
    matrices: tuple[tuple[int, int], ...]  # inputs and outputs
    tokens: int = 0  # output tokens per sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfrozen:
    """Trained parameters outside layers, if parts of a model are frozen."""

    table: int  # of tokens
    head: int
    other: int
    projector: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """An encoder or decoder: its layers in order, and its number of tokens if that is not the sequence."""

    layers: tuple[LayerShape, ...]
    hidden: int
    causal: bool = True
    tokens: int = 0  # fixed by the model (patches of an image, frames of audio); 0: the sequence
    sequences: int = 1  # per sample: its images
    part: str = "language"  # or vision, audio, encoder
    picture: Picture | None = None
    embedding_parameters: int = 0  # a tower's patches and positions, included in the model's
    other_parameters: int = 0  # its norms and poolers, included in the model's

    def kinds(self) -> list[tuple[LayerShape, list[int]]]:
        """Return each kind of layer with its indices."""
        # Most are the same object, which ids tell without hashing each.
        same: dict[int, list[int]] = {}
        for place, layer in enumerate(self.layers):
            same.setdefault(id(layer), []).append(place)
        alike: dict[LayerShape, list[int]] = {}
        for places in same.values():
            alike.setdefault(self.layers[places[0]], []).extend(places)
        return list(alike.items())

    def groups(self) -> Iterator[tuple[LayerShape, int]]:
        """Yield runs of equal layers, with their length."""
        for layer, run in groupby(self.layers):
            yield layer, len(list(run))

    @property
    def parameters(self) -> int:
        """Parameters of its layers."""
        return sum(layer.parameters for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A whole model. `stacks` has one entry for a decoder or encoder, two for an encoder-decoder (encoder first)."""

    name: str
    architecture: str  # the `model_type` of its configuration, or "unknown"
    stacks: tuple[LayerStack, ...]
    vocab: int  # 0: no tokens
    tied: bool  # the head is the embedding: counted once, in `embedding_parameters`
    embedding_parameters: int  # tokens, positions, token types, patches
    head_parameters: int  # the head's own: 0 if tied (except for its bias) or without a head
    other_parameters: int = 0  # final norms, poolers, projections between widths
    logits: bool = True  # the model ends in scores over the vocabulary
    max_positions: int = 0  # 0: not stated
    learned_positions: bool = False  # each position has its own embedding, so there are no more
    dtype: str = "bf16"  # of the published weights
    exact: bool = True  # False: an unknown architecture, counted as the closest known one
    notes: tuple[str, ...] = field(default=())
    projector: Projector | None = None
    unfrozen: Unfrozen | None = None  # None: everything is trained

    @property
    def parameters(self) -> int:
        """All parameters, tied ones counted once."""
        outside = self.embedding_parameters + self.head_parameters + self.other_parameters
        return outside + sum(stack.parameters for stack in self.stacks)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: fewer than all in a mixture of experts."""
        idle = sum(layer.parameters - layer.active_parameters for stack in self.stacks for layer in stack.layers)
        return self.parameters - idle

    @property
    def trained_parameters(self) -> int:
        """Parameters that are not frozen."""
        if self.unfrozen is None:
            return self.parameters
        outside = self.unfrozen.table + self.unfrozen.head + self.unfrozen.other
        layers = (layer for stack in self.stacks for layer in stack.layers if not layer.frozen)
        return outside + sum(layer.parameters for layer in layers)

    @property
    def trains_table(self) -> bool:
        """Whether the token embeddings are trained."""
        return self.unfrozen is None or self.unfrozen.table > 0

    @property
    def trains_head(self) -> bool:
        """Whether the output projection is trained."""
        return self.trains_table if self.tied else self.unfrozen is None or self.unfrozen.head > 0

    @property
    def trains_projector(self) -> bool:
        """Whether there is a projector that is trained."""
        return self.projector is not None and (self.unfrozen is None or self.unfrozen.projector)

    @property
    def decoder(self) -> LayerStack:
        """The last stack, which ends in the head."""
        return self.stacks[-1]

    @property
    def fixed_tokens(self) -> int:
        """Tokens of a sample of fixed length, such as the patches of an image; 0 if lengths vary."""
        return self.decoder.tokens

    @property
    def hidden(self) -> int:
        """Hidden size of the decoder."""
        return self.decoder.hidden
