"""The tensors of a checkpoint from its safetensors headers: names, shapes, dtypes. No weight is read.

A file begins with eight bytes that give the length of its JSON header. `model.safetensors.index.json` lists the shards.

Without a configuration the parameters of the model are exact, and its structure is inferred from names and shapes.
Headers do not give the number of heads: the head width is then assumed, and a note says so.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from tonnage.errors import BadModel
from tonnage.models.assemble import Model, outside_layers, stacks
from tonnage.models.files import parse_object, read_json
from tonnage.models.shape import ModelShape
from tonnage.models.templates import ConfigValues, Tensor
from tonnage.untrusted import open_file

# The format allows 100 MB; the largest published headers have a few.
_LARGEST_HEADER_BYTES = 32 * 2**20
_LARGEST_INDEX_BYTES = 32 * 2**20
_DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "F8_E5M2": "fp8", "F4": "fp4",
           "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip
_SHARD = re.compile(r"(.+)-\d+-of-\d+\.safetensors")
# Saved beside the parameters, but none of them.
_BUFFERS = re.compile(
    r"inv_freq$|position_ids$|masked_bias$|num_batches_tracked$|running_(mean|var)$|e_score_correction_bias$|attn\.bias$|"
    r"(weight|input)_scale(_inv)?$|\.(g_idx|qzeros|scales)$|quant_state|absmax$|quant_map$"
)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_buffer(self) -> bool:
        """Whether it is saved but no parameter."""
        return bool(_BUFFERS.search(self.name))


def read_checkpoint(path: Path) -> tuple[Stored, ...]:
    """Return all tensors of a file, of the shards that an index lists, or of the set that a shard belongs to."""
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    shard = _SHARD.fullmatch(path.name)
    index = path.with_name(f"{shard[1]}.safetensors.index.json") if shard else None
    return _read_shards(index) if index and index.is_file() else read_header(path)


def read_header(path: Path) -> tuple[Stored, ...]:
    """Return the tensors of one file."""
    with open_file(path) as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        size = path.stat().st_size
        if len(start) < 8 or length == 0:
            raise _damaged(path, "it is too short to have a header")
        if length > _LARGEST_HEADER_BYTES:
            raise _damaged(path, f"its header claims {length:,} bytes")
        if length > size - 8:
            raise _damaged(path, f"its header claims {length:,} bytes and {size - 8:,} are there")
        header = parse_object(file.read(length), f"The header of {path}")
    tensors = []
    for name, row in header.items():
        if name != "__metadata__":
            described = row if isinstance(row, Mapping) else {}
            shape, dtype = described.get("shape"), described.get("dtype")
            if not isinstance(shape, list) or not isinstance(dtype, str) or not _is_shape(shape):
                raise _damaged(path, f"its header describes {name[:60]!r} in a way that makes no sense")
            tensors.append(Stored(name, _DTYPES.get(dtype, dtype.lower()), tuple(shape)))
    return tuple(tensors)


def main_dtype(tensors: Iterable[Stored]) -> str:
    """Return the dtype of most elements."""
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += tensor.elements
    return elements.most_common(1)[0][0] if elements else "bf16"


def _damaged(path: Path, why: str) -> BadModel:
    return BadModel(f"{path} is not a whole safetensors file: {why}.", hint="Fetch the file again.")


def _is_shape(sizes: list[Any]) -> bool:
    return len(sizes) <= 16 and all(type(size) is int and 0 <= size <= 2**48 for size in sizes) and prod(sizes) <= 2**52


def _read_shards(index: Path) -> tuple[Stored, ...]:
    placed = read_json(index, largest_bytes=_LARGEST_INDEX_BYTES).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise BadModel(f"{index} has no 'weight_map'.", hint="Give the index that was saved with the shards.")
    names = sorted(set(placed.values()))
    if any(name != Path(name).name for name in names):
        raise BadModel(f"{index} names shards outside its folder.", hint="Shards must lie beside their index.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        hint = "Fetch them (their headers are enough), or put the model's config.json beside the index."
        raise BadModel(f"{len(missing)} of {len(names)} shards that {index} lists are not there: {listed}.", hint=hint)
    return tuple(tensor for name in names for tensor in read_header(index.parent / name))


# The shape of a model from its tensors

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
    made, outside = stacks(Model("unknown", ConfigValues(fields, {"defaults": {}}), encoder=False), found)
    embedded, heads, others = outside_layers(outside)
    return ModelShape(
        name=name,
        architecture="unknown",
        stacks=made,
        vocab=fields.get("vocab_size", 0),
        tied=not any(tensor.name.startswith(("lm_head", "embed_out")) for tensor in outside),
        embedding_parameters=embedded,
        head_parameters=heads,
        other_parameters=others,
        logits="vocab_size" in fields,
        dtype=main_dtype(kept),
        notes=notes,
    )


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
    if not queries and _first(tensors, _FUSED) and "hidden_size" in fields:
        queries = fields["hidden_size"]
    keys, norm = key[0] if key else queries, _first(tensors, _QUERY_NORM)
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
