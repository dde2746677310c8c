"""`torch.cuda` of the virtual card, on a build of PyTorch without CUDA.

PyTorch's own Python (torch/cuda/*.py) runs unchanged: such a build only lacks functions and classes of `torch._C`,
which are supplied here, on top of the allocator and the native library. Only what PyTorch looked up at import is
replaced in its modules.

| module       | supplies                                                                       |
|--------------|--------------------------------------------------------------------------------|
| `devices`    | count, selection, initialisation, generators, versions                         |
| `properties` | what `get_device_properties` returns                                           |
| `memory`     | statistics, limits, settings, raw allocations, host memory                     |
| `history`    | `_record_memory_history`, snapshots                                            |
| `streams`    | streams and events                                                             |
| `graphs`     | CUDA graphs and memory pools                                                   |
| `tensors`    | storages, legacy constructors, scatter and gather                              |
| `runtime`    | cudart, NVTX, cuDNN                                                            |
| `nvml`       | pynvml, if it is installed                                                     |
| `forks`      | restrictions in forked child processes                                         |
| `unmodelled` | errors for what is not supported                                               |
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
    from tonnage.virtual.cuda import (
        devices,
        forks,
        graphs,
        history,
        memory,
        nvml,
        runtime,
        streams,
        tensors,
        unmodelled,
    )
    from tonnage.virtual.cuda.cards import Cards
    from tonnage.virtual.cuda.patches import Patches

    cards, patches = Cards((device,) * count, library), Patches()
    try:
        for part in (unmodelled, forks, devices, memory, history, streams, graphs, tensors, runtime, nvml):
            part.install(cards, patches)
    except BaseException:
        patches.undo()
        raise
    return patches.undo
