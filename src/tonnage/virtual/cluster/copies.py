"""Gloo's copies from the host back to the card: each on a stream of its own, and queued when `wait` returns.

A tensor that is dropped while such a copy may still run is not reused before it is done. Nothing runs here, so how long
that takes is reckoned: the bytes at the speed of PCIe, in which the host makes so many further requests. A later
collective that came back over the network, which is slower, shows that all copies before it are done.
"""

from collections.abc import Sequence
from itertools import count

import torch

from tonnage.allocator.blocks import Block
from tonnage.virtual.device import Device

_FIRST_STREAM = 1 << 40  # no script's stream has such a number
_HOST_S_PER_REQUEST = 20e-6  # an eager operator's time on the host; assumed, tens of microseconds are usual


class CopiesBack:
    """The copies of one rank that were queued and may still run."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bytes_per_request = device.gpu.pcie_bytes_per_s * _HOST_S_PER_REQUEST
        self._streams = count(_FIRST_STREAM)
        self._done_at: dict[int, int] = {}  # by stream, the number of allocations by which its copy is done

    def begin(self, tensors: Sequence[torch.Tensor]) -> "Copy":
        """These will be copied to."""
        blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        copy = Copy(self, next(self._streams), sum(blocks.values()))
        for address, size in blocks.items():
            if size:
                self._device.record_stream(address, copy.stream)
        return copy

    def queue(self, copy: "Copy") -> None:
        """Somebody waited for the collective: its copy is under way, and those of earlier ones are done."""
        self._retire([stream for stream in self._done_at if stream < copy.stream])
        requests = round(copy.size_bytes / self._bytes_per_request)
        self._done_at[copy.stream] = len(self._device.allocations) + requests
        self._device.allocator.malloc = self._malloc  # type: ignore[method-assign]

    def _malloc(self, size: int, stream: int = 0) -> Block:
        """Before a request, as PyTorch does: what is done by now."""
        made = len(self._device.allocations)
        self._retire([stream for stream, done_at in self._done_at.items() if done_at <= made])
        allocator = self._device.allocator
        if not self._done_at:
            del allocator.malloc
        return type(allocator).malloc(allocator, size, stream)

    def _retire(self, streams: Sequence[int]) -> None:
        for stream in streams:
            del self._done_at[stream]
            self._device.allocator.retire_stream(stream)


class Copy:
    """The copies of one collective. Called when somebody has waited for it."""

    def __init__(self, copies: CopiesBack, stream: int, size_bytes: int) -> None:
        self._copies, self.stream, self.size_bytes = copies, stream, size_bytes

    def __call__(self) -> None:
        """The copy is queued."""
        self._copies.queue(self)
