"""Describe segments and blocks as `torch.cuda.memory._snapshot()` does."""

from collections.abc import Iterable
from typing import Any

from tonnage.allocator.blocks import ALLOCATED, PENDING, UNMAPPED, Block

_STATES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free"}


def describe_segments(blocks: Iterable[Block], device: int) -> list[dict[str, Any]]:
    """Return one entry per segment, and per run of mapped pages of an expandable one, by address."""
    heads = (block for block in blocks if block.previous is None or block.previous.state == UNMAPPED)
    return sorted((_segment(head, device) for head in heads), key=lambda segment: segment["address"])


def _segment(head: Block, device: int) -> dict[str, Any]:
    blocks = []
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        blocks.append(block)
        block = block.next
    active = [block for block in blocks if block.state in _STATES]
    return {
        "device": device,
        "address": head.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in blocks if block.state == ALLOCATED),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested_bytes for block in active),
        "stream": head.stream,
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": head.pool.owner.id if head.pool.owner else (0, 0),
        "is_expandable": head.segment is not None,
        "frames": [],
        "blocks": [_block(block) for block in blocks],
    }


def _block(block: Block) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested_bytes,
        "state": _STATES.get(block.state, "inactive"),
        "frames": [],
    }
