"""Opens any supported file as a recording: ours, of one GPU or of a cluster, or a memory snapshot of PyTorch."""

import json
from pathlib import Path

from tonnage.errors import BadRecording
from tonnage.recording.cluster import ClusterRecording
from tonnage.recording.cluster_store import read_cluster
from tonnage.recording.layout import is_of_cluster, opened
from tonnage.recording.recording import Recording
from tonnage.recording.store import read_recording


def open_recording(path: Path, rank: int | None = None) -> Recording:
    """Read a file by its contents, not by its name; for a cluster, one rank (None: the worst)."""
    # Imported late: our own recordings do not need it.
    from tonnage.recording.snapshot import is_snapshot, read_snapshot

    if not is_snapshot(path):
        return read_recording(path, rank)
    if rank is not None:
        raise BadRecording(f"{path} is a snapshot of one process, not of rank {rank}.", hint="Leave out the rank.")
    return read_snapshot(path)


def open_cluster(path: Path) -> ClusterRecording | None:
    """Return all ranks of a cluster's file, or None if the file is of one GPU."""
    from tonnage.recording.snapshot import is_snapshot

    return None if is_snapshot(path) else read_cluster(path)


def ended_in_error(path: Path) -> bool:
    """Whether a file is our recording of a run that failed with an error other than running out of memory."""
    try:
        with opened(path) as (database, version):
            table = "cluster" if is_of_cluster(version) else "header"
            row = database.execute(f"SELECT value FROM {table} WHERE key = 'outcome'").fetchone()
            return row is not None and json.loads(row[0]) == "error"
    except BadRecording:
        return False
