"""The temporary tensors that a backend takes from the caching allocator, on the calling stream.

NCCL reduces and gathers in place; only the list variants go through a flat copy. Gloo moves tensors through host
memory, gathers into a flat tensor and reduces a copy of what it scatters.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tonnage.budget.overheads import NCCL_CONNECTION_BYTES, NCCL_CONNECTIONS
from tonnage.virtual.cluster.calls import ProcessGroup


class Nccl:
    """NCCL, the default backend for CUDA tensors."""

    copies_back = False  # whether results reach the card by copies from the host

    @staticmethod
    def gathers_single(output: torch.Tensor) -> Any:
        return None

    @staticmethod
    def scatters_single(source: torch.Tensor) -> Any:
        return None

    @staticmethod
    def flattens(tensors: Sequence[torch.Tensor]) -> Any:
        """Return a flat tensor for a list of equal tensors; unequal ones are sent one by one."""
        first = tensors[0]
        if any((tensor.shape, tensor.dtype) != (first.shape, first.dtype) for tensor in tensors):
            return None
        return torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=first.device)

    @staticmethod
    def barrier() -> Any:
        """Return the tensor of the barrier's all-reduce."""
        return torch.empty(1, device="cuda")


class Gloo(Nccl):
    """Gloo, which communicates over sockets."""

    copies_back = True

    @staticmethod
    def gathers_single(output: torch.Tensor) -> Any:
        """Return the flat tensor that the result is copied from."""
        return torch.empty_like(output)

    @staticmethod
    def scatters_single(source: torch.Tensor) -> Any:
        """Return the copy that is reduced; the rank's part is taken from it."""
        return source.clone()

    @staticmethod
    def barrier() -> Any:
        """Return None: nothing is allocated on the card."""
        return None


def communicator_bytes(groups: Iterable[ProcessGroup]) -> dict[str, int]:
    """Return the bytes NCCL holds outside the allocator by communicator, as the planner models it; Gloo holds none."""
    used = [group for group in groups if len(group.ranks) > 1 and staging_of(group.backend) is Nccl]
    return {f"NCCL communicator {number}": NCCL_CONNECTION_BYTES * NCCL_CONNECTIONS for number, _ in enumerate(used, 1)}


def staging_of(backend: str) -> type[Nccl]:
    """Return the backend of CUDA tensors, also for names like "cpu:gloo,cuda:nccl"."""
    pairs = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return Gloo if pairs.get("cuda", backend) == "gloo" else Nccl
