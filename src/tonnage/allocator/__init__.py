"""PyTorch's CUDA caching allocator in pure Python: no torch, no GPU."""

from tonnage.allocator.adopt import LiveBlock, Segment, State
from tonnage.allocator.blocks import Block
from tonnage.allocator.caching import CachingAllocator
from tonnage.allocator.oom import OutOfMemory, Shortage
from tonnage.allocator.replay import ReplayResult, read_trace, replay
from tonnage.allocator.settings import AllocatorSettings, BadAllocatorSettings

__all__ = [
    "AllocatorSettings",
    "BadAllocatorSettings",
    "Block",
    "CachingAllocator",
    "LiveBlock",
    "OutOfMemory",
    "ReplayResult",
    "Segment",
    "Shortage",
    "State",
    "read_trace",
    "replay",
]
