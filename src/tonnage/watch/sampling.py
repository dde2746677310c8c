"""Samples at an interval, until the caller stops iterating."""

import time
from collections.abc import Callable, Iterator

from tonnage.hardware.nvml import NvmlReader
from tonnage.watch.history import GpuSample


def moments(
    reader: NvmlReader,
    interval_s: float,
    *,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[GpuSample]:
    """Yield moments at an interval, from which the time for sampling and display is subtracted."""
    while True:
        start_s = now()
        yield GpuSample(start_s, reader.sample())
        sleep(max(0.0, start_s + interval_s - now()))
