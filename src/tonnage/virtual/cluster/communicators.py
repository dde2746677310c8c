"""What NCCL holds on the card beside the caching allocator: the buffers of each connection of each communicator.

A model, the planner's own: a channel has buffers to and from a neighbour for three protocols. Gloo holds nothing.
"""

from collections.abc import Iterable

from tonnage.budget.overheads import NCCL_CONNECTION_BYTES, NCCL_CONNECTIONS
from tonnage.virtual.cluster.calls import Group
from tonnage.virtual.cluster.staging import staging_of


def communicator_bytes(groups: Iterable[Group]) -> dict[str, int]:
    """By communicator: a group that was used on the card by more than one rank."""
    used = [group for group in groups if len(group.ranks) > 1 and staging_of(group.backend).name == "nccl"]
    return {f"NCCL communicator {number}": NCCL_CONNECTION_BYTES * NCCL_CONNECTIONS for number, _ in enumerate(used, 1)}
