"""Gloo's copies from the host back to the card: each on a stream of its own, and queued when `wait` returns.

A tensor that is dropped while such a copy may still run is not reused before it is done. Nothing runs here, so how long
that takes is reckoned: the bytes at the speed of PCIe, in which the host makes so many further requests. A later
collective that came back over the network, which is slower, shows that all copies before it are done.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tonnage.virtual.recorded import RecordedDevice

_HOST_S_PER_REQUEST = 20e-6  # an eager operator's time on the host; assumed, tens of microseconds are usual


class CopiesBack:
    """The copies of one rank that were queued and may still run."""

    def __init__(self, device: RecordedDevice) -> None:
        self._device = device
        self._bytes_per_request = device.gpu.pcie_bytes_per_s * _HOST_S_PER_REQUEST
        self._begun = 0
        self._done_at: dict[Copy, int] = {}  # the number of allocations by which a copy is done

    def begin(self, tensors: Sequence[torch.Tensor]) -> "Copy":
        """These will be copied to."""
        blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self._begun += 1
        return Copy(self, self._begun, self._device.begin_copy(tensors), sum(blocks.values()))

    def queue(self, copy: "Copy") -> None:
        """Somebody waited for the collective: its copy is under way, and those of earlier ones are done."""
        self._end([each for each in self._done_at if each.number < copy.number])
        requests = round(copy.size_bytes / self._bytes_per_request)
        self._done_at[copy] = len(self._device.allocations) + requests

        def end_the_done() -> None:
            """Before a request, as PyTorch does: what is done by now."""
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
    """The copies of one collective. Called when somebody has waited for it."""

    def __init__(self, copies: CopiesBack, number: int, handle: Any, size_bytes: int) -> None:
        self._copies, self.number, self.handle, self.size_bytes = copies, number, handle, size_bytes

    def __call__(self) -> None:
        self._copies.queue(self)
