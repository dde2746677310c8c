"""The latest samples of every GPU and process, their peaks since the watch began, and a Prometheus endpoint for them.

A scrape returns the last sample and does not query the driver. A process's metrics end with it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.errors import MissingPart, RequestError
from tonnage.hardware.nvml import GpuMemory, NvmlReader

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

KEPT = 512
_GPU = ("gpu", "uuid", "name")
_PROCESS = ("gpu", "pid", "process")
_MEMORY = {
    "total_bytes": "Memory of the GPU.",
    "used_bytes": "Memory in use.",
    "reserved_bytes": "Memory that the driver keeps for itself.",
    "free_bytes": "Memory to be had.",
}


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
        self.used_bytes.append(used_bytes)
        self.peak_bytes = max(self.peak_bytes, used_bytes)


class WatchHistory:
    """The last `kept` moments of current GPUs and processes. Ended processes are dropped; the GPU's peak remains."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._tracks: dict[tuple[int, int | None], Track] = {}  # of a process on a GPU; of the whole GPU: None
        self.first_s = 0.0
        self.latest: GpuSample | None = None

    def add(self, moment: GpuSample) -> None:
        if self.latest is None:
            self.first_s = moment.time_s
        self.latest = moment
        used: dict[tuple[int, int | None], int] = {}
        for gpu in moment.gpus:
            used[gpu.index, None] = gpu.used_bytes
            used |= {(gpu.index, process.pid): process.used_bytes or 0 for process in gpu.processes}
        for key, used_bytes in used.items():
            self._tracks.setdefault(key, Track(self._kept)).add(used_bytes)
        self._tracks = {key: track for key, track in self._tracks.items() if key in used or key[1] is None}

    def gpu(self, index: int) -> Track:
        return self._tracks[index, None]

    def process(self, index: int, pid: int) -> Track:
        return self._tracks[index, pid]


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


@contextmanager
def serve(history: WatchHistory, port: int) -> Iterator[int]:
    """Serve a history while the block runs. Yields the port, a free one if 0 was given."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        hint = "Install it: pip install 'tonnage[watch]'"
        raise MissingPart("--prometheus needs prometheus-client.", hint=hint) from None
    registry = CollectorRegistry()
    registry.register(_Collector(history))
    try:
        server, thread = start_http_server(port, registry=registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"Cannot serve on port {port}: {reason}.", hint="Choose another port.") from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Collector:
    def __init__(self, history: WatchHistory) -> None:
        self._history = history

    def collect(self) -> "Iterator[Metric]":
        """Yield every current metric."""
        from prometheus_client.core import GaugeMetricFamily

        gpus = self._history.latest.gpus if self._history.latest else ()
        families = {
            key: GaugeMetricFamily(f"tonnage_gpu_memory_{key}", meaning, labels=_GPU)
            for key, meaning in _MEMORY.items()
        }
        busy = GaugeMetricFamily("tonnage_gpu_busy_ratio", "Share of time in which a kernel ran.", labels=_GPU)
        process_used = GaugeMetricFamily(
            "tonnage_process_gpu_memory_used_bytes", "Memory that a process uses on a GPU.", labels=_PROCESS
        )
        for gpu in gpus:
            labels = [str(gpu.index), gpu.uuid, gpu.name]
            for key, family in families.items():
                family.add_metric(labels, getattr(gpu, key))
            if gpu.busy_percent is not None:
                busy.add_metric(labels, gpu.busy_percent / 100)
            for process in gpu.processes:
                if process.used_bytes is not None:
                    process_used.add_metric([str(gpu.index), str(process.pid), process.name], process.used_bytes)
        yield from (*families.values(), busy, process_used)
