"""The latest samples of every GPU and process, and their peaks since the watch began."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tonnage.hardware.nvml import GpuMemory, NvmlReader

KEPT = 512
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class GpuSample:
    """Every GPU at one time, in seconds since 1970."""

    time_s: float
    gpus: tuple[GpuMemory, ...]


class Track:
    """The bytes of one GPU or process over time."""

    def __init__(self, kept: int) -> None:
        self.used_bytes: deque[int] = deque(maxlen=kept)
        self.peak_bytes = 0

    def add(self, used_bytes: int) -> None:
        """Add a sample."""
        self.used_bytes.append(used_bytes)
        self.peak_bytes = max(self.peak_bytes, used_bytes)


class WatchHistory:
    """The last `kept` moments of current GPUs and processes. Ended processes are dropped; the GPU's peak remains."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._gpus: dict[int, Track] = {}
        self._processes: dict[tuple[int, int], Track] = {}
        self.first_s = 0.0
        self.latest: GpuSample | None = None

    def add(self, moment: GpuSample) -> None:
        """Add a moment."""
        if self.latest is None:
            self.first_s = moment.time_s
        self.latest = moment
        seen = {(gpu.index, process.pid): process.used_bytes or 0 for gpu in moment.gpus for process in gpu.processes}
        self._update(self._gpus, ((gpu.index, gpu.used_bytes) for gpu in moment.gpus))
        self._update(self._processes, seen.items())
        for gone in self._processes.keys() - seen.keys():
            del self._processes[gone]

    def _update(self, tracks: dict[_Key, Track], samples: Iterable[tuple[_Key, int]]) -> None:
        for key, used_bytes in samples:
            tracks.setdefault(key, Track(self._kept)).add(used_bytes)

    def gpu(self, index: int) -> Track:
        """Return a GPU's track."""
        return self._gpus[index]

    def process(self, index: int, pid: int) -> Track:
        """Return the track of a process on a GPU."""
        return self._processes[index, pid]


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
