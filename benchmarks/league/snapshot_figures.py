"""The figures of public memory snapshots, and whether Tonnage reads each as an independent walk over its events does.

    python benchmarks/league/snapshot_figures.py FOLDER > benchmarks/league/figures/snapshots.csv

The files themselves are not kept here; `figures/snapshots.csv` says where each is from. The walk here uses the standard
library's unpickler, which may build nothing but plain data, and the state at the end: it goes through the events backwards.
"""

import csv
import hashlib
import pickle
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src")]

FIELDS = (
    "file", "sha256", "bytes", "events", "older_blocks", "older_bytes", "peak_requested", "peak_allocated", "peak_reserved",
    "replay_differences", "agrees",
)  # fmt: skip


class PlainData(pickle.Unpickler):
    """Refuses every class: a snapshot needs none."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not data")


def walked(snapshot: dict[str, Any]) -> tuple[int, int, int]:
    """Peaks of requested and of reserved bytes, and the bytes of blocks at the end, of the device with the most events."""
    device = max(range(len(snapshot["device_traces"])), key=lambda number: len(snapshot["device_traces"][number]))
    held = [segment for segment in snapshot["segments"] if segment["device"] == device]
    blocks = [b for s in held for b in s["blocks"] if b["state"] == "active_allocated"]
    requested, reserved = sum(b["requested_size"] for b in blocks), sum(s["total_size"] for s in held)
    peaks = [requested, reserved]
    trace = snapshot["device_traces"][device]
    freeing = "free_requested" if any(e["action"] == "free_requested" for e in trace) else "free_completed"
    for event in reversed(trace):
        sign = {"alloc": -1, freeing: 1}.get(event["action"], 0)
        requested += sign * event["size"]
        reserved += {"segment_alloc": -1, "segment_free": 1}.get(event["action"], 0) * event["size"]
        peaks = [max(peaks[0], requested), max(peaks[1], reserved)]
    return peaks[0], peaks[1], sum(b["size"] for b in blocks)


def figures_of(path: Path) -> dict[str, Any]:
    """One line of the table."""
    from tonnage.allocator.replay import replay
    from tonnage.recording.snapshot import read_traced

    with path.open("rb") as file:
        requested, reserved, at_end = walked(PlainData(file).load())
    traced = read_traced(path)
    recording, result = traced.recording, replay(traced.events, traced.settings, traced.start)
    changes = sorted(
        [(a.born, a.requested_bytes) for a in recording.allocations]
        + [(a.died, -a.requested_bytes) for a in recording.allocations if a.died is not None]
    )
    level = peak = 0
    for _, size in changes:
        level += size
        peak = max(peak, level)
    ours = peak, recording.peak_reserved_bytes, sum(a.block_bytes for a in recording.allocations if a.died is None)
    return {
        "file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16], "bytes": path.stat().st_size,
        "events": len(traced.events), "older_blocks": result.older_blocks, "older_bytes": result.older_bytes,
        "peak_requested": requested, "peak_allocated": recording.peak_allocated_bytes,
        "peak_reserved": recording.peak_reserved_bytes, "replay_differences": len(result.differences),
        "agrees": ours == (requested, reserved, at_end) and result.peak_allocated_bytes == recording.peak_allocated_bytes,
    }  # fmt: skip


def main() -> None:
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    writer.writeheader()
    for path in sorted(Path(sys.argv[1]).glob("*.pickle")):
        writer.writerow(figures_of(path))


if __name__ == "__main__":
    main()
