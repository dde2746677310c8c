"""Records a script on the real GPU: PyTorch's memory history for events and stacks, hooks for what they are for.

The history is PyTorch's own and bounded; stacks are taken at allocations only, of Python alone. NVML is asked now and then
for what the process holds beside PyTorch. The conversion is that of snapshots: an event is an event.
"""

import io
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import MissingPart, UnknownGpu
from tonnage.hardware import find_gpu
from tonnage.recording.cuda.log import Log
from tonnage.recording.cuda.outside import Outside
from tonnage.recording.cuda.watched import LoggedPhases, attribute
from tonnage.recording.recording import Recording
from tonnage.recording.snapshot.convert import recording_of
from tonnage.recording.snapshot.limits import Limits
from tonnage.recording.snapshot.schema import snapshot_of
from tonnage.recording.snapshot.stream import Stream
from tonnage.recording.snapshot.unpickle import load
from tonnage.script.attribution import Attribution

if TYPE_CHECKING:
    from tonnage.script.program import Program

MOST_EVENTS = 1_000_000


class Recorder:
    """Between `start` and `stop` everything on one device is recorded.

    `modules=False` leaves out the hooks on modules: it costs next to nothing then, and blocks have no module.
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
        """Record from here on."""
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
        """Record no longer; what was recorded."""
        torch = _torch_with_cuda()
        self.attribution.finish()
        self._unhook()
        recording = self.recording(**header)
        torch.cuda.memory._record_memory_history(None)
        self.outside.stop()
        return recording

    def recording(self, **header: Any) -> Recording:
        """What was recorded so far."""
        torch = _torch_with_cuda()
        torch.cuda.synchronize(self._device)
        snapshot = _as_snapshot(torch.cuda.memory._snapshot(self._device))
        phases = LoggedPhases(self.log.entries)
        recording = recording_of(snapshot, self._device, phases)
        phases.finish(1 + max((a.died or a.born for a in recording.allocations), default=0))
        attribute(recording.allocations, phases, self.attribution.contexts)
        self._describe(recording, torch, header)
        return recording

    def _describe(self, recording: Recording, torch: Any, header: dict[str, Any]) -> None:
        name = torch.cuda.get_device_name(self._device)
        capacity_bytes = torch.cuda.get_device_properties(self._device).total_memory
        overhead_bytes, others = self.outside.ask(torch.cuda.memory_reserved(self._device))
        recording.header = replace(
            recording.header,
            gpu=_key_of(name),
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


def record_script(script: "Program | Path", arguments: list[str], *, most_events: int = MOST_EVENTS) -> Recording:
    """Run the script to its end, whatever that is, and return what was recorded."""
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


def _as_snapshot(snapshot: dict[str, Any]) -> Any:
    """By way of a pickle, which the reader of snapshots turns into compact columns."""
    limits = Limits()
    return snapshot_of(load(Stream(io.BytesIO(pickle.dumps(snapshot, protocol=4)), limits), limits), limits)


def _key_of(name: str) -> str:
    try:
        return find_gpu(name).key
    except UnknownGpu:
        return ""


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
