"""Records a script on the real GPU: PyTorch's memory history for events and stacks, hooks for what they are for.

The history is PyTorch's own and bounded; stacks are recorded for allocations only, with Python frames only. NVML is
polled for what the process holds outside PyTorch. The conversion is the same as for snapshots, but phases, steps, modules
and categories are not inferred (`recording.snapshot.phases` and `categories`): hooks write them to a log with times, and
PyTorch's events have times, too. Writing an entry costs a third of a microsecond. The log is bounded and drops its oldest
entries, like PyTorch's.
"""

import io
import os
import pickle
import sys
import threading
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tonnage.errors import MissingPart, TonnageError, UnknownGpu
from tonnage.hardware import find_gpu
from tonnage.hardware.nvml import open_nvml
from tonnage.ledger import Category
from tonnage.recording.recording import Recording
from tonnage.recording.records import BY_PHASE, Allocation, FailedRequest, Mark, MarkKind
from tonnage.recording.snapshot import recording_of
from tonnage.recording.snapshot.phases import CUBLAS_BYTES, Guide, Origin
from tonnage.recording.snapshot.schema import snapshot_of
from tonnage.recording.snapshot.stream import SnapshotLimits, Stream
from tonnage.recording.snapshot.unpickle import load
from tonnage.recording.store import write_recording
from tonnage.script.attribution import Attribution

if TYPE_CHECKING:
    from tonnage.script.running import Program

MOST_EVENTS = 1_000_000
LAST_EVENTS = 100_000
MOST_ENTRIES = 2_000_000
Kind = MarkKind | Literal["module", "category"]
_INTERVAL_S = 0.5  # between two NVML samples


class Entry(NamedTuple):
    """A change at `time_us` (wall clock): a phase or step began, another module ran, or blocks got a category."""

    time_us: float
    kind: Kind
    name: str = ""
    context: int = 0
    category: Category | None = None
    addresses: tuple[int, ...] = ()
    only: Category | None = None
    line: str = ""


class Log:
    """Receives events of the attribution; `held_line` is the line that called backward, while it runs."""

    def __init__(self, most_entries: int = MOST_ENTRIES) -> None:
        self.entries: deque[Entry] = deque(maxlen=most_entries)
        self.held_line = ""
        self._last: dict[Category, tuple[int, ...]] = {}

    def mark(self, kind: MarkKind, name: str) -> None:
        self.entries.append(Entry(_now_us(), kind, name, line=self.held_line if name == "backward" else ""))

    def at_module(self, context: int) -> None:
        self.entries.append(Entry(_now_us(), "module", context=context))

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None:
        found = tuple(addresses)
        last = self._last.get(category)
        if found == last:
            found = last  # steps repeat, so they share one tuple
        self._last[category] = found
        self.entries.append(Entry(_now_us(), "category", category=category, addresses=found, only=only))


def _now_us() -> float:
    return time.time_ns() / 1000


class LoggedPhases(Guide):
    """Follows the events; `phase` and `step` are the current ones, by the log."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        super().__init__("setup")
        self.modules: list[tuple[int, int]] = [(-1, 0)]
        self.found: list[tuple[int, Entry]] = []
        self._ahead = deque(entries)

    def reach(self, origin: Origin, time_us: int, sequence: int) -> None:
        """Process log entries from before the next event."""
        # Times of events are truncated to microseconds.
        while self._ahead and self._ahead[0].time_us < time_us + 1:
            self._take(self._ahead.popleft(), sequence)

    def finish(self, sequence: int) -> None:
        """Process the rest of the log after the last event."""
        while self._ahead:
            self._take(self._ahead.popleft(), sequence)

    def _take(self, entry: Entry, sequence: int) -> None:
        if entry.kind == "module":
            self.modules.append((sequence, entry.context))
        elif entry.kind == "category":
            self.found.append((sequence, entry))
        elif entry.kind == "step":
            self.step = int(entry.name)
            self.marks.append(Mark(sequence, "step", entry.name))
        else:
            self.phase = entry.name
            self.stack = (entry.line,) if entry.line else ()
            self.marks.append(Mark(sequence, "phase", entry.name))


def attribute(allocations: Sequence[Allocation], phases: LoggedPhases, contexts: Sequence[str]) -> None:
    """Set the module and category of every block."""
    starts = [sequence for sequence, _ in phases.modules]
    by_address: dict[int, list[Allocation]] = defaultdict(list)
    for allocation in allocations:
        context = phases.modules[bisect_right(starts, allocation.born) - 1][1]
        allocation.module = contexts[context] if allocation.phase != "backward" else ""
        allocation.category = BY_PHASE.get(allocation.phase, Category.OTHER)
        if allocation.died == allocation.born + 1:
            allocation.category = Category.WORKSPACE  # no event in between: inside one operator
        by_address[allocation.address].append(allocation)
    for sequence, entry in phases.found:
        for address in entry.addresses:
            # The block at this address that was live then; blocks are in order of birth.
            blocks = by_address.get(address, ())
            place = bisect_right(blocks, sequence - 1, key=lambda block: block.born) - 1
            block = blocks[place] if place >= 0 else None
            if block is None or (block.died is not None and block.died < sequence):
                continue
            if entry.category and (entry.only is None or block.category is entry.only):
                block.category = entry.category
    # cuBLAS's: the first block of its size in forward and in backward that was never freed.
    first: dict[str, Allocation] = {}
    for block in allocations:
        if block.died is None and block.requested_bytes in CUBLAS_BYTES and block.category is Category.ACTIVATIONS:
            first.setdefault(block.phase, block)
    for block in first.values():
        block.category = Category.WORKSPACE


class Outside:
    """Polls NVML between `start` and `stop` for memory that this process holds outside PyTorch, and that others hold."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.others_bytes = self.process_bytes = 0

    def start(self) -> None:

        def follow() -> None:
            with suppress(TonnageError), open_nvml() as nvml:
                while not self._ended.wait(_INTERVAL_S):
                    self._look(nvml.sample())

        self._thread = threading.Thread(target=follow, name="tonnage-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()

    def ask(self, reserved_bytes: int) -> tuple[int, dict[str, int]]:
        """Return the bytes that this process holds beyond PyTorch's reserved bytes, and the peak of other processes."""
        with suppress(TonnageError), open_nvml() as nvml:
            self._look(nvml.sample())
        others = {"other processes": self.others_bytes} if self.others_bytes else {}
        return max(0, self.process_bytes - reserved_bytes), others

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
        self._most_events, self._modules, self._device = most_events, modules, device
        self._unhook: Callable[[], None] = lambda: None
        self._started = 0.0
        self.outside = Outside(device)

    def start(self) -> None:
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
        torch = _torch_with_cuda()
        self.attribution.finish()
        self._unhook()
        recording = self.recording(**header)
        torch.cuda.memory._record_memory_history(None)
        self.outside.stop()
        return recording

    def recording(self, **header: Any) -> Recording:
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
    from tonnage.script.running import Program, run_as_main

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
            peaks = recording.peak_allocated_bytes, recording.peak_reserved_bytes
            recording.oom = FailedRequest("", requested_bytes, free_bytes, *peaks)
            if recording.allocations:
                last = recording.allocations[-1]
                recording.oom = replace(recording.oom, line=last.line, phase=last.phase, step=last.step)
        write_recording(target, recording, force=True)
        print(f"tonnage: out of memory; the last events are in {target} (tonnage explain {target})", file=sys.stderr)
    except Exception as error:
        print(f"tonnage: out of memory, and its recording could not be written: {error}", file=sys.stderr)
