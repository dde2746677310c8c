import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nvml_fake import GIB
from tonnage.errors import MissingPart, RequestError
from tonnage.hardware.nvml import GpuMemory, ProcessMemory
from tonnage.watch import GpuSample, WatchHistory
from tonnage.watch.history import serve


def gpu(used_bytes: int, *processes: ProcessMemory) -> GpuMemory:
    return GpuMemory(0, "NVIDIA H200", "GPU-1", 140 * GIB, used_bytes, GIB, 75, processes)


def scrape(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {f.name: [(s.labels, s.value) for s in f.samples] for f in families}


def test_a_scrape_finds_the_latest_sample() -> None:
    history = WatchHistory()
    with serve(history, 0) as port:
        assert scrape(port)["tonnage_gpu_memory_used_bytes"] == []
        history.add(
            GpuSample(1.0, (gpu(5 * GIB, ProcessMemory(7, 'py"thon\n', 4 * GIB), ProcessMemory(8, "?", None)),))
        )
        found = scrape(port)
        card = {"gpu": "0", "uuid": "GPU-1", "name": "NVIDIA H200"}
        assert found["tonnage_gpu_memory_used_bytes"] == [(card, 5 * GIB)]
        assert found["tonnage_gpu_memory_total_bytes"] == [(card, 140 * GIB)]
        assert found["tonnage_gpu_memory_reserved_bytes"] == [(card, GIB)]
        assert found["tonnage_gpu_memory_free_bytes"] == [(card, 134 * GIB)]
        assert found["tonnage_gpu_busy_ratio"] == [(card, 0.75)]
        process = {"gpu": "0", "pid": "7", "process": 'py"thon\n'}
        assert found["tonnage_process_gpu_memory_used_bytes"] == [(process, 4 * GIB)]
        history.add(GpuSample(2.0, (gpu(GIB),)))
        assert scrape(port)["tonnage_process_gpu_memory_used_bytes"] == []


def test_it_stops_serving() -> None:
    with serve(WatchHistory(), 0) as port:
        pass
    with pytest.raises(OSError):
        scrape(port)


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_cannot_be_is_said_in_words(port: int) -> None:
    with pytest.raises(RequestError, match=f"port {port}"), serve(WatchHistory(), port):
        pass


def test_a_port_that_is_taken_is_said_in_words() -> None:
    with serve(WatchHistory(), 0) as port, pytest.raises(RequestError, match="in use"), serve(WatchHistory(), port):
        pass


def test_a_missing_library_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingPart, match="prometheus-client"), serve(WatchHistory(), 0):
        pass
