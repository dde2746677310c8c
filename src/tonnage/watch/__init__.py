"""Live memory of this machine's GPUs: samples over time, and an endpoint that serves the latest."""

from tonnage.watch.history import GpuSample, WatchHistory, moments

__all__ = ["GpuSample", "WatchHistory", "moments"]
