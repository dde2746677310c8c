"""One rank of a virtual cluster, as its groups use it: the connection to its peers, and its card."""

from collections import Counter
from collections.abc import Sequence

import torch

from tonnage.virtual.cluster.calls import Payload, ProcessGroup
from tonnage.virtual.cluster.copies import CopiesBack
from tonnage.virtual.cluster.exchange import Exchange
from tonnage.virtual.cluster.staging import communicator_bytes
from tonnage.virtual.cluster.work import CollectiveNotes
from tonnage.virtual.session import Session

_MOST_ON_CARD = 1 << 20  # elements: the virtual GPU keeps no larger integer tensors
_MOST_ON_HOST_BYTES = 1 << 24


class Member:
    """State that all groups of a rank share."""

    def __init__(self, rank: int, world: int, session: Session, exchange: Exchange) -> None:
        self.rank = rank
        self.world = world
        self.exchange = exchange
        self._session = session
        self._copies: Counter[tuple[int, ...]] = Counter()
        self._roles = 0
        self.communicators: list[ProcessGroup] = []
        self.calls = 0
        self.copies_back = CopiesBack(session.device)
        self.notes = CollectiveNotes()

    def group_made(self, ranks: Sequence[int], backend: str) -> ProcessGroup | None:
        """Register a group; return None if this rank is not in it."""
        key = tuple(ranks)
        self.exchange.made(key)
        copy, self._copies[key] = self._copies[key], self._copies[key] + 1
        if self.rank not in key:
            return None
        self._roles += 1
        return ProcessGroup(key, copy, self._roles - 1, backend)

    @property
    def has_groups(self) -> bool:
        """Whether the rank is in any group."""
        return self._roles > 0

    def line(self) -> str:
        """Return the script's current line."""
        return self._session.device.attribution.line()

    def uses_card(self, group: ProcessGroup) -> int:
        """Count a call on the card and return the current stream's id. A group's first call creates its communicator."""
        self.calls += 1
        if group not in self.communicators:
            self.communicators.append(group)
            self._session.device.hold(communicator_bytes(self.communicators))
        return torch.cuda.current_stream().stream_id

    def waits_for_device(self) -> None:
        """Synchronize the host with the card."""
        self._session.device.synchronize()

    def travels(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the values of such tensors are exchanged. The answer is the same on all ranks."""
        for tensor in tensors:
            if tensor.is_cuda:
                if tensor.numel() > _MOST_ON_CARD or tensor.is_floating_point() or tensor.is_complex():
                    return False
            elif tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > _MOST_ON_HOST_BYTES:
                return False
        return True

    def values_of(self, tensors: Sequence[torch.Tensor]) -> Payload:
        """Return copies on the host, or None if a value is unknown."""
        if not all(not tensor.is_cuda or self._session.is_known(tensor) for tensor in tensors):
            return None
        return [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Mark the values on the card as unknown."""
        for tensor in tensors:
            if tensor.is_cuda:
                self._session.forget(tensor)
