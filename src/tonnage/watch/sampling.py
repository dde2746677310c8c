"""Samples at an interval, until somebody stops asking."""

import time
from collections.abc import Callable, Iterator

from tonnage.hardware.nvml import NvmlReader
from tonnage.watch.history import Moment


def moments(
    reader: NvmlReader,
    interval_s: float,
    *,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Moment]:
    """One moment after the other, an interval apart: what sampling and showing take is taken off the wait."""
    while True:
        start_s = now()
        yield Moment(start_s, reader.sample())
        sleep(max(0.0, start_s + interval_s - now()))
