"""The tensors of a checkpoint from its safetensors headers: names, shapes, dtypes. No weight is read.

A file begins with eight bytes that give the length of its JSON header. `model.safetensors.index.json` lists the shards.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tonnage.errors import BadModel
from tonnage.models.files import parse_object, read_json
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
    return tuple(_stored(name, row, path) for name, row in header.items() if name != "__metadata__")


def main_dtype(tensors: Iterable[Stored]) -> str:
    """Return the dtype of most elements."""
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += tensor.elements
    return elements.most_common(1)[0][0] if elements else "bf16"


def _damaged(path: Path, why: str) -> BadModel:
    return BadModel(f"{path} is not a whole safetensors file: {why}.", hint="Fetch the file again.")


def _stored(name: str, row: Any, path: Path) -> Stored:
    described = row if isinstance(row, Mapping) else {}
    shape, dtype = described.get("shape"), described.get("dtype")
    if not isinstance(shape, list) or not isinstance(dtype, str) or not _is_shape(shape):
        raise _damaged(path, f"its header describes {name[:60]!r} in a way that makes no sense")
    return Stored(name, _DTYPES.get(dtype, dtype.lower()), tuple(shape))


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
        raise BadModel(
            f"{len(missing)} of {len(names)} shards that {index} lists are not there: {listed}.",
            hint="Fetch them (their headers are enough), or put the model's config.json beside the index.",
        )
    return tuple(tensor for name in names for tensor in read_header(index.parent / name))
