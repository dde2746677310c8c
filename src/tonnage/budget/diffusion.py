"""What the parts of a diffusion pipeline hold, and the seconds of their passes.

The figures are data: real diffusers modules ran on a virtual GPU at three sizes, and memory at each moment of a pass is
linear in the batch and in batch × latent positions (`benchmarks/diffusion/learn.py`).
`benchmarks/results/diffusion.json` compares sizes and batches that were not run. Seconds come from the launches of a forward
pass and the clock's kernels.

The backward pass is derived from the forward pass: convolutions and attention have their own backward kernels, a
product has one for inputs and one for weights, and memory-bound kernels read a gradient beside the saved tensor. Frozen
weights have no gradients.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from tonnage.clock import kernels
from tonnage.clock.host import host_costs
from tonnage.clock.kernels import copies
from tonnage.clock.kernels.memory import memory_seconds
from tonnage.clock.launch import Launch
from tonnage.clock.power import slowdown
from tonnage.clock.ranges import factors
from tonnage.clock.timeline import KERNEL_GAP_S
from tonnage.hardware import Gpu
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


Backward = Literal["none", "all", "inputs"]
_ARITHMETIC = ("matmul", "attention", "convolution")
_ATTENTION_PRODUCTS = {"forward": 2, "backward": 5}
_GRADIENT_MOVES = 1.5  # bytes of a gradient's kernel over its forward's: three tensors instead of two
# An FP32 adapter on a 16-bit layer: its input is upcast and downcast again, its output is scaled and added, and its two
# matrices are downcast and multiplied.
_ADAPTER_BYTES, _ADAPTER_LAUNCHES = 6 + 6 + 4 + 6, 8
_STREAMED = 0.9  # of the bandwidth, for long contiguous reads and writes


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of the GPU and of its host, which run concurrently."""

    card_s: float = 0.0
    host_s: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.card_s + other.card_s, self.host_s + other.host_s)

    def __mul__(self, count: float) -> "Seconds":
        return Seconds(self.card_s * count, self.host_s * count)

    @property
    def s(self) -> float:
        """The slower of the two."""
        return max(self.card_s, self.host_s)

    def range_s(self, gpu: Gpu) -> tuple[float, float]:
        """Return the range in which nine of ten runs lie."""
        low, high = (Seconds(self.card_s * card, self.host_s * host).s for card, host in factors(gpu))
        return low, high


@lru_cache(maxsize=1 << 12)
def pass_seconds(
    way: DiffusionPass, batch: int, size: Size, gpu: Gpu, backward: Backward = "none", again: bool = False
) -> Seconds:
    """Return the seconds of one pass, optionally with its backward and a recomputed forward (`again`)."""
    turns = size.latent_frames / way.frames if way.frames else 1.0
    positions = size.area if way.frames else size.positions
    costs, forwards = host_costs(), 2 if again else 1
    host_s = way.host_s * forwards
    drawing: list[tuple[float, float]] = []  # seconds, and the share of the peak rate
    launched = 0.0
    for count, forward in _launches(way, batch, positions, gpu.has_bf16):
        gradients = _gradients(forward, backward)
        for launch in [*[forward] * forwards, *gradients]:
            seconds = float(kernels.seconds(launch, gpu))
            rate = gpu.rates.get(launch.precision, 0.0) if launch.kind in _ARITHMETIC else 0.0
            drawing.append((count * seconds, launch.operations / seconds / rate if rate and seconds else 0.0))
            launched += count * launch.kernels
        if backward != "none":
            moved_s, more = _beside(forward, gpu, backward, forwards)
            drawing.append((count * moved_s, 0.0))
            launched += count * more
            host_s += count * sum(float(costs.backward.launch_s(launch)) for launch in gradients)
            host_s += count * more * (costs.forward.inner_operator + costs.forward.launch)
    slower = slowdown(drawing, host_s)
    card_s = sum(seconds * (slower if share else 1.0) for seconds, share in drawing) + launched * KERNEL_GAP_S
    return Seconds(turns * card_s, turns * host_s)


def _beside(forward: Launch, gpu: Gpu, backward: Backward, forwards: int) -> tuple[float, int]:
    """Return the seconds and launches that training adds to a launch, apart from gradients that are arithmetic.

    Memory-bound kernels have memory-bound gradients. Autocast casts trained weights and their gradients in separate
    launches (their bytes are counted with the optimizer's) and runs norms in FP32, between two casts. If only inputs
    have gradients, adapters run beside attention's projections.
    """
    passes = forwards + _GRADIENT_MOVES
    if forward.kind == "attention" and backward == "inputs":
        batch, heads, _, rows, columns, width, _ = forward.shape
        elements = 2 * (rows + columns) * batch * heads * width  # outputs of its four projections
        return passes * streamed_s(_ADAPTER_BYTES * elements, gpu), 4 * _ADAPTER_LAUNCHES * (forwards + 1)
    if forward.kind in _ARITHMETIC:
        return 0.0, forwards + 1 if backward == "all" and forward.kind != "attention" else 0
    if forward.kind != "norm":
        return _GRADIENT_MOVES * float(kernels.seconds(forward, gpu)), 1
    wide = replace(forward, precision="fp32", moved_bytes=2 * forward.moved_bytes)
    cast_s = 2 * streamed_s(1.5 * forward.moved_bytes, gpu)
    seconds = passes * (float(kernels.seconds(wide, gpu)) + cast_s) - forwards * float(kernels.seconds(forward, gpu))
    return seconds, 1 + 2 * (forwards + 1)


@lru_cache(maxsize=1 << 8)
def _launches(way: DiffusionPass, batch: int, positions: int, has_bf16: bool) -> tuple[tuple[float, Launch], ...]:
    """Return the launches of a forward pass with their counts, which are the same on every card that has BF16."""
    return tuple((count, _launch(fields, batch, positions, has_bf16)) for count, *fields in way.launches)


def _launch(fields: list[object], batch: int, positions: int, has_bf16: bool) -> Launch:
    kind, name, precision, variant, count, polynomials = fields
    basis = (1.0, batch, positions, batch * positions)
    numbers = [sum(x * y for x, y in zip(row, basis, strict=True)) for row in polynomials]  # type: ignore[attr-defined]
    *shape, moved, operations = numbers
    whole = tuple(max(0, round(number)) for number in shape)
    if precision == "bf16" and not has_bf16:
        precision = "fp16"
    if kind == "attention":
        heads, rows, columns, widths = whole[1], whole[3], whole[4], whole[5] + whole[6]
        operations = float(_ATTENTION_PRODUCTS["forward"] * whole[0] * heads * rows * columns * widths)
    return Launch(
        kind=kind, name=str(name), shape=whole, precision=str(precision), moved_bytes=max(moved, 0.0),  # type: ignore[arg-type]
        operations=max(operations, 0.0), variant=str(variant), kernels=count,
    )  # fmt: skip


def _gradients(forward: Launch, backward: Backward) -> list[Launch]:
    if backward == "none" or forward.kind not in _ARITHMETIC:
        return []
    if forward.kind == "attention":
        share = _ATTENTION_PRODUCTS["backward"] / _ATTENTION_PRODUCTS["forward"]
        variant = forward.variant.replace("forward", "backward")
        return [replace(forward, variant=variant, kernels=4, operations=forward.operations * share)]
    many, passes = (2, "input weight") if backward == "all" else (1, "input")
    if forward.kind == "matmul":
        return [forward] * many
    layout = forward.variant.split()[0]
    return [replace(forward, variant=f"{layout} {passes}", kernels=many, operations=many * forward.operations)]


def streamed_s(size_bytes: float, gpu: Gpu) -> float:
    """Return the seconds to read or write that many bytes once on the GPU."""
    return float(memory_seconds(size_bytes, _STREAMED, gpu))


def crossing_s(size_bytes: float, gpu: Gpu, *, pinned: bool, back: bool = False) -> float:
    """Return the seconds of a copy between host and GPU."""
    return float(copies.seconds(copies.transfer(size_bytes, "to_host" if back else "to_device", pinned=pinned), gpu))
