"""PyTorch's CUDA caching allocator in pure Python: no torch, no GPU."""

from tonnage.allocator.caching import CachingAllocator
from tonnage.allocator.oom import OutOfMemory, Shortage
from tonnage.allocator.settings import AllocatorSettings, BadAllocatorSettings

__all__ = ["AllocatorSettings", "BadAllocatorSettings", "CachingAllocator", "OutOfMemory", "Shortage"]
