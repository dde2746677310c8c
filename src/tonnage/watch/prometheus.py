"""The latest moment as Prometheus metrics at `http://…:PORT/metrics`.

A scrape returns the last sample and does not query the driver. A process's metrics end with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tonnage.errors import MissingPart, RequestError
from tonnage.watch.history import WatchHistory

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_GPU = ("gpu", "uuid", "name")
_PROCESS = ("gpu", "pid", "process")
_MEMORY = {
    "total_bytes": "Memory of the GPU.",
    "used_bytes": "Memory in use.",
    "reserved_bytes": "Memory that the driver keeps for itself.",
    "free_bytes": "Memory to be had.",
}


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
