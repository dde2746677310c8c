"""Reads PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot(FILE)`) without executing the pickle."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tonnage.allocator import read_trace
from tonnage.errors import BadSnapshot
from tonnage.garbage import no_collection
from tonnage.recording.recording import Recording
from tonnage.recording.snapshot.convert import recording_of
from tonnage.recording.snapshot.limits import SnapshotLimits
from tonnage.recording.snapshot.schema import Snapshot, snapshot_of
from tonnage.recording.snapshot.stream import Stream, opening
from tonnage.recording.snapshot.traced import Traced, snapshot_of_events, traced_of
from tonnage.recording.snapshot.unpickle import load
from tonnage.untrusted import open_file

__all__ = ["Limits", "Traced", "is_snapshot", "read_snapshot", "read_traced"]

_PICKLE_MAGIC = 0x80


def is_snapshot(path: Path) -> bool:
    """Whether a file starts like a pickle, gzipped or not, whatever its name."""
    return opening(path, 1)[:1] == bytes([_PICKLE_MAGIC])


def read_snapshot(path: Path, *, device: int | None = None, limits: SnapshotLimits | None = None) -> Recording:
    """Read one device's events as a recording (None: the busiest device's); raise BadSnapshot with the reason."""
    with _named(path), no_collection():
        return recording_of(_read(path, limits or SnapshotLimits()), device)


def read_traced(path: Path) -> Traced:
    """Read the busiest device's events for `tonnage.allocator.replay`, from a snapshot or a JSON trace."""
    if not is_snapshot(path):
        return traced_of(snapshot_of_events(read_trace(path)))
    with _named(path), no_collection():
        return traced_of(_read(path, SnapshotLimits()))


def _read(path: Path, limits: SnapshotLimits) -> Snapshot:
    with open_file(path) as file:
        return snapshot_of(load(Stream(file, limits), limits), limits)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except BadSnapshot as error:
        raise BadSnapshot(f"{path} is not a snapshot that can be read: {error}") from None
    except MemoryError:
        raise BadSnapshot(f"{path} cannot be read: it takes more memory than there is.") from None
    except OSError as error:
        raise BadSnapshot(f"{path} cannot be read: {error.strerror}.") from None
