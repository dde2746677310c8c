"""The workspace of cuDNN's plan for a convolution, in bytes.

cuDNN is closed: its heuristic picks an engine, and the engine determines the workspace. Measurements are in a table
(`data/cudnn-convolutions.npz`, some 718,000 plans: layers of common networks, and random ones). A convolution in the
table gets its measured bytes; any other gets the median of what the engines of the three nearest measured layers
would take. An engine is identified by what its workspace contains: copies of operands in the other layout (channels
padded to 4, 8 or a power of two), a gradient of the weights for each image, and a remainder that depends on the
card's SMs rather than on the batch.

Held out layer by layer, the estimate is within 5 % of the operands in 92 % of cases for layers of common networks,
and in 87 % (two dimensions) and 78 % (three) for random layers. Other cards are assumed to choose as an H200 does,
except those that gain nothing by TF32 (`takes_none`); that, engines without TF32 and deterministic ones were not
measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

_DATA = Path(__file__).parent.parent / "data" / "cudnn-convolutions.npz"

Way = Literal["forward", "backward_data", "backward_filter"]
Shape = tuple[int, ...]
Floats = npt.NDArray[np.float32]

NEGLIGIBLE_BYTES = 1024
LARGEST_REMAINDER_BYTES = 24 << 20
# Channels are padded to multiples of these inside an engine; 0 means the next power of two (grouped convolutions
# only).
PADDINGS = (1, 4, 8, 0)


class Convolution(NamedTuple):
    """A convolution without its batch size: the input (channels and sides), the weight, and the parameters."""

    input: Shape
    weight: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int

    def output_sides(self) -> Shape:
        """Return the spatial sizes of the output."""
        sides = zip(self.input[1:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True)
        return tuple((side + 2 * pad - step * (kernel - 1) - 1) // move + 1 for side, kernel, move, pad, step in sides)


@dataclass(frozen=True)
class ConvolutionCall:
    """One call of cuDNN: forward or one of the two backward passes of a layer, with its batch, dtype and layout."""

    way: Way
    layer: Convolution
    batch: int
    dtype: str
    channels_last: bool

    @property
    def key(self) -> str:
        """The table's column; dtypes that were not measured run as float32."""
        dtype = self.dtype if self.dtype in ("bfloat16", "float16") else "float32"
        return f"{self.way} {dtype} {'channels_last' if self.channels_last else 'contiguous'}"

    @property
    def element_bytes(self) -> int:
        return {"bfloat16": 2, "float16": 2, "float64": 8}.get(self.dtype, 4)

    @cached_property
    def weight_elements(self) -> int:
        return math.prod(self.layer.weight)

    def operand_bytes(self, padding: int = 1) -> tuple[int, int, int]:
        """Return the bytes of input, weight and output with padded channels."""
        layer, size = self.layer, self.element_bytes
        inner, outer = padded(layer.weight[1], padding), padded(layer.weight[0] // layer.groups, padding)
        x = self.batch * inner * layer.groups * math.prod(layer.input[1:])
        w = layer.groups * inner * outer * math.prod(layer.weight[2:])
        y = self.batch * outer * layer.groups * math.prod(layer.output_sides())
        return x * size, w * size, y * size


@dataclass(frozen=True)
class Workspace:
    """The components of a workspace."""

    padding: int = 1
    copies: tuple[int, int, int] = (0, 0, 0)
    weights_per_image: bool = False
    remainder_bytes: int = 0
    remainder_share: float = 0.0

    def workspace_bytes(self, plan: ConvolutionCall) -> int:
        """Return the engine's workspace for another convolution."""
        total = sum(kept * size for kept, size in zip(self.copies, plan.operand_bytes(self.padding), strict=True))
        if self.weights_per_image:
            total += plan.batch * plan.weight_elements * 4
        operands = sum(plan.operand_bytes())
        return total + min(self.remainder_bytes, operands) + int(self.remainder_share * operands)


def padded(channels: int, multiple: int) -> int:
    """Round channels up to a multiple, or to a power of two if it is 0."""
    return -(-channels // multiple) * multiple if multiple else 1 << (channels - 1).bit_length()


def recognised(plan: ConvolutionCall, workspace_bytes: int) -> Workspace:
    """Return the engine that explains a measured workspace with the smallest remainder."""
    if workspace_bytes < NEGLIGIBLE_BYTES:
        return Workspace(remainder_bytes=workspace_bytes)
    # Every choice of copied operands, by what it leaves unexplained.
    parts, seen = [], set()
    for padding in PADDINGS[: 4 if plan.layer.groups > 1 else 3]:
        sizes = plan.operand_bytes(padding)
        if sizes not in seen:
            seen.add(sizes)
            for copies in product((0, 1), repeat=3):
                rest = workspace_bytes - sum(kept * size for kept, size in zip(copies, sizes, strict=True))
                if rest >= 0:
                    parts.append((rest, padding, (copies[0], copies[1], copies[2])))
    parts.sort(key=lambda part: part[0])
    least, least_padding, least_copies = parts[0]
    if least < NEGLIGIBLE_BYTES:
        return Workspace(least_padding, least_copies, remainder_bytes=least)
    gradient = plan.weight_elements * 4
    for rest, padding, copied in parts:
        if abs(rest - plan.batch * gradient) < NEGLIGIBLE_BYTES:
            return Workspace(padding, copied, weights_per_image=True, remainder_bytes=rest - plan.batch * gradient)
    if plan.way == "backward_filter" and gradient >= 4 * NEGLIGIBLE_BYTES:
        # Several float32 gradients of the weight: a split over the batch.
        for rest, padding, copied in sorted(parts, key=lambda part: (sum(part[2]), part[0])):
            if rest % gradient < NEGLIGIBLE_BYTES and rest < LARGEST_REMAINDER_BYTES:
                return Workspace(padding, copied, remainder_bytes=rest)
    if least <= LARGEST_REMAINDER_BYTES:
        return Workspace(least_padding, least_copies, remainder_bytes=least)
    return Workspace(least_padding, least_copies, remainder_share=least / sum(plan.operand_bytes()))


# Weights of the features that decide the engine, most decisive first; found by holding out layers of the table.
WEIGHTS: Floats = np.array([10, 10, 4, 4, 3, 3, 2, 1.5, 1.5, 1.5, 1.5, 1.5, 0.6, 0.5, 0.6, 0.5], dtype=np.float32)


def layer_features(layer: Convolution) -> list[float]:
    """Return all features but the batch's, in the order of WEIGHTS."""
    inner, outer = layer.weight[1], layer.weight[0] // layer.groups
    alignment = 8 if layer.groups > 1 else 3
    log = math.log2
    return [
        len(layer.stride), (layer.groups > 1) + (layer.groups > 1 and inner == 1),
        log(math.prod(layer.weight[2:])), layer.weight[2] != layer.weight[-1],
        twos(inner, alignment), log(math.prod(layer.dilation)), log(math.prod(layer.stride)), twos(outer, alignment),
        log(inner), log(outer), log(layer.groups), any(layer.padding), twos(math.prod(layer.input[1:]), 3),
        log(math.prod(layer.output_sides())),
    ]  # fmt: skip


def twos(number: int, at_most: int) -> int:
    """Return how often 2 divides the number, up to a limit: vectorized loads depend on it."""
    return min((number & -number).bit_length() - 1, at_most) if number else at_most


class Column:
    """The measured plans of one pass, dtype and layout."""

    def __init__(self, table: "WorkspaceTable", rows: npt.NDArray[np.int64]) -> None:
        self._table = table
        self.layers = np.cumsum(rows[0])  # stored as differences, which compress better
        _, self.batches, self.bytes = rows

    @cached_property
    def exact(self) -> dict[tuple[int, int], int]:
        places = zip(self.layers.tolist(), self.batches.tolist(), strict=True)
        return dict(zip(places, self.bytes.tolist(), strict=True))

    @cached_property
    def points(self) -> Floats:
        return _points(self._table.features[self.layers], self.batches)

    def nearest(self, plan: ConvolutionCall, count: int) -> list[tuple[ConvolutionCall, int]]:
        """Return the most similar measured plans of different layers, or only the layer itself at another batch."""
        features = np.array([layer_features(plan.layer)], dtype=np.float32)
        distances = np.abs(self.points - _points(features, np.array([plan.batch]))).sum(axis=1)
        own = np.flatnonzero(self.layers == self._table.places.get(plan.layer, -1))
        if len(own):
            distances, count = np.where(self.layers == self.layers[own[0]], distances, np.inf), 1
        # A layer was measured at a few dozen batches at most.
        closest = np.argpartition(distances, min(100 * count, len(distances) - 1))[: 100 * count]
        ranked = closest[np.argsort(distances[closest], kind="stable")]
        _, firsts = np.unique(self.layers[ranked], return_index=True)
        found = []
        for row in ranked[np.sort(firsts)[:count]].tolist():
            layer = self._table.layers[int(self.layers[row])]
            like = ConvolutionCall(plan.way, layer, int(self.batches[row]), plan.dtype, plan.channels_last)
            found.append((like, int(self.bytes[row])))
        return found


def _points(features: Floats, batches: npt.NDArray[Any]) -> Floats:
    batch = np.log2(batches.astype(np.float32))
    return np.column_stack([features, batch, features[:, -1] + batch]).astype(np.float32) * WEIGHTS


class WorkspaceTable:
    """The measurements; a column is read on first use."""

    def __init__(self, path: Path) -> None:
        self._file = np.load(path)
        self.layers = []
        # The number of sides, then all numbers, with zeros for missing sides (tools/probe_convolutions.py).
        for row in self._file["layers"].tolist():
            sides = row[0]
            stride, padding, dilation = (tuple(row[start : start + sides]) for start in (10, 13, 16))
            shapes = tuple(row[1 : sides + 2]), tuple(row[5 : sides + 7])
            self.layers.append(Convolution(*shapes, stride, padding, dilation, row[19]))
        self.places = {layer: place for place, layer in enumerate(self.layers)}
        self._columns: dict[str, Column] = {}

    @cached_property
    def features(self) -> Floats:
        return np.array([layer_features(layer) for layer in self.layers], dtype=np.float32)

    def column(self, key: str) -> Column:
        if key not in self._columns:
            self._columns[key] = Column(self, self._file[key])
        return self._columns[key]


@cache
def _table() -> WorkspaceTable:
    return WorkspaceTable(_DATA)


def measured_bytes(plan: ConvolutionCall) -> int | None:
    """Return the measured workspace, or None if it was not measured."""
    place = _table().places.get(plan.layer)
    return None if place is None else _table().column(plan.key).exact.get((place, plan.batch))


def takes_none(plan: ConvolutionCall, rates: Mapping[str, float]) -> bool:
    """Whether a card with these rates convolves in the given layout, without a workspace.

    The measured engines convert float32 operands to the layout of the tensor cores, for TF32. That gains nothing
    where these are missing or no faster than the CUDA cores, as on GeForce cards. Training of ten networks on an RTX
    3060 and an RTX 4060 (`benchmarks/league`, xMem) used no more memory than the tensors.
    """
    return plan.dtype == "float32" and rates.get("tf32", 0) <= rates["fp32"]


@cache
def workspace_bytes(plan: ConvolutionCall) -> int:
    """Return the measured workspace, or an estimate from the nearest measured plans."""
    known = measured_bytes(plan)
    if known is not None and plan.dtype != "float64":
        return known
    near = _table().column(plan.key).nearest(plan, 3)
    return sorted(recognised(like, size).workspace_bytes(plan) for like, size in near)[len(near) // 2]


def search_bytes(plan: ConvolutionCall) -> list[int]:
    """Return the workspaces of all engines, which cuDNN tries for `torch.backends.cudnn.benchmark` if they fit.

    For float32 that is an FFT's wherever one applies; one channel per group is tried as four, with at least sixteen
    groups. For other engines only their copies are known: of 8,400 searches measured on an H200, half of those of
    layers above 64 MiB took within 5 % of this.
    """
    copies = sum(plan.operand_bytes(16 // min(plan.element_bytes, 4))) + 16
    if plan.layer.groups > 1 and plan.layer.weight[1] == 1:
        return [workspace_bytes(plan), 4 * sum(plan.operand_bytes()) * max(16, plan.layer.groups) // plan.layer.groups]
    fourier = _fourier_bytes(plan)
    return [workspace_bytes(plan), copies, fourier + (copies if fourier and plan.channels_last else 0)]


def _fourier_bytes(plan: ConvolutionCall) -> int:
    layer = plan.layer
    plain = max(*layer.stride, *layer.dilation, layer.groups) == 1 and len(layer.stride) == 2
    side = max(side + 2 * pad for side, pad in zip(layer.input[1:], layer.padding, strict=True))
    if plan.dtype != "float32" or not plain or side > 128:
        return 0
    _, weight, output = plan.operand_bytes()
    n, c, k = plan.batch, layer.input[0], layer.weight[0]
    size = max(16, 1 << (side - 1).bit_length())
    spectrum = size * (size // 2 + 1) * 16
    if plan.way == "forward":
        return weight + spectrum * max(c * k + n * c, n * k)
    if plan.way == "backward_filter":
        return output + spectrum * max(n * (c + k), c * k)
    tiled = side <= 32 and max(layer.weight[2:]) > 1
    return 32 * 17 * 8 * (c * k + n * (c + k)) if tiled else 0
