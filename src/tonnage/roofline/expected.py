"""What the clock expects of an item on the card: the time of its kernels where they are as quick as this card runs such."""

from math import isfinite
from typing import get_args

from tonnage.clock import kernels
from tonnage.clock.kernels import copies
from tonnage.clock.settings import Settings
from tonnage.hardware import Gpu
from tonnage.roofline.items import Item


def expected_s(item: Item, gpu: Gpu) -> float | None:
    """Seconds of all calls; None where the source does not say what was called, or the clock does not know it."""
    try:
        found = _copied_s(item, gpu) if item.link else _called_s(item, gpu)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None  # a trace may hold any numbers
    return found if found is not None and isfinite(found) and found > 0 else None


def _called_s(item: Item, gpu: Gpu) -> float | None:
    total_s = 0.0
    for call, count in item.made:
        # Kernels say in their names what they compute in.
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
