"""Gloo's copies from the host back to the card, each on its own stream and queued when `wait` returns.

A tensor freed while such a copy may still run is not reused before the copy is done. Nothing runs here, so the
duration is estimated as a number of further allocation requests: the bytes at PCIe speed, divided by the host's time
per request. A later collective that returned over the slower network implies that all earlier copies are done.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tonnage.virtual.recorded import RecordedDevice

_HOST_S_PER_REQUEST = 20e-6  # host time of an eager operator; an assumption (tens of microseconds are typical)


class CopiesBack:
    """A rank's copies that were queued and may still run."""

    def __init__(self, device: RecordedDevice) -> None:
        self._device = device
        self._bytes_per_request = device.gpu.pcie_bytes_per_s * _HOST_S_PER_REQUEST
        self._begun = 0
        self._done_at: dict[Copy, int] = {}  # the number of allocations by which a copy is done

    def begin(self, tensors: Sequence[torch.Tensor]) -> "Copy":
        """Announce copies to these tensors."""
        blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self._begun += 1
        return Copy(self, self._begun, self._device.begin_copy(tensors), sum(blocks.values()))

    def queue(self, copy: "Copy") -> None:
        """Start the copy of a collective that was waited for; those of earlier collectives are now done."""
        self._end([each for each in self._done_at if each.number < copy.number])
        requests = round(copy.size_bytes / self._bytes_per_request)
        self._done_at[copy] = len(self._device.allocations) + requests

        def end_the_done() -> None:
            made = len(self._device.allocations)
            self._end([each for each, done_at in self._done_at.items() if done_at <= made])
            if not self._done_at:
                self._device.on_request = None

        self._device.on_request = end_the_done

    def _end(self, copies: Sequence["Copy"]) -> None:
        for copy in copies:
            del self._done_at[copy]
            self._device.end_copy(copy.handle)


class Copy:
    """The copies of one collective. Call it when the collective has been waited for."""

    def __init__(self, copies: CopiesBack, number: int, handle: Any, size_bytes: int) -> None:
        self._copies, self.number, self.handle, self.size_bytes = copies, number, handle, size_bytes

    def __call__(self) -> None:
        self._copies.queue(self)
