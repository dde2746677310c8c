"""The time that the clock expects for an item's kernels on this GPU."""

from math import isfinite
from typing import get_args

from tonnage.clock import kernels
from tonnage.clock.kernels import copies
from tonnage.clock.settings import Settings
from tonnage.hardware import Gpu
from tonnage.roofline.items import Item


def expected_s(item: Item, gpu: Gpu) -> float | None:
    """Return the seconds of all calls; None if the calls are not recorded or the clock does not know them."""
    try:
        found = _copied_s(item, gpu) if item.link else _called_s(item, gpu)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None  # a trace may hold any numbers
    return found if found is not None and isfinite(found) and found > 0 else None


def _called_s(item: Item, gpu: Gpu) -> float | None:
    total_s = 0.0
    for call, count in item.made:
        # Kernel names tell what they compute in.
        settings = Settings(tf32_matmul=any("tf32" in kernel for kernel in call.kernels))
        launch = kernels.launch_of(call, settings)
        if launch is None:
            return None
        total_s += count * float(kernels.seconds(launch, gpu))
    return total_s


def _copied_s(item: Item, gpu: Gpu) -> float | None:
    if not item.work.moved_bytes:
        return None
    direction = get_args(copies.Direction)["DtoH" in item.link]
    each = copies.transfer(item.work.moved_bytes / item.calls, direction, pinned="Pinned" in item.link)
    return item.calls * float(kernels.seconds(each, gpu))
