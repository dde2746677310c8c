"""Elementwise kernels: arithmetic, activations, casts, copies on the GPU, fills, random numbers, dropout,
concatenation.

PyTorch has a fast kernel for tensors of one layout and dtype, a slower one for mixed dtypes, another for different
strides, and one that is slow in both ways. The kernel's name in a trace decides; otherwise dtypes and strides do.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

from tonnage.clock.kernels.figures import careful
from tonnage.clock.kernels.memory import (
    SECTOR_BYTES,
    cycle_seconds,
    families,
    figures,
    held_share,
    launch,
    memory_seconds,
    pieces,
    slowest,
)
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall, broadcast
from tonnage.hardware.gpu import Gpu

_HALVES = ("c10::BFloat16", "c10::Half")
_FLAG = "bool"
_COMPUTING = ("vector", "random")  # forms whose arithmetic is not hidden behind address computation
_WITH_RESULT = {"mse_loss_backward": 3}  # the result is the last argument, and not read


def seconds(launch: Launch, gpu: Gpu) -> Any:
    """Return the device time: bytes, or instructions per element, which some operators need many of."""
    elements, kernels = launch.shape[0], launch.kernels
    form = figures()[launch.variant]
    width = "narrow" if launch.precision in ("bf16", "fp16") else "wide"
    arithmetic = figures()["arithmetic"][width].get(launch.name, 0.0) if launch.variant in _COMPUTING else 0.0
    missed = form.get("miss", 0.0) * (1.0 - held_share(launch.moved_bytes, gpu))
    each = arithmetic + form["element"] + form.get("axis", 0.0) * launch.shape[1]
    cycles = each * elements + (form["access"] + missed) * launch.operations
    floor_s = form["floor_s"] * kernels
    moved_s = memory_seconds(launch.moved_bytes, form["share"], gpu)
    return floor_s + slowest(moved_s, cycle_seconds(cycles / gpu.sm_count, gpu))


def _elementwise(call: OperatorCall, settings: Settings) -> Launch | None:
    tensors = [at for at in call.tensors() if prod(call.shapes[at]) != 1 or at == 0]
    if call.name in _WITH_RESULT:
        tensors = tensors[: _WITH_RESULT[call.name]]
    if not tensors:
        return None
    shape = broadcast([call.shapes[at] for at in tensors])
    elements = prod(shape)
    widest = max(call.element_bytes(at) for at in tensors)
    written = call.element_bytes(0) if call.name.endswith("_") else 1 if call.name in _FLAGS else widest
    moved = sum(map(call.tensor_bytes, tensors)) + elements * written
    return _launch(call, tensors, shape, moved, accesses=len(tensors) + 1)


def copy_on_card(call: OperatorCall, settings: Settings) -> Launch | None:
    """Return the launch of copy_(to, from); `copies` handles those between host and GPU."""
    shape = call.shapes[0]
    return _launch(call, [0, 1], shape, prod(shape) * call.element_bytes(0) + call.tensor_bytes(1), accesses=2)


def _write(call: OperatorCall, settings: Settings) -> Launch | None:
    """Return the launch of a tensor that is only written. Ranges without a recorded shape are assumed to be short."""
    at = next(call.tensors(), None)
    elements = prod(call.shapes[at]) if at is not None else 1
    moved = float(elements * (call.element_bytes(at) if at is not None else 8))
    count, kernels = float(elements), pieces(moved)
    return launch(
        "elementwise", call, moved=moved, elements=elements, accesses=count, variant="written", kernels=kernels
    )


def _moved(call: OperatorCall, settings: Settings, *, variant: str, passes: float, flags: float = 0.0) -> Launch | None:
    """Read a tensor that is read or written so often, with so many flags per element."""
    elements = prod(call.shapes[0])
    moved, accesses = elements * (passes * call.element_bytes(0) + flags), (passes + flags) * elements
    return launch("elementwise", call, moved=moved, elements=elements, accesses=accesses, variant=variant)


def _cat(call: OperatorCall, settings: Settings) -> Launch | None:
    elements = sum(prod(shape) for shape in call.shapes[0])
    if not elements:
        return None
    moved = 2.0 * elements * list_bytes(call, 0)
    rows = min(prod(shape[:-1]) for shape in call.shapes[0] if shape)
    narrow = elements / max(1, rows) / len(call.shapes[0]) < 512 and rows > 1
    variant = "joined_rows" if narrow else "joined"
    return launch("elementwise", call, moved=moved, elements=elements, accesses=2.0 * elements, variant=variant)


def list_bytes(call: OperatorCall, at: int) -> int:
    """Return the element size of a tensor list: by its recorded type, by a kernel's name, else four."""
    table = {"OpaqueType<2": 2, "OpaqueType<4": 4, "OpaqueType<8": 8, "OpaqueType<1": 1, "BFloat16": 2, "Half": 2}
    words = (call.types[at] if at < len(call.types) else "", *call.kernels)
    return next((size for word in words for mark, size in table.items() if mark in word), 4)


def _launch(call: OperatorCall, tensors: Sequence[int], shape: tuple[int, ...], moved: float, accesses: int) -> Launch:
    elements = prod(shape)
    variant = _variant(call, tensors)
    largest = elements * max(call.element_bytes(at) for at in tensors)
    loops = 1
    if variant.startswith("strided"):
        # The dimensions left after merging those contiguous in every tensor: each costs a division.
        strides = [_strides(call, at, shape) for at in tensors]
        axes = sorted((axis for axis in range(len(shape)) if shape[axis] != 1), key=lambda axis: -strides[0][axis])
        merged = sum(all(one[outer] == one[inner] * shape[inner] for one in strides) for outer, inner in pairwise(axes))
        loops = len(axes) - merged
    return launch(
        "copy" if call.name == "copy_" else "elementwise", call, moved=moved, elements=elements, blocks=loops,
        accesses=float(accesses * elements), variant=variant, kernels=pieces(largest),
    )  # fmt: skip


def _variant(call: OperatorCall, tensors: Sequence[int]) -> str:
    strided = "strided_narrow" if call.element_bytes(tensors[0]) < 4 else "strided_wide"
    for kernel in call.kernels:
        if "unrolled_elementwise_kernel" in kernel:
            return "mixed"
        if "vectorized_elementwise_kernel" in kernel or kernel.startswith("Memcpy"):
            return "vector"
        if "elementwise_kernel" in kernel:
            return strided if "nocast" in kernel else "strided_mixed"
    # Elements are converted one by one if dtypes differ. Flags never are, and narrowing a float has a fast kernel.
    types = [call.types[at] for at in tensors if call.types[at] != _FLAG]
    narrows = call.name == "copy_" and types[0] in _HALVES and types[1:] == ["float"]
    mixed = len(set(types)) > 1 and not narrows
    # Of one shape and layout, without gaps?
    first = call.shapes[tensors[0]]
    known = [at for at in tensors if at < len(call.strides) and call.strides[at]]
    strides = [call.strides[at] for at in known]
    dense = call.name != "flip" and all(call.shapes[at] == first for at in tensors)
    dense, expected = dense and all(one == strides[0] for one in strides), 1
    for stride, extent in sorted(zip(strides[0], first, strict=True)) if strides and dense else ():
        dense = dense and (extent == 1 or stride == expected)
        expected *= extent
    if dense:
        return "mixed" if mixed else "vector"
    # Are neighbours in one tensor far apart in another, so that every element costs a sector?
    shape = broadcast([call.shapes[at] for at in tensors])
    whole = [_strides(call, at, shape) for at in known if tuple(call.shapes[at]) == shape]
    if not mixed and len(whole) > 1:
        inner = min(range(len(shape)), key=lambda axis: (shape[axis] == 1, whole[0][axis]), default=0)
        if any(one[inner] * call.element_bytes(tensors[0]) >= SECTOR_BYTES for one in whole[1:]):
            return "transposed"
    return "strided_mixed" if mixed else strided


def _strides(call: OperatorCall, at: int, shape: tuple[int, ...]) -> list[int]:
    """Return the strides of a tensor broadcast to a shape; contiguous if not recorded."""
    own = call.shapes[at]
    known = call.strides[at] if at < len(call.strides) and call.strides[at] else None
    if known is None:
        known = [1] * len(own)
        for axis in range(len(own) - 2, -1, -1):
            known[axis] = known[axis + 1] * own[axis + 1]
    padding = len(shape) - len(own)
    return [0] * padding + [0 if extent == 1 else stride for extent, stride in zip(own, known, strict=True)]


def _names(family: str) -> list[str]:
    return " ".join(families()[family].values()).split()


_FLAGS = frozenset(_names("comparison"))
_RANDOM = partial(_moved, variant="random", passes=1.0)

OPERATORS = careful(
    {
        **dict.fromkeys((*_names("elementwise"), *_names("comparison")), _elementwise),
        **dict.fromkeys(("fill_", "arange", "linspace", "eye"), _write),
        **dict.fromkeys((name for name in _names("written") if name not in ("fill_", "zero_")), _RANDOM),
        "randperm": _RANDOM,
        "native_dropout": partial(_moved, variant="random", passes=2.0, flags=1.0),
        "cat": _cat,
        "roll": partial(_moved, variant="rolled", passes=2.0),
    }
)
# These call one of the above, which a real GPU's trace has inside them. Used for captures without inner operators.
WHEN_ALONE = {name: OPERATORS.pop(name) for name in ("relu", "relu_", "square", "rsub", "clone", "copy")} | careful(
    {"zero_": _write}
)
