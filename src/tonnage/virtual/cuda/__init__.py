"""`torch.cuda` of the virtual card, on a build of PyTorch without CUDA.

PyTorch's own Python (torch/cuda/*.py) runs unchanged: such a build only lacks functions and classes of `torch._C`,
which each module here supplies under their own names, on top of the allocator and the native library. Only what
PyTorch looked up at import is replaced in its modules.
"""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.virtual.device import Device

__all__ = ["install"]


def install(device: "Device", library: ctypes.PyDLL, count: int = 1) -> Callable[[], None]:
    """Make `torch.cuda` report `count` of this card; the returned function restores everything."""
    # Imported late: these import torch, which must come after the native library.
    import torch

    from tonnage.virtual.cuda import devices, history, memory, runtime, streams, tensors
    from tonnage.virtual.cuda.cards import Cards, constants, refusals
    from tonnage.virtual.cuda.patches import Patches

    cards, patches = Cards(device, count, library), Patches()
    try:
        patches.set_all(torch._C, refusals() | constants("torch._C"))
        for part in (devices, memory, history, streams, tensors, runtime):
            part.install(cards, patches)
    except BaseException:
        patches.undo()
        raise
    return patches.undo
