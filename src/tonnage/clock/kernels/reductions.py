"""Sums, means, extremes and norms over some axes, with the grid that PyTorch's reduction kernel chooses.

The grid decides: few blocks with long loops wait for memory, and if many blocks share an output, the last one sums the
partial results load by load. So a sum over the rows of a narrow matrix takes far longer than its bytes suggest.
"""

import re
from math import ceil, prod
from typing import NamedTuple

from tonnage.clock.kernels.figures import careful
from tonnage.clock.kernels.memory import cycle_seconds, figures, held_share, memory_seconds, precision_of, slowest
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware.gpu import Gpu

_MOST_THREADS, _WARP = 512, 32
_LEAST_VALUES, _MOST_VALUES = 16, 256  # per thread
_UNROLLED = 4
_VECTOR = 4
_HEAVY = dict.fromkeys(("argmax", "argmin", "max", "min"), "argument") | dict.fromkeys(("var", "std"), "moments")

WHOLE, LAST, INNER, FIRST = range(4)  # what is reduced: all; the last axis; several including the last; not the last


class ReductionGrid(NamedTuple):
    """The layout of a reduction: threads per block, blocks, loads per thread, and final loads of the last block."""

    threads: int
    blocks: int
    loads: int
    tail: int


def grid_of(outputs: int, inputs: int, axes: int, gpu: Gpu) -> ReductionGrid:
    """Apply PyTorch's `setReduceConfig`: lanes along contiguous data, then warps and blocks for long loops."""
    across, along = (inputs, outputs) if axes != FIRST else (outputs, inputs)
    vector = 1
    if axes == FIRST:
        vector = next(size for size in (_VECTOR, 2, 1) if across % size == 0)
    elif axes == WHOLE and inputs > 128:
        across //= _VECTOR
    most = _MOST_THREADS // vector
    # The largest powers of two not above these extents.
    across_most, along_most = (
        min(most, 1 << (max(extent, 1).bit_length() - 1)) for extent in (across // vector, along)
    )
    height = min(along_most, most // min(across_most, _WARP))
    width = min(across_most, most // height)
    threads = width * height

    # Lanes cover inputs if those are contiguous, else outputs; then warps, then blocks.
    split_inputs, split_outputs = (1, width) if axes == FIRST else (width, 1)
    loads = ceil(inputs / split_inputs)
    over_warps = loads >= min(16 * height, _MOST_VALUES)
    if over_warps:
        split_inputs *= height
    else:
        split_outputs *= height
    loads = ceil(inputs / split_inputs)
    blocks = ceil(outputs / vector / split_outputs)
    full = gpu.sm_count * max(1, gpu.max_threads_per_sm // threads)
    shares = 1
    if over_warps and loads >= _MOST_VALUES and blocks <= full:
        shares = max(min(ceil(full / blocks), ceil(loads / _LEAST_VALUES)), ceil(loads / _MOST_VALUES))
    if axes == WHOLE:
        loads = ceil(loads / _VECTOR)
    tail = ceil(shares / (height if axes == FIRST else threads)) if shares > 1 else 0
    return ReductionGrid(threads, blocks * shares, ceil(loads / shares), tail)


def seconds(launch: Launch, gpu: Gpu) -> float:
    """Return the device time of a reduction: `shape` is (outputs, inputs of each, which axes)."""
    outputs, inputs, axes = launch.shape
    form = figures()["reduction"][launch.variant]
    grid = grid_of(outputs, inputs, axes, gpu)
    full = gpu.sm_count * max(1, gpu.max_threads_per_sm // grid.threads)
    rounds = ceil(grid.loads / _UNROLLED) * max(1.0, grid.blocks / full)
    each = form["round_narrow" if launch.precision in ("bf16", "fp16") else "round_wide"]
    each += form["round_miss"] * (1.0 - held_share(launch.moved_bytes, gpu))
    tail = (form["handover"] + form["tail"] * grid.tail) if grid.tail else 0.0
    body_s = slowest(
        memory_seconds(launch.moved_bytes, form["share"], gpu),
        cycle_seconds((form["element"] * outputs * inputs + form["block"] * grid.blocks) / gpu.sm_count, gpu),
        cycle_seconds(each * rounds, gpu),
    )
    return float(form["floor_s"] + body_s + cycle_seconds(tail, gpu))


def _reduction(call: OperatorCall, settings: Settings) -> Launch | None:
    shape = call.shapes[0]
    reduced = _reduced(call, shape)
    inputs = prod(shape[axis] for axis in reduced)
    outputs = prod(shape) // inputs if inputs else 0
    if not inputs or not outputs:
        return None
    strides = call.strides[0] if call.strides and len(call.strides[0]) == len(shape) else None
    order = [axis for axis in range(len(shape)) if shape[axis] != 1]
    order = sorted(order, key=lambda axis: -strides[axis]) if strides else order
    summed = [axis for axis in order if axis in reduced]
    if len(summed) == len(order):
        axes = WHOLE
    else:
        axes = FIRST if order[-1] not in reduced else LAST if order[-len(summed) :] == summed else INNER
    variant = _HEAVY.get(call.name, "sum") if outputs > 1 or call.name not in ("max", "min") else "sum"
    if variant == "sum":
        variant = f"sum_{('whole', 'last', 'inner', 'first')[axes]}"
    return Launch(
        kind="reduction", name=call.name, shape=(outputs, inputs, axes), precision=precision_of(call.types[0]),
        moved_bytes=call.tensor_bytes(0) + outputs * call.element_bytes(0), operations=float(outputs * inputs), variant=variant,
    )  # fmt: skip


def _reduced(call: OperatorCall, shape: tuple[int, ...]) -> list[int]:
    """Return the axes as recorded; by default the last one for a mean or extreme, all but the last for a sum."""
    text = call.value(2 if call.name == "linalg_vector_norm" else 1)
    if "[" in text or text.lstrip("-").isdigit():
        axes = {int(axis) % max(1, len(shape)) for axis in re.findall(r"-?\d+", text)}
        return sorted(axes) if axes else list(range(len(shape)))
    if len(call.shapes) < 3 and call.name not in ("argmax", "argmin"):
        return list(range(len(shape)))
    return list(range(len(shape) - 1)) if call.name == "sum" and len(shape) > 1 else [len(shape) - 1]


OPERATORS = careful(
    dict.fromkeys(
        "sum mean amax amin max min prod any all argmax argmin linalg_vector_norm var std logsumexp".split(), _reduction
    )
)
