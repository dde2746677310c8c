"""What the parts of a diffusion pipeline hold: their weights, and what a pass of each has alive at its highest moment.

The figures are data: real modules of diffusers ran on a virtual GPU at three sizes, and what is held at a moment of a pass is
linear in the batch and in batch × latent positions (`benchmarks/diffusion/learn.py`). Sizes and batches that were not run are
compared in `benchmarks/results/diffusion.json`. This module does not know seconds, nor which parts are on the card together.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.models.diffusion import Size

_DATA = Path(__file__).parent / "data" / "diffusion"
# Bytes of a weight of a linear layer; others keep 16 bits. NF4 has an FP32 scale for each 64 weights, bitsandbytes' default.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}
_WHOLE = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters of a part and of its pieces; `benchmarks/diffusion/count.py` says what each is."""

    parameters: int
    linear: int
    widest: int
    leaf: int
    block: int
    outside: int
    like: str

    def size_bytes(self, kept: str) -> float:
        """Of the whole part, its linear layers kept so."""
        if kept in _WHOLE:
            return self.parameters * WEIGHT_BYTES[kept]
        return self.linear * WEIGHT_BYTES[kept] + (self.parameters - self.linear) * 2.0

    def widened_bytes(self, kept: str) -> float:
        """The largest layer in 16 bits, while it is used; none where it is kept so."""
        return 0.0 if kept in _WHOLE else 2.0 * self.widest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One pass of a part. Rows of `moments` have bytes beside the weights: a + b·B + c·B·P, then as much again for each rank.

    Where a VAE goes through a video in turns of `frames` latent frames, b is for each position of one frame. `launches` has rows
    of [count, kind, name, precision, variant, kernels, polynomials].
    """

    moments: tuple[tuple[float, ...], ...]
    launches: tuple[Any, ...] = ()
    host_s: float = 0.0
    adapters: int = 0  # parameters of adapters for each rank
    frames: int = 0

    def held_bytes(self, batch: int, size: Size, rank: int = 0) -> float:
        """At the highest moment."""
        inner = batch * (size.area if self.frames else 1)
        basis = [1.0, inner, batch * size.positions]
        basis += [rank * number for number in (1.0, batch, batch * size.positions)]
        return max(sum(number * each for number, each in zip(row, basis, strict=False)) for row in self.moments)


@cache
def all_weights() -> Mapping[str, Weights]:
    """Of every part that is known."""
    rows = json.loads((_DATA / "weights.json").read_bytes())
    return {name: Weights(**row) for name, row in rows.items()}


@cache
def passes(part: str) -> Mapping[str, Pass]:
    """The passes of a part that were learnt, by name."""
    found = {}
    for text in (_DATA / f"{all_weights()[part].like}.jsonl").read_text("utf-8").splitlines():
        row = json.loads(text)
        found[row["pass"]] = Pass(
            moments=tuple(map(tuple, row["moments"])), launches=tuple(row.get("launches", ())), host_s=row.get("host_s", 0.0),
            adapters=row.get("adapters", 0), frames=row.get("frames", 0),
        )  # fmt: skip
    return found


def text_size(tokens: int) -> Size:
    """The size of a text, whose positions are its tokens."""
    return Size(8, 8 * tokens)
