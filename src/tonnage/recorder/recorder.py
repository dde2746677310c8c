"""Records a script on the real GPU: PyTorch's memory history for events and stacks, hooks for what they are for.

The history is PyTorch's own and bounded; stacks are recorded for allocations only, with Python frames only. NVML is
polled for what the process holds outside PyTorch. The conversion is the same as for snapshots.
"""

import io
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import MissingPart, TonnageError, UnknownGpu
from tonnage.hardware import find_gpu
from tonnage.hardware.nvml import open_nvml
from tonnage.recorder.watched import Log, LoggedPhases, attribute
from tonnage.recording.recording import Recording
from tonnage.recording.snapshot import recording_of
from tonnage.recording.snapshot.schema import snapshot_of
from tonnage.recording.snapshot.stream import SnapshotLimits, Stream
from tonnage.recording.snapshot.unpickle import load
from tonnage.script.attribution import Attribution

if TYPE_CHECKING:
    from tonnage.script.program import Program
import sys

from tonnage.recording.records import FailedRequest
from tonnage.recording.store import write_recording

MOST_EVENTS = 1_000_000
_INTERVAL_S = 0.5  # between two NVML samples


class Outside:
    """Polls NVML between `start` and `stop` for memory that this process holds outside PyTorch, and that others hold."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.others_bytes = 0
        self.process_bytes = 0

    def start(self) -> None:
        """Start polling."""
        self._thread = threading.Thread(target=self._follow, name="tonnage-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop polling."""
        self._ended.set()
        if self._thread:
            self._thread.join()

    def ask(self, reserved_bytes: int) -> tuple[int, dict[str, int]]:
        """Return the bytes that this process holds beyond PyTorch's reserved bytes, and the peak of other processes."""
        try:
            with open_nvml() as nvml:
                self._look(nvml.sample())
        except TonnageError:
            pass
        others = {"other processes": self.others_bytes} if self.others_bytes else {}
        return max(0, self.process_bytes - reserved_bytes), others

    def _follow(self) -> None:
        try:
            with open_nvml() as nvml:
                while not self._ended.wait(_INTERVAL_S):
                    self._look(nvml.sample())
        except TonnageError:
            return

    def _look(self, gpus: tuple[object, ...]) -> None:
        gpu = gpus[self._device]
        held = {process.pid: process.used_bytes or 0 for process in gpu.processes}  # type: ignore[attr-defined]
        self.process_bytes = held.pop(os.getpid(), 0)
        self.others_bytes = max(self.others_bytes, sum(held.values()))


class Recorder:
    """Records everything on one device between `start` and `stop`.

    `modules=False` leaves out hooks on modules: that costs almost nothing, but blocks have no module.
    """

    def __init__(self, *, most_events: int = MOST_EVENTS, modules: bool = True, device: int = 0) -> None:
        self.log = Log()
        self.attribution = Attribution(self.log, frugal=not modules)
        self._most_events = most_events
        self._modules = modules
        self._device = device
        self._unhook: Callable[[], None] = lambda: None
        self._started = 0.0
        self.outside = Outside(device)

    def start(self) -> None:
        """Start recording."""
        torch = _torch_with_cuda()
        from tonnage.script.hooks import install_hooks

        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(self._device)
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=self._most_events, clear_history=True
        )
        self._unhook = install_hooks(self.attribution, modules=self._modules)
        if self._modules:
            self.outside.start()
        self._started = time.perf_counter()

    def stop(self, **header: Any) -> Recording:
        """Stop recording and return the recording."""
        torch = _torch_with_cuda()
        self.attribution.finish()
        self._unhook()
        recording = self.recording(**header)
        torch.cuda.memory._record_memory_history(None)
        self.outside.stop()
        return recording

    def recording(self, **header: Any) -> Recording:
        """Return the recording so far."""
        torch = _torch_with_cuda()
        torch.cuda.synchronize(self._device)
        # Through a pickle, which the snapshot reader turns into compact columns.
        limits = SnapshotLimits()
        pickled = pickle.dumps(torch.cuda.memory._snapshot(self._device), protocol=4)
        snapshot = snapshot_of(load(Stream(io.BytesIO(pickled), limits), limits), limits)
        phases = LoggedPhases(self.log.entries)
        recording = recording_of(snapshot, self._device, phases)
        phases.finish(1 + max((a.died or a.born for a in recording.allocations), default=0))
        attribute(recording.allocations, phases, self.attribution.contexts)
        # The card and the run, for the header.
        name, key = torch.cuda.get_device_name(self._device), ""
        with suppress(UnknownGpu):
            key = find_gpu(name).key
        capacity_bytes = torch.cuda.get_device_properties(self._device).total_memory
        overhead_bytes, others = self.outside.ask(torch.cuda.memory_reserved(self._device))
        recording.header = replace(
            recording.header,
            gpu=key,
            gpu_name=name,
            capacity_bytes=capacity_bytes,
            torch_modelled=torch.__version__.split("+")[0],
            torch_installed=torch.__version__,
            source="cuda",
            settings=os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
            wall_seconds=time.perf_counter() - self._started,
            overhead_bytes=overhead_bytes,
            overhead_parts={"context and libraries": overhead_bytes, **others},
            training=dict(self.attribution.training),
            **header,
        )
        return recording


def record_script(script: "Program | Path", arguments: list[str], *, most_events: int = MOST_EVENTS) -> Recording:
    """Run the script to its end, however it ends, and return the recording."""
    from tonnage.script.program import Program
    from tonnage.script.running import run_as_main

    program = script if isinstance(script, Program) else Program.of_file(script)
    torch = _torch_with_cuda()
    recorder = Recorder(most_events=most_events)
    recorder.start()
    ending = run_as_main(program, arguments, torch)
    return recorder.stop(
        outcome=ending.outcome, **program.header, arguments=tuple(arguments), exit_status=ending.exit_status,
        error=ending.error,
    )  # fmt: skip


def _torch_with_cuda() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingPart("Recording needs torch.", hint="Install it: pip install torch") from None
    if not torch.cuda.is_available():
        raise MissingPart(
            "There is no CUDA GPU here to record on.",
            hint="Predict instead: tonnage run --gpu h200 SCRIPT runs the same script on a GPU that is not there.",
        )
    return torch


LAST_EVENTS = 100_000


def record_on_oom(path: str | Path, *, last_events: int = LAST_EVENTS) -> Callable[[], None]:
    """Keep the last events and write them to `path` at the first out-of-memory error. The returned function stops it."""
    recorder = Recorder(most_events=last_events, modules=False)
    recorder.start()
    import torch  # after the check that it is installed

    target, written = Path(path), False

    def observe(device: int, requested: int, total: int, free: int) -> None:
        nonlocal written
        if not written:
            written = True
            _write(recorder, target, requested, free)

    torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]

    def stop() -> None:
        nonlocal written
        written = True
        recorder.stop()

    return stop


def _write(recorder: Recorder, target: Path, requested_bytes: int, free_bytes: int) -> None:
    """Write the recording. A failure here must not hide the original error."""
    try:
        recording = recorder.recording(outcome="oom", script=sys.argv[0], arguments=tuple(sys.argv[1:]), exit_status=1)
        if recording.oom is None:
            last = recording.allocations[-1] if recording.allocations else None
            peaks = recording.peak_allocated_bytes, recording.peak_reserved_bytes
            recording.oom = FailedRequest(last.line if last else "", requested_bytes, free_bytes, *peaks)
            if last:
                recording.oom = replace(recording.oom, phase=last.phase, step=last.step)
        write_recording(target, recording, force=True)
        print(f"tonnage: out of memory; the last events are in {target} (tonnage explain {target})", file=sys.stderr)
    except Exception as error:
        print(f"tonnage: out of memory, and its recording could not be written: {error}", file=sys.stderr)
