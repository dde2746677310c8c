"""Kernels that torch.compile made: their arguments are what they read and write.

Their names tell their form (`triton_poi_…` pointwise, `triton_red_…` and `triton_per_…` reductions) and the operators
they were fused from, so that expensive ones cost what they cost alone.
"""

from math import prod
from typing import Any

from tonnage.clock.kernels.figures import Reader
from tonnage.clock.kernels.memory import cycle_seconds, figures, launch, memory_seconds, slowest
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware.gpu import Gpu

PREFIX = "triton_"


def fused(call: OperatorCall, settings: Settings) -> Launch | None:
    """Return a launch for a kernel call; tensors larger than the results are tables, read in part."""
    tensors = [at for at in call.tensors() if call.shapes[at]]
    if not call.name.startswith(PREFIX) or not tensors:
        return None
    counts = {at: prod(call.shapes[at]) for at in tensors}
    reads_table = any(word in call.name for word in ("embedding", "gather", "nll_loss_forward"))
    table = max(tensors, key=counts.__getitem__) if reads_table else -1
    most = max((count for at, count in counts.items() if at != table), default=counts[tensors[0]])
    moved = sum(min(call.tensor_bytes(at), float(most * call.element_bytes(at))) for at in tensors)
    variant = "fused_rows" if call.name.startswith(("triton_red_", "triton_per_")) else "fused"
    accesses = float(sum(min(count, most) for count in counts.values()))
    elements = min(most, max(counts.values()))
    return launch("fused", call, moved=moved, elements=elements, accesses=accesses, variant=variant)


def seconds(launch: Launch, gpu: Gpu) -> Any:
    """Return the device time: bytes, or the arithmetic of the operators in its name."""
    form, costs = figures()[launch.variant], figures()["arithmetic"]["fused"]
    words = set(launch.name.split("_"))
    arithmetic = sum(cost for name, cost in costs.items() if name in words)
    cycles = arithmetic * launch.shape[0] + form["access"] * launch.operations
    moved_s = memory_seconds(launch.moved_bytes, form["share"], gpu)
    return form["floor_s"] + slowest(moved_s, cycle_seconds(cycles / gpu.sm_count, gpu))


# Names differ by program: lookups try `fused` for those with the prefix.
OPERATORS: dict[str, Reader] = {}
