"""The cards of this process, and the calling thread's current card and stream (stored natively)."""

import ctypes
from collections.abc import Sequence

import torch

from tonnage.virtual.device import Device

_OUT_OF_RANGE = (
    "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


class Cards:
    """All cards, by index."""

    def __init__(self, devices: Sequence[Device], library: ctypes.PyDLL) -> None:
        self.devices = tuple(devices)
        self.library = library

    def __len__(self) -> int:
        return len(self.devices)

    def at(self, index: int | None = None) -> Device:
        """Return a card; None and -1 mean the selected one."""
        if index is None or index < 0:
            return self.devices[self.selected]
        self.check(index)
        return self.devices[index]

    def check(self, index: int) -> None:
        """Raise CUDA's error for a card index that does not exist."""
        if not 0 <= index < len(self.devices):
            raise torch.AcceleratorError(_OUT_OF_RANGE)

    @property
    def selected(self) -> int:
        """The card that the calling thread has selected."""
        return self.library.tonnage_current_device()

    @selected.setter
    def selected(self, index: int) -> None:
        self.check(index)
        self.library.tonnage_set_device(index)

    def stream(self, index: int | None = None) -> int:
        """Return the id of a card's current stream."""
        return self.library.tonnage_current_stream(self.selected if index is None or index < 0 else index)

    def set_stream(self, index: int, stream: int) -> None:
        """Set the current stream of a card."""
        self.library.tonnage_set_stream(index, stream)
