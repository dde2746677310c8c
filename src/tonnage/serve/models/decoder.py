"""One pass of a decoder over the pages of a KV cache; the host reads nothing back, so that a CUDA graph can hold it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from tonnage.serve.batch import Batch, LayerCache
from tonnage.serve.kernels import add_norm, attend_chunks, attend_decode, gelu_tanh_mul, silu_mul, store
from tonnage.serve.models.architecture import Activation, Architecture, LayerConfig
from tonnage.serve.models.rope import Rope, make_tables
from tonnage.serve.models.weights import Builder, Dense, EightBit, Experts

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


@dataclass(slots=True, eq=False)
class GatedMlp:
    """Computes down(activation(gate) × up)."""

    gate_up: Dense | EightBit
    down: Dense | EightBit
    activate: Callable[[Tensor], Tensor]
    capturable: ClassVar[bool] = True

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(hidden)))


class LayerWeights:
    """The weights of one layer, and its own settings."""

    __slots__ = ("after_attention", "after_mlp", "before_attention", "before_mlp", "cos", "key_norm", "mlp", "output",
                 "qkv", "query_norm", "sin", "window")  # fmt: skip

    def __init__(
        self, shape: Architecture, layer: LayerConfig, prefix: str, build: Builder,
        tables: dict[Rope, tuple[Tensor, Tensor]],
    ) -> None:  # fmt: skip
        attention, mlp, hidden, width = f"{prefix}self_attn.", f"{prefix}mlp.", shape.hidden, shape.head_dim
        rows = [("q_proj", shape.heads * width), ("k_proj", shape.kv_heads * width), ("v_proj", shape.kv_heads * width)]
        self.qkv = build.matrix(attention, rows, hidden, bias=shape.query_bias)
        self.output = build.matrix(attention, [("o_proj", hidden)], shape.heads * width, bias=shape.output_bias)
        self.query_norm = self.key_norm = None
        if shape.head_norms:
            self.query_norm = build.tensor(f"{attention}q_norm.weight", width)
            self.key_norm = build.tensor(f"{attention}k_norm.weight", width)
        activate = ACTIVATIONS[shape.activation]
        self.mlp: GatedMlp | Experts
        if layer.sparse:
            count, inner, each = shape.experts, shape.expert_intermediate, f"{mlp}experts."
            router = build.tensor(f"{mlp}gate.weight", count, hidden)
            gate_up = build.stack(each, "gate_up_proj", [("gate_proj", inner), ("up_proj", inner)], hidden, count)
            down = build.stack(each, "down_proj", [("down_proj", hidden)], inner, count)
            self.mlp = Experts(router, gate_up, down, activate, shape.experts_per_token, shape.normalised_experts)
        else:
            inner, bias = shape.intermediate, shape.mlp_bias
            merged = build.matrix(mlp, [("gate_proj", inner), ("up_proj", inner)], hidden, bias=bias)
            self.mlp = GatedMlp(merged, build.matrix(mlp, [("down_proj", hidden)], inner, bias=bias), activate)
        self.cos, self.sin = tables[layer.rope]
        self.window = layer.window

        def norm(name: str) -> Tensor:
            return build.tensor(f"{prefix}{name}_layernorm.weight", hidden)

        self.before_attention = norm("input")
        # "post_attention" names the norm before the MLP, unless there is one after attention too.
        self.after_attention = norm("post_attention") if shape.sandwich_norms else None
        self.before_mlp = norm("pre_feedforward" if shape.sandwich_norms else "post_attention")
        self.after_mlp = norm("post_feedforward") if shape.sandwich_norms else None


class Decoder:
    """A model on a device; if `capturable`, a pass on CUDA never waits for the host, so that a graph can hold it."""

    def __init__(self, architecture: Architecture, build: Builder, positions: int) -> None:
        shape = self.architecture = architecture
        self.device, self.dtype = build.device, build.dtype
        self.embedding = build.tensor("model.embed_tokens.weight", shape.vocab, shape.hidden)
        tables = {rope: make_tables(rope, positions, build.device) for rope in {layer.rope for layer in shape.layers}}
        self.blocks = [
            LayerWeights(shape, layer, f"model.layers.{number}.", build, tables)
            for number, layer in enumerate(shape.layers)
        ]
        self.norm = build.tensor("model.norm.weight", shape.hidden)
        self.head = self.embedding if shape.tied else build.tensor("lm_head.weight", shape.vocab, shape.hidden)
        # Rounded as in transformers.
        self.embedding_scale = float(torch.tensor(shape.embedding_scale, dtype=build.dtype))
        self.capturable = all(block.mlp.capturable for block in self.blocks)
        self.weight_bytes = build.bytes

    def forward(self, batch: Batch, layers: Sequence[LayerCache]) -> Tensor:
        """Return logits, FP32 [S, vocabulary]; keys and values of all T tokens are written to the pages."""
        eps, offset = self.architecture.norm_eps, self.architecture.norm_offset
        hidden = embedding(batch.token_ids, self.embedding)
        if self.embedding_scale != 1:
            hidden = hidden * self.embedding_scale
        residual: Tensor | None = None
        attend = Attention(self.architecture, batch)
        for block, cache in zip(self.blocks, layers, strict=True):
            normed, residual = add_norm(hidden, residual, block.before_attention, eps, offset=offset)
            hidden = attend(block, normed, cache)
            if block.after_attention is not None:
                hidden, _ = add_norm(hidden, None, block.after_attention, eps, offset=offset)
            normed, residual = add_norm(hidden, residual, block.before_mlp, eps, offset=offset)
            hidden = block.mlp(normed)
            if block.after_mlp is not None:
                hidden, _ = add_norm(hidden, None, block.after_mlp, eps, offset=offset)
        assert residual is not None
        if batch.samples is not None:
            hidden, residual = hidden[batch.samples], residual[batch.samples]
        return self._logits(hidden, residual)

    def _logits(self, hidden: Tensor, residual: Tensor) -> Tensor:
        shape = self.architecture
        normed, _ = add_norm(hidden, residual, self.norm, shape.norm_eps, offset=shape.norm_offset)
        # Accumulated and kept in FP32. On a GPU the product writes FP32 directly, which saves a pass over the
        # vocabulary.
        if normed.is_cuda and normed.dtype != torch.float32:
            logits = torch.mm(normed, self.head.t(), out_dtype=torch.float32)
        else:
            logits = linear(normed, self.head).float()
        cap = shape.logit_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


class Attention:
    """The attention of one pass; what its layers share is computed once."""

    __slots__ = ("batch", "chunk_lengths", "chunk_tables", "decode_lengths", "decode_tables", "heads", "shape")

    def __init__(self, shape: Architecture, batch: Batch) -> None:
        self.shape, self.batch = shape, batch
        self.heads = [shape.heads, shape.kv_heads, shape.kv_heads]
        self.decode_tables, self.chunk_tables = batch.tables[: batch.decodes], batch.tables[batch.decodes :]
        self.decode_lengths, self.chunk_lengths = batch.lengths[: batch.decodes], batch.lengths[batch.decodes :]

    def __call__(self, block: LayerWeights, hidden: Tensor, cache: LayerCache) -> Tensor:
        batch, shape = self.batch, self.shape
        tokens = hidden.shape[0]
        qkv = block.qkv(hidden).view(tokens, -1, shape.head_dim)
        query, key, value = qkv.split_with_sizes(self.heads, dim=1)
        query = store(
            query, key, value, batch.positions, batch.slots, cache,
            cos=block.cos, sin=block.sin, query_norm=block.query_norm, key_norm=block.key_norm,
            eps=shape.norm_eps, norm_offset=shape.norm_offset,
        )  # fmt: skip
        decodes = batch.decodes
        if decodes == tokens:
            seen = self._decode(block, query, cache)
        elif decodes == 0:
            seen = self._chunks(block, query, cache)
        else:
            parts = self._decode(block, query[:decodes], cache), self._chunks(block, query[decodes:], cache)
            seen = torch.cat(parts)
        return block.output(seen.view(tokens, -1))

    def _decode(self, block: LayerWeights, query: Tensor, cache: LayerCache) -> Tensor:
        shape = self.shape
        return attend_decode(
            query, cache, self.decode_tables, self.decode_lengths,
            scale=shape.attention_scale, window=block.window, soft_cap=shape.attention_cap, order=self.batch.order,
        )  # fmt: skip

    def _chunks(self, block: LayerWeights, query: Tensor, cache: LayerCache) -> Tensor:
        shape, batch = self.shape, self.batch
        return attend_chunks(
            query, cache, self.chunk_tables, self.chunk_lengths, batch.chunk_starts, batch.longest_chunk,
            scale=shape.attention_scale, window=block.window, soft_cap=shape.attention_cap,
        )  # fmt: skip
