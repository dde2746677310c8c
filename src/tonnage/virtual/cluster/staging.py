"""What a backend takes from the caching allocator for its own use, on the stream that it is called on.

NCCL reduces and gathers in place; only the forms that take a list of tensors go through a flat copy. Gloo moves tensors
of the card through host memory, gathers into a flat tensor of its own and reduces a copy of what it scatters.
"""

from collections.abc import Sequence
from typing import Any

import torch


class Nccl:
    """The library that CUDA tensors go through by default."""

    name = "nccl"
    copies_back = False  # whether results reach the card by copies from the host

    @staticmethod
    def gathers_single(output: torch.Tensor) -> Any:
        """Into the tensor itself."""
        return None

    @staticmethod
    def scatters_single(source: torch.Tensor) -> Any:
        """From the tensor itself."""
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

    name = "gloo"
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


def staging_of(backend: str) -> type[Nccl]:
    """By the backend's name, or by the one that a name like "cpu:gloo,cuda:nccl" gives to CUDA tensors."""
    pairs = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return Gloo if pairs.get("cuda", backend) == "gloo" else Nccl
