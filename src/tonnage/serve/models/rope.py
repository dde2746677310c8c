"""Rotary position embeddings: parse their configuration, and make the tables of cosines and sines.

| type    | the frequency of a pair of dimensions                                                     |
|---------|-------------------------------------------------------------------------------------------|
| default | theta ** (-2i / dim)                                                                      |
| linear  | the same, divided by the factor                                                           |
| dynamic | as default: it differs only beyond the model's trained positions, which are not served    |
| llama3  | slow ones divided by the factor, fast ones kept, those between blended                    |
| yarn    | the same, blended over dimensions; queries and keys grow with the logarithm of the factor |

Parsing needs no torch. Frequencies are computed in FP32, in transformers' order of operations: FP64 would be more accurate,
but differ from the trained model at distant positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from tonnage.errors import BadModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Kind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary position embedding of a head with `dim` dimensions."""

    dim: int
    theta: float
    kind: Kind = "default"
    factor: float = 1.0
    original_positions: float = 0.0  # of the training before scaling
    low_factor: float = 1.0  # llama3: below this many turns a pair is slow, above the next one fast
    high_factor: float = 4.0
    beta_fast: float = 32.0  # yarn: the same under its names
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0


def read_rope(written: Mapping[str, Any], dim: int, theta: float, positions: int) -> Rope:
    """Read `rope_parameters`, or `rope_scaling` of older files; `theta` is the default."""
    kind = written.get("rope_type", written.get("type", "default"))
    if kind not in get_args(Kind):
        problem = f"The rotary positions are of type {kind!r}."
        raise BadModel(problem, hint=f"These can be served: {', '.join(get_args(Kind))}.")

    def number(name: str, default: float | None) -> float:
        value = written.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            raise BadModel(f"{name!r} of the rotary positions is {value!r}.", hint="Give it a number above 0.")
        return float(value)

    base = Rope(dim, number("rope_theta", theta), cast(Kind, kind))
    if kind == "default":
        return base
    factor = number("factor", None)
    original = number("original_max_position_embeddings", positions)
    if kind == "llama3":
        low, high = number("low_freq_factor", None), number("high_freq_factor", None)
        return Rope(dim, base.theta, "llama3", factor, original, low, high)
    if kind == "yarn":

        def grown(by: float) -> float:
            return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

        scale, scale_all = written.get("mscale"), written.get("mscale_all_dim")
        amplitude = number("attention_factor", grown(scale) / grown(scale_all) if scale and scale_all else grown(1))
        beta = {"beta_fast": number("beta_fast", 32), "beta_slow": number("beta_slow", 1)}
        truncate = bool(written.get("truncate", True))
        return Rope(dim, base.theta, "yarn", factor, original, **beta, truncate=truncate, amplitude=amplitude)
    return Rope(dim, base.theta, cast(Kind, kind), factor)


def make_tables(rope: Rope, positions: int, device: "torch.device") -> "tuple[Tensor, Tensor]":
    """Return cosines and sines, FP32 [positions, dim / 2]."""
    import torch

    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope)).to(device)
    return angles.cos() * rope.amplitude, angles.sin() * rope.amplitude


def inverse_frequencies(rope: Rope) -> "Tensor":
    """Return the radians per position of each pair, FP32 [dim / 2]."""
    import torch

    periods = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    plain = 1.0 / periods
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / plain
        slow = wavelengths > rope.original_positions / rope.low_factor
        fast = wavelengths < rope.original_positions / rope.high_factor
        blend = (rope.original_positions / wavelengths - rope.low_factor) / (rope.high_factor - rope.low_factor)
        between = (1 - blend) * plain / rope.factor + blend * plain
        return torch.where(slow, plain / rope.factor, torch.where(fast, plain, between))
    if rope.kind == "yarn":
        # A ramp from 0 at the last unscaled pair to 1 at the first fully scaled one.
        def pair(turns: float) -> float:
            return rope.dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = pair(rope.beta_fast), pair(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        high = high + 0.001 if low == high else high
        ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        kept = 1 - ramp
        return 1.0 / (rope.factor * periods) * (1 - kept) + plain * kept
    return plain
