"""A model's shape from the tensors of a checkpoint, with or without its configuration.

Without one the parameters are exact and the structure is inferred from names and shapes. Headers do not give the number
of heads: the head width is then assumed, and a note says so.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tonnage.errors import BadModel
from tonnage.models import roles
from tonnage.models.assemble import Model, stacks
from tonnage.models.checkpoint import Stored, main_dtype
from tonnage.models.shape import ModelShape
from tonnage.models.templates import ConfigValues, Tensor

_QUERY = re.compile(r"(q_proj|query|q_lin|\.q)\.weight$")
_KEY = re.compile(r"(k_proj|key|k_lin|\.k)\.weight$")
_FUSED = re.compile(r"(c_attn|query_key_value|qkv_proj|Wqkv|qkv)\.weight$")
_QUERY_NORM = re.compile(r"q_norm\.weight$")
_MLP_OUT = re.compile(r"(down_proj|fc2|wo|dense_4h_to_h|mlp\.c_proj|lin2|w2|(?<!attention\.)output\.dense)(\.weight)?$")
_TOKENS = re.compile(r"(embed_tokens|wte|word_embeddings|embed_in|shared|tok_embeddings|word_embedding)\.weight$")


def with_config(shape: ModelShape, tensors: Sequence[Stored]) -> ModelShape:
    """Return the configured shape, checked against the checkpoint."""
    held = sum(tensor.elements for tensor in tensors if not tensor.is_buffer)
    dtype = main_dtype(tensors)
    if held == shape.parameters:
        return replace(shape, dtype=dtype)
    note = f"The checkpoint holds {held:,} parameters; its configuration makes {shape.parameters:,}, which are counted here."
    return replace(shape, dtype=dtype, notes=(*shape.notes, note))


def from_tensors(tensors: Sequence[Stored], name: str) -> ModelShape:
    """Return the shape inferred from names and shapes."""
    kept = [tensor for tensor in tensors if not tensor.is_buffer]
    if not kept:
        raise BadModel(f"{name} holds no tensors.", hint="Give a checkpoint of a model.")
    fields, notes = _fields(kept)
    found = _folded(kept)
    values = ConfigValues(fields, {"defaults": {}})
    made, outside = stacks(Model("unknown", values, encoder=False), found)
    heads = sum(tensor.elements for tensor in outside if roles.is_head(tensor.name))
    embedded = sum(_count(tensor) for tensor in outside if roles.is_embedding(tensor.name))
    total = sum(_count(tensor) for tensor in outside)
    return ModelShape(
        name=name,
        architecture="unknown",
        stacks=made,
        vocab=fields.get("vocab_size", 0),
        tied=not any(tensor.name.startswith(("lm_head", "embed_out")) for tensor in outside),
        embedding_parameters=embedded,
        head_parameters=heads,
        other_parameters=total - heads - embedded,
        logits="vocab_size" in fields,
        dtype=main_dtype(kept),
        notes=notes,
    )


def _count(tensor: Tensor) -> int:
    return tensor.elements * (1 if tensor.members is None else len(tensor.members))


def _folded(tensors: Sequence[Stored]) -> list[Tensor]:
    """Merge equal tensors of a numbered list, with the members that have them."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    plain = []
    for tensor in tensors:
        head, *rest = re.split(r"\.(\d+)(?=\.|$)", tensor.name)
        if not rest:
            plain.append(Tensor(tensor.name, tensor.shape, 1, "", None))
            continue
        tail = re.sub(
            r"\.\d+(?=\.|$)",
            ".*",
            "".join(part if number % 2 else f".{part}" for number, part in enumerate(rest[1:], 1)),
        )
        turns = groups.setdefault((f"{head}.*{tail}", tensor.shape), {})
        turns[int(rest[0])] = turns.get(int(rest[0]), 0) + 1
    for (pattern, shape), turns in groups.items():
        for repeats in sorted(set(turns.values())):
            members = tuple(sorted(turn for turn, count in turns.items() if count == repeats))
            plain.append(Tensor(pattern, shape, repeats, "", members))
    return plain


def _first(tensors: Sequence[Stored], pattern: re.Pattern[str]) -> tuple[int, ...]:
    return next((tensor.shape for tensor in tensors if pattern.search(tensor.name) and len(tensor.shape) > 0), ())


def _fields(tensors: Sequence[Stored]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what a configuration would have said."""
    fields: dict[str, Any] = {}
    tokens, query, key, out = (_first(tensors, pattern) for pattern in (_TOKENS, _QUERY, _KEY, _MLP_OUT))
    if tokens:
        fields |= {"vocab_size": tokens[0], "hidden_size": tokens[-1]}
    if len(out) >= 2:
        fields["intermediate_size"] = next((size for size in out[-2:] if size != fields.get("hidden_size")), out[-1])
    experts = {int(found[1]) for tensor in tensors if (found := re.search(r"experts\.(\d+)\.", tensor.name))}
    if experts:
        fields |= {"num_experts": len(experts), "num_experts_per_tok": min(2, len(experts))}
    queries = query[0] if query else 0
    fused = _first(tensors, _FUSED)
    if not queries and fused and "hidden_size" in fields:
        queries = fields["hidden_size"]
    return _with_heads(fields, queries, key[0] if key else queries, _first(tensors, _QUERY_NORM))


def _with_heads(
    fields: dict[str, Any], queries: int, keys: int, norm: tuple[int, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    if not queries:
        return fields, (
            "There is no config.json beside the checkpoint; its attention could not be read off its tensors.",
        )
    stated = norm[0] if norm and queries % norm[0] == 0 and norm[0] < queries else 0
    usual = next((width for width in (128, 64, 80, 96, 32, 16, 8) if not queries % width and not keys % width), 1)
    usual = 64 if usual == 128 and queries < 2048 else usual
    width = stated or usual
    fields |= {"head_dim": width, "num_attention_heads": queries // width, "num_key_value_heads": max(1, keys // width)}
    assumed = "" if stated else f" The width of a head is not in a header: {width} is assumed."
    return fields, (f"There is no config.json beside the checkpoint; its structure is read off its tensors.{assumed}",)
