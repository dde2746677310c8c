"""The model of memory-bound kernels, and the fallback for unknown operators.

A kernel starts, then does three things at once: it moves bytes (from memory, or from the L2 cache if they fit), issues
instructions on every SM, and waits for its longest block. The slowest decides. A form's figures are in
`data/memory.toml`, fitted by `tools/fit_clock_memory.py`; a launch names its forms in `variant`, several joined by "+".
"""

from functools import cache, partial
from math import ceil, inf, log2, prod
from typing import Any

import numpy as np

from tonnage.clock import facts
from tonnage.clock.kernels.figures import measured
from tonnage.clock.launch import Kind, Launch, Settings
from tonnage.clock.operators import OperatorCall, silent
from tonnage.hardware.gpu import Gpu

_INDEXED_BYTES = 2**31  # by 32-bit offsets; a larger tensor is processed in halves
SECTOR_BYTES = 32  # smallest read of a GPU
_SHARPNESS = 6.0  # exponent of the smooth maximum


# Every form's seconds, shares of peak rates and cycles of one SM; and operators by family, as in `operators`.
figures, families = partial(facts, "memory"), partial(facts, "operators")


@cache
def precision_of(type_name: str) -> str:
    """Return the precision of an element type, as a launch spells it."""
    return {"c10::BFloat16": "bf16", "c10::Half": "fp16", "double": "fp64"}.get(type_name, "fp32")


def launch(
    kind: Kind, call: OperatorCall, *, moved: float, elements: int, variant: str, blocks: int = 0,
    accesses: float = 0.0, kernels: int = 0,
) -> Launch:  # fmt: skip
    """Return a launch with `shape` (elements, blocks) and the elements that threads access as `operations`."""
    return Launch(
        kind=kind, name=call.name, shape=(elements, blocks),
        precision=precision_of(call.types[0]) if call.types else "fp32", moved_bytes=moved, operations=accesses,
        variant=variant, kernels=kernels or variant.count("+") + 1,
    )  # fmt: skip


def pieces(largest_bytes: float) -> int:
    """Return how many kernels one call is split into, so that offsets fit 32 bits."""
    return 1 if largest_bytes <= _INDEXED_BYTES else 2 ** ceil(log2(largest_bytes / _INDEXED_BYTES))


def seconds(launch: Launch, gpu: Gpu) -> Any:
    """Return the device time of a launch whose variant names forms of the data file."""
    elements, blocks = launch.shape
    forms = launch.variant.split("+")
    more_s: Any = max(0, launch.kernels - len(forms)) * figures()["common"]["kernel_s"]
    spent_s: Any = 0
    for form in map(figures().__getitem__, forms):
        issued = form.get("element", 0.0) * elements + form.get("access", 0.0) * launch.operations
        issued = issued + form.get("block", 0.0) * blocks
        serial = form.get("serial", 0.0)
        if "serial_miss" in form:
            serial += form["serial_miss"] * (1.0 - held_share(launch.moved_bytes, gpu))
        alone = serial * elements / blocks if serial and np.any(blocks) else 0.0
        moved_s = memory_seconds(launch.moved_bytes * form.get("passes", 1.0), form.get("share", 1.0), gpu)
        busy_s, alone_s = cycle_seconds(issued / gpu.sm_count, gpu), cycle_seconds(alone, gpu)
        spent_s = spent_s + form["floor_s"] + slowest(moved_s, busy_s, alone_s)
    return spent_s + more_s


def memory_seconds(moved: Any, share: float, gpu: Gpu) -> Any:
    """Return the seconds to move bytes at a share of memory bandwidth; the part still in L2 moves at its rate."""
    l2_rate = figures()["common"]["l2_share"] * gpu.sm_count * gpu.clock_mhz * 1e6 * gpu.l2_bytes_per_clock_per_sm
    # An SM has as many bytes in flight as on the measured GPU.
    card = measured()
    under_way = card.bandwidth_bytes_per_s / card.sm_count * gpu.sm_count / gpu.bandwidth_bytes_per_s
    most: float = figures()["common"]["most_of_bandwidth"]
    reached = min(max(share, most), share * under_way)
    cold = 1.0 / (reached * gpu.bandwidth_bytes_per_s)
    hot = min(cold, 1.0 / l2_rate) if l2_rate > 0 else cold
    held = held_share(moved, gpu)
    return moved * (held * hot + (1.0 - held) * cold)


def held_share(moved: Any, gpu: Gpu) -> Any:
    """Return the share of its bytes that a kernel finds in L2: other kernels may have evicted them."""
    common = figures()["common"]
    full = moved / (common["resident"] * gpu.l2_bytes) if gpu.l2_bytes else inf
    return common["kept"] / (1.0 + full**3)


def cycle_seconds(cycles: Any, gpu: Gpu) -> Any:
    """Convert SM cycles to seconds."""
    return cycles / (gpu.clock_mhz * 1e6)


def slowest(*parts: Any) -> Any:
    """Return a smooth maximum: parts of equal length slow each other down a little."""
    return sum(part**_SHARPNESS for part in parts) ** (1.0 / _SHARPNESS)


def fallback(call: OperatorCall, settings: Settings) -> Launch | None:
    """Count an unknown operator with tensors as elementwise; None for those that launch nothing themselves."""
    if call.name in silent():
        return None
    tensors = [at for at in call.tensors() if call.shapes[at]]
    if not tensors or all(isinstance(extent, tuple) for at in tensors for extent in call.shapes[at]):
        return None
    elements = max(prod(call.shapes[at]) for at in tensors)
    moved = sum(map(call.tensor_bytes, tensors)) + elements * call.element_bytes(tensors[0])
    accesses = float(elements * (len(tensors) + 1))
    return launch("elementwise", call, moved=moved, elements=elements, accesses=accesses, variant="vector")
