"""Measures the memory of a block of code, on the real GPU if there is one, else on a virtual one, and holds it to a limit.

A meter is opened, code runs, and then it returns the peak and a recording. Independent of pytest.
"""

import ctypes
import gc
import linecache
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tonnage.explain import advise
from tonnage.hardware import Gpu, find_cuda_gpu
from tonnage.recording import Recording
from tonnage.recording.replay import demand
from tonnage.report.runs.terminal import largest, ledger
from tonnage.units import GIB, MIB, format_bytes
from tonnage.virtual.driver import loading

# A test with more events keeps only the last ones; its peak is still exact.
_EVENTS_KEPT = 1_000_000


def meter(card: str) -> "Meter":
    """Return a meter of the real GPU if torch has one, else of a virtual card.

    Torch is not imported to find out, because it must be loaded after the virtual GPU.
    """
    gpu = find_cuda_gpu(card)
    if loading.is_loaded():
        return VirtualMeter(gpu)
    if "torch" in sys.modules:
        has_gpu = sys.modules["torch"].cuda.is_available()
    else:
        has_gpu = _is_built_for_cuda() and _driver_has_devices()
    return CudaMeter() if has_gpu else VirtualMeter(gpu)


def expect_virtual(gpu: Gpu) -> None:
    """Make a CUDA build of torch find the virtual card when it is imported, if there is no real one."""
    if "torch" in sys.modules or not _is_built_for_cuda() or _driver_has_devices():
        return
    loading.prepare(gpu)


def _is_built_for_cuda() -> bool:
    return find_spec("torch") is not None and loading.is_cuda_build(loading.torch_root())


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
        from tonnage.virtual.redirect import Redirection

        self._session = new_session(gpu)
        self.redirection = Redirection()

    def open(self) -> None:
        self._session.open()
        self.redirection.begin()

    def close(self) -> None:
        self.redirection.end()
        self._session.close()

    def peak_bytes(self) -> int:
        """Return the most bytes allocated, including a failed request."""
        device = self._session.device
        asked = [oom.allocated_bytes + oom.requested_bytes for oom in device.ooms]
        return max([device.memory_stats()["allocated_bytes.all.peak"], *asked])

    def dependence(self, error: BaseException) -> str:
        """Return on which value that a virtual GPU does not have an error depends; "" if on none."""
        return self._session.stand_ins.told_of(error)

    def recording(self, error: BaseException | None = None) -> Recording:
        """Return the recording of the card; `error` is what ended the code, if anything."""
        session = self._session
        session.device.attribution.finish()
        ran_out = isinstance(error, session.torch.OutOfMemoryError)
        depends = "" if error is None or ran_out else session.stand_ins.explain(error)
        outcome = "ok" if error is None else "oom" if ran_out else "depends" if depends else "error"
        recording = session.recording(outcome=outcome, error=depends or ("" if error is None else str(error)))
        recording.dependence = session.stand_ins.dependence if depends else None
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
        self._torch.cuda.memory._record_memory_history(None)

    def peak_bytes(self) -> int:
        """Return the most bytes allocated, beyond those before, on the GPU whose memory grew most."""
        return self._grown_bytes(self._busiest())

    def _grown_bytes(self, index: int) -> int:
        return int(self._torch.cuda.max_memory_allocated(index)) - self._before_bytes[index]

    def _busiest(self) -> int:
        return max(range(len(self._before_bytes)), key=self._grown_bytes)

    def dependence(self, error: BaseException) -> str:
        """Return "": a real GPU has all values."""
        return ""

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


@dataclass(frozen=True)
class MemoryGate:
    """A test's meter, opened before its fixtures and closed after them, and its limit, checked in between."""

    meter: Meter
    limit_bytes: int
    script: Path

    def words(self, error: BaseException | None = None) -> str:
        """Return the report: needed bytes, limit, the largest terms, the line, and one change."""
        recording = self.meter.recording(error)
        recording.header.script = str(self.script)
        return "\n".join(_words(recording, self.meter.peak_bytes(), self.limit_bytes))


def _words(recording: Recording, needed_bytes: int, limit_bytes: int) -> Iterator[str]:
    excess_bytes = needed_bytes - limit_bytes
    unit = "GiB" if limit_bytes >= GIB // 4 else "MiB"
    needed, limit = format_bytes(needed_bytes, unit), format_bytes(limit_bytes, unit)
    least = "at least " if recording.oom else ""
    yield f"GPU memory: needed {least}{needed}, limit {limit}: {format_bytes(max(0, excess_bytes), unit)} too much"
    # The phase and line of the peak or, if the test died, of the failed request.
    header, at = recording.header, recording.oom or recording.peak_allocation
    if at is None:
        yield "  nothing was allocated"
    else:
        name, _, number = at.line.rpartition(":")
        is_own = name == Path(header.script).name and number.isdigit()
        source = linecache.getline(header.script, int(number)).strip() if is_own else ""
        where = f"{f' in {at.phase}' if at.phase else ''}{f' at {at.line}' if at.line else ''}"
        yield f"  {'out of memory' if recording.oom else 'peak'}{where}  {source}".rstrip()
    kind = "virtual" if header.source == "virtual" else "measured"
    yield f"  on {header.gpu_name}, {format_bytes(header.capacity_bytes, 'GiB')}, {kind}"
    yield ""
    whole = demand(recording)
    for section in (ledger(whole), largest(whole)):
        yield from (line.plain for line in section)
        yield ""
    # The change that is enough, else the one that saves most, and the limit that would be needed.
    fixes = advise(recording).fixes
    # Of those that are enough, the first is the one that `advise` ranks best.
    largest_fix = max(fixes, key=lambda fix: fix.saves_bytes, default=None)
    fix = next((fix for fix in fixes if fix.saves_bytes >= excess_bytes), largest_fix)
    if fix:
        saves = f"saves {format_bytes(fix.saves_bytes, unit)}, costs {fix.costs}"
        enough = "" if fix.saves_bytes >= excess_bytes else " (not enough alone)"
        yield f"  to save memory: {fix.change}: {saves}{enough}"
        yield f"    {fix.how}"
    # A limit that a person would write: tenths of a GiB, whole MiB.
    limit = f"{-(-needed_bytes * 10 // GIB) / 10} GiB" if unit == "GiB" else f"{-(-needed_bytes // MIB)} MiB"
    yield f'  if it is meant to need this much: limit="{limit}"'
