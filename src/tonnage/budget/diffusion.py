"""What the parts of a diffusion pipeline hold: their weights, and the peak of each pass beside them.

The figures are data: real diffusers modules ran on a virtual GPU at three sizes, and memory at each moment of a pass is
linear in the batch and in batch × latent positions (`benchmarks/diffusion/learn.py`).
`benchmarks/results/diffusion.json` compares sizes and batches that were not run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.models.diffusion import Size

_DATA = Path(__file__).parent / "data" / "diffusion"
# Bytes per weight of a linear layer; others keep 16 bits. NF4 has an FP32 scale per 64 weights, bitsandbytes' default.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}
_WHOLE = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters of a part and of its pieces; `benchmarks/diffusion/count.py` explains each."""

    parameters: int
    linear: int
    widest: int
    leaf: int
    block: int
    outside: int
    like: str

    def size_bytes(self, kept: str) -> float:
        """Return the bytes of the whole part with its linear layers in that format."""
        if kept in _WHOLE:
            return self.parameters * WEIGHT_BYTES[kept]
        return self.linear * WEIGHT_BYTES[kept] + (self.parameters - self.linear) * 2.0

    def widened_bytes(self, kept: str) -> float:
        """Return the largest layer dequantized to 16 bits; 0 if it is not quantized."""
        return 0.0 if kept in _WHOLE else 2.0 * self.widest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiffusionPass:
    """One pass of a part. Rows of `moments` give bytes beside the weights: a + b·B + c·B·P, then the same per LoRA
    rank.

    If a VAE processes a video in chunks of `frames` latent frames, b is per position of one frame. `launches` has rows
    of [count, kind, name, precision, variant, kernels, polynomials].
    """

    moments: tuple[tuple[float, ...], ...]
    launches: tuple[Any, ...] = ()
    host_s: float = 0.0
    adapters: int = 0  # adapter parameters per rank
    frames: int = 0

    def held_bytes(self, batch: int, size: Size, rank: int = 0) -> float:
        """Return the bytes at the peak."""
        basis = [1.0, batch * (size.area if self.frames else 1), batch * size.positions]
        basis += [rank * number for number in (1.0, batch, batch * size.positions)]
        return max(sum(number * each for number, each in zip(row, basis, strict=False)) for row in self.moments)


@cache
def all_weights() -> Mapping[str, Weights]:
    """Return the weights of every known part."""
    rows = json.loads((_DATA / "weights.json").read_bytes())
    return {name: Weights(**row) for name, row in rows.items()}


@cache
def passes(part: str) -> Mapping[str, DiffusionPass]:
    """Return the measured passes of a part, by name."""
    found = {}
    for text in (_DATA / f"{all_weights()[part].like}.jsonl").read_text("utf-8").splitlines():
        row = json.loads(text)
        found[row["pass"]] = DiffusionPass(
            moments=tuple(map(tuple, row["moments"])), launches=tuple(row.get("launches", ())), host_s=row.get("host_s", 0.0),
            adapters=row.get("adapters", 0), frames=row.get("frames", 0),
        )  # fmt: skip
    return found


def text_size(tokens: int) -> Size:
    """Return the size of a text, whose positions are its tokens."""
    return Size(8, 8 * tokens)
