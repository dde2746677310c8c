"""Measures the memory of a block of code, on the real GPU if there is one, else on a virtual one.

A meter is opened, code runs, and then it returns the peak and a recording.
"""

import ctypes
import gc
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tonnage.hardware import Gpu, find_cuda_gpu
from tonnage.recording import Recording

# A test with more events keeps only the last ones; its peak is still exact.
_EVENTS_KEPT = 1_000_000


def meter(card: str) -> "Meter":
    """Return a meter of the real GPU if there is one, else of a virtual card."""
    gpu = find_cuda_gpu(card)
    return CudaMeter() if gpu_is_there() else VirtualMeter(gpu)


def gpu_is_there() -> bool:
    """Whether torch has a GPU. Torch is not imported for that, because it must be loaded after the virtual GPU."""
    if "tonnage.virtual.driver.loading" in sys.modules and sys.modules["tonnage.virtual.driver.loading"].is_loaded():
        return False
    if "torch" in sys.modules:
        return bool(sys.modules["torch"].cuda.is_available())
    return _is_built_for_cuda() and _driver_has_devices()


def expect_virtual(gpu: Gpu) -> None:
    """Make a CUDA build of torch find the virtual card when it is imported, if there is no real one."""
    if "torch" in sys.modules or not _is_built_for_cuda() or _driver_has_devices():
        return
    from tonnage.virtual.driver import loading

    loading.prepare(gpu)


def _is_built_for_cuda() -> bool:
    spec = find_spec("torch")
    return bool(spec and spec.origin and (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists())


def _driver_has_devices() -> bool:
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


class VirtualMeter:
    """Measures on a virtual card, which exists only meanwhile."""

    def __init__(self, gpu: Gpu) -> None:
        from tonnage.virtual.builds import new_session

        self._session = new_session(gpu)

    def open(self) -> None:
        """Make `cuda` the virtual card, and start measuring."""
        self._session.open()

    def close(self) -> None:
        """Stop measuring, and remove the virtual card."""
        self._session.close()

    def peak_bytes(self) -> int:
        """Return the most bytes allocated, including a failed request."""
        peak = self._session.device.memory_stats()["allocated_bytes.all.peak"]
        asked = [oom.allocated_bytes + oom.requested_bytes for oom in self._session.device.ooms]
        return max(peak, *asked) if asked else peak

    def recording(self, error: BaseException | None = None) -> Recording:
        """Return the recording of the card; `error` is what ended the code, if anything."""
        session = self._session
        session.device.attribution.finish()
        ran_out = isinstance(error, session.torch.OutOfMemoryError)
        outcome = "ok" if error is None else "oom" if ran_out else "error"
        recording = session.recording(outcome=outcome, error="" if error is None else str(error))
        if ran_out and session.device.ooms:
            recording.oom = session.device.ooms[-1]
        return recording


class CudaMeter:
    """Measures on the real GPU, with PyTorch's own counters and memory history."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._before_bytes: list[int] = []

    def open(self) -> None:
        """Reset peaks and history, and start measuring."""
        gc.collect()
        cuda = self._torch.cuda
        cuda.init()  # counters of an unused card cannot be reset
        for index in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(index)
            self._before_bytes.append(cuda.memory_allocated(index))
        cuda.memory._record_memory_history("all", max_entries=_EVENTS_KEPT, clear_history=True)

    def close(self) -> None:
        """Stop measuring."""
        self._torch.cuda.memory._record_memory_history(None)

    def peak_bytes(self) -> int:
        """Return the most bytes allocated, beyond those before, on the GPU whose memory grew most."""
        return self._grown_bytes(self._busiest())

    def _grown_bytes(self, index: int) -> int:
        return int(self._torch.cuda.max_memory_allocated(index)) - self._before_bytes[index]

    def _busiest(self) -> int:
        return max(range(len(self._before_bytes)), key=self._grown_bytes)

    def recording(self, error: BaseException | None = None) -> Recording:
        """Return the recording of the GPU whose memory grew most."""
        from tonnage.recording.snapshot import read_snapshot

        index = self._busiest()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot.pickle"
            self._torch.cuda.memory._dump_snapshot(str(path))
            recording = read_snapshot(path, device=index)
        card = self._torch.cuda.get_device_properties(index)
        header = recording.header
        header.gpu_name, header.capacity_bytes, header.source = card.name, card.total_memory, "cuda"
        header.torch_modelled = header.torch_installed = self._torch.__version__
        return recording


Meter = VirtualMeter | CudaMeter
