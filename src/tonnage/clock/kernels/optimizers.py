"""Updates of tensor lists: fused and foreach optimizers, and the inf check of scaled gradients.

PyTorch cuts tensors into chunks, a block each, and packs a few hundred of them into one kernel. A kernel lasts as long
as its longest block, so a list of many medium tensors takes longer than its bytes suggest.
"""

import re
from math import ceil, prod
from typing import Any

import numpy as np

from tonnage.clock.kernels import memory
from tonnage.clock.kernels.elementwise import list_bytes
from tonnage.clock.kernels.figures import careful
from tonnage.clock.kernels.memory import cycle_seconds, families, figures, launch, memory_seconds, slowest
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware.gpu import Gpu

_DIVIDES = re.compile("div|sqrt|reciprocal|pow")  # a division or root per element
_CHUNK = 65536
_MOST_BLOCKS = 320
_MOST_TENSORS = (110, 64, 48, 36, 30)  # per kernel, by the number of lists it walks


def packed(sizes: list[int], lists: int) -> tuple[int, int]:
    """Return kernels and chunks for tensors of these sizes."""
    most_tensors = _MOST_TENSORS[min(lists, len(_MOST_TENSORS)) - 1]
    kernels = blocks = tensors = chunks = 0
    for size in sizes:
        tensors += 1
        own = ceil(size / _CHUNK)
        chunks += own
        filled, blocks = divmod(blocks + own, _MOST_BLOCKS)
        kernels += filled
        if filled:
            tensors = 1 if blocks else 0
        if tensors == most_tensors and blocks:
            kernels, blocks, tensors = kernels + 1, 0, 0
    return kernels + (1 if blocks else 0), chunks


def seconds(launch: Launch, gpu: Gpu) -> Any:
    """Return the device time of all kernels of one call: `shape` is (elements, chunks, the longest chunk)."""
    if launch.variant == "vector":
        return memory.seconds(launch, gpu)
    elements, chunks, longest = launch.shape
    form = figures()["optimizer"][launch.variant]
    busy = np.minimum(1.0, chunks / np.maximum(1, launch.kernels) / gpu.sm_count)
    return launch.kernels * form["floor_s"] + slowest(
        memory_seconds(launch.moved_bytes, form["share"], gpu),
        cycle_seconds(form["element"] * elements / gpu.sm_count / np.maximum(busy, 1e-9), gpu),
        cycle_seconds(form["serial"] * longest * launch.kernels, gpu),
    )


def _lists(call: OperatorCall, settings: Settings) -> Launch | None:
    sizes = [prod(shape) for shape in call.shapes[0] if not isinstance(shape, int)]
    elements = sum(sizes)
    if not elements:
        return None
    # Steps are a separate list of scalars, which a kernel does not walk.
    lists = sum(shapes == call.shapes[0] for shapes in call.shapes)
    each, passes = list_bytes(call, 0), families()["lists_moved"].get(call.name, lists + 1)
    kernels, chunks = packed(sizes, lists)
    family = "fused" if call.name.startswith("_fused") else "divided" if _DIVIDES.search(call.name) else "foreach"
    return Launch(
        kind="optimizer", name=call.name, shape=(elements, chunks, min(_CHUNK, max(sizes))),
        precision="bf16" if each < 4 else "fp32", moved_bytes=float(passes * elements * each),
        operations=float(passes * elements), variant=f"{family}_{'narrow' if each < 4 else 'wide'}", kernels=kernels,
    )  # fmt: skip


def _scale(call: OperatorCall, settings: Settings) -> Launch | None:
    """Read _amp_update_scale_: a few numbers."""
    return launch("optimizer", call, moved=16.0, elements=1, variant="vector")


OPERATORS = careful({**dict.fromkeys(families()["lists_of"]["names"].split(), _lists), "_amp_update_scale_": _scale})
