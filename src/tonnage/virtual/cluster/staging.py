"""What a backend takes from the caching allocator for its own use, on the stream that it is called on.

NCCL reduces and gathers in place; only the forms that take a list of tensors go through a flat copy. Gloo moves tensors
of the card through host memory, gathers into a flat tensor of its own and reduces a copy of what it scatters.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tonnage.budget.overheads import NCCL_CONNECTION_BYTES, NCCL_CONNECTIONS
from tonnage.virtual.cluster.calls import Group


class Nccl:
    """The library that CUDA tensors go through by default."""

    copies_back = False  # whether results reach the card by copies from the host

    @staticmethod
    def gathers_single(output: torch.Tensor) -> Any:
        return None

    @staticmethod
    def scatters_single(source: torch.Tensor) -> Any:
        return None

    @staticmethod
    def flattens(tensors: Sequence[torch.Tensor]) -> Any:
        """A list of equal tensors is one flat tensor while it travels; unequal ones are sent one by one."""
        first = tensors[0]
        if any((tensor.shape, tensor.dtype) != (first.shape, first.dtype) for tensor in tensors):
            return None
        return torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=first.device)

    @staticmethod
    def barrier() -> Any:
        """A number on the card, which everybody adds up."""
        return torch.empty(1, device="cuda")


class Gloo(Nccl):
    """Sockets between hosts."""

    copies_back = True

    @staticmethod
    def gathers_single(output: torch.Tensor) -> Any:
        """A flat tensor, copied from afterwards."""
        return torch.empty_like(output)

    @staticmethod
    def scatters_single(source: torch.Tensor) -> Any:
        """Everything is reduced in a copy, and the rank's own part is taken from it."""
        return source.clone()

    @staticmethod
    def barrier() -> Any:
        """Nothing on the card."""
        return None


def communicator_bytes(groups: Iterable[Group]) -> dict[str, int]:
    """What NCCL holds beside the allocator, by communicator: a group that was used on the card by more than one rank.

    A model, the planner's own: a channel has buffers to and from a neighbour for three protocols. Gloo holds nothing.
    """
    used = [group for group in groups if len(group.ranks) > 1 and staging_of(group.backend) is Nccl]
    return {f"NCCL communicator {number}": NCCL_CONNECTION_BYTES * NCCL_CONNECTIONS for number, _ in enumerate(used, 1)}


def staging_of(backend: str) -> type[Nccl]:
    """By the backend's name, or by the one that a name like "cpu:gloo,cuda:nccl" gives to CUDA tensors."""
    pairs = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return Gloo if pairs.get("cuda", backend) == "gloo" else Nccl
