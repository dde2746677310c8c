"""A file as a recording, whoever wrote it: ours, or a memory snapshot of PyTorch."""

from pathlib import Path

from tonnage.recording.recording import Recording
from tonnage.recording.store import read_recording


def open_recording(path: Path) -> Recording:
    """Read a file by what is in it, not by its name."""
    # Loaded where it is used: a recording of ours does not need it.
    from tonnage.recording.snapshot import is_snapshot, read_snapshot

    return read_snapshot(path) if is_snapshot(path) else read_recording(path)
