"""Keeps the last memory events at all times, and writes them when the process runs out of memory.

    tonnage.record_on_oom("oom.tonnage")        # at the top of a training script

The error is raised as usual. Stacks are recorded but modules are not hooked, so the only cost is PyTorch's own
history.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tonnage.recorder.recorder import Recorder
from tonnage.recording.records import FailedRequest
from tonnage.recording.store import write_recording

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
