"""Copies between host and GPU, and within the GPU.

A call does not say on which side its tensors are. A trace names the copy ("Memcpy HtoD (Pinned -> Device)"); other
callers build the launch with `transfer`.
"""

from math import prod
from typing import Any, Literal

from tonnage.clock.kernels import elementwise
from tonnage.clock.kernels.figures import careful
from tonnage.clock.kernels.memory import figures
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware.gpu import Gpu

Direction = Literal["to_device", "to_host"]


def transfer(size_bytes: float, direction: Direction, *, pinned: bool) -> Launch:
    """Return a copy over the host link. Pageable memory is staged through a buffer, piece by piece."""
    variant = f"{direction}_{'pinned' if pinned else 'pageable'}"
    return Launch(kind="copy", name="copy_", moved_bytes=size_bytes, variant=variant)


def seconds(launch: Launch, gpu: Gpu) -> Any:
    """Return the device time of a copy: over the link at a share of its rate, or on the GPU."""
    link = figures()["link"].get(launch.variant)
    if link is None:
        return elementwise.seconds(launch, gpu)
    rate = max(gpu.pcie_bytes_per_s, gpu.c2c_bytes_per_s) if launch.variant.endswith("pinned") else gpu.pcie_bytes_per_s
    most = link.get("most_bytes_per_s", float("inf"))  # limit of the host's copy into its staging buffer
    return float(link["floor_s"] + launch.moved_bytes / min(link["share"] * rate, most))


def _copy(call: OperatorCall, settings: Settings) -> Launch | None:
    for kernel in call.kernels:
        if "HtoD" in kernel or "DtoH" in kernel:
            size = float(prod(call.shapes[0]) * call.element_bytes(0))
            return transfer(size, "to_device" if "HtoD" in kernel else "to_host", pinned="Pinned" in kernel)
    return elementwise.copy_on_card(call, settings)


OPERATORS = careful({"copy_": _copy})
