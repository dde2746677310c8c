"""A cluster's run as one file: a summary of every rank that ran, and the events of each distinct one.

Ranks are written and read one at a time, so that a file takes no more memory than its largest rank. `open_recording`
opens any supported file: ours, of one GPU or of a cluster, or a memory snapshot of PyTorch.
"""

import json
import sqlite3
from dataclasses import asdict, fields, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tonnage.errors import BadRecording
from tonnage.recording.checks import record_of
from tonnage.recording.cluster import ClusterRecording, ClusterSummary, RankSummary, WholeModel
from tonnage.recording.layout import CLUSTER_LAYOUT_VERSION, is_of_cluster, opened, written
from tonnage.recording.recording import Recording
from tonnage.recording.store import Contexts, decoded, insert_contexts, insert_run, read_recording

_MOST_RANKS = 1_000_000  # the largest supported cluster


def write_cluster(path: Path, cluster: ClusterRecording, *, force: bool = False) -> None:
    """Write the file atomically; raise OutputExists if it exists, unless `force`."""
    summary = cluster.summary
    with written(path, CLUSTER_LAYOUT_VERSION, force=force) as database:
        contexts: Contexts = {}
        kept: dict[int, RankSummary] = {}
        for rank in summary.ranks:
            recording = cluster.recording_of(rank.rank)
            like = next((other for other in kept if _same(cluster, kept[other], rank, recording)), rank.rank)
            if like == rank.rank:
                kept[like] = rank
                insert_run(database, recording, contexts, (rank.rank,))
            values = asdict(rank) | {"stands_for": _spans(rank.stands_for)}
            database.execute("INSERT INTO rank VALUES (?, ?, ?)", (rank.rank, like, json.dumps(values)))
        insert_contexts(database, contexts)
        values = {field.name: getattr(summary, field.name) for field in fields(summary) if field.name != "ranks"}
        rows = ((key, json.dumps(value)) for key, value in values.items())
        database.executemany("INSERT INTO cluster VALUES (?, ?)", rows)


def read_cluster(path: Path) -> ClusterRecording | None:
    """Read what `write_cluster` wrote; return None for a recording of one GPU."""
    with opened(path) as (database, version):
        if not is_of_cluster(version):
            return None
        # A report asks several questions about one rank before it moves to the next.
        return ClusterRecording(_summary(database), lru_cache(maxsize=1)(partial(read_recording, path)))


def _same(cluster: ClusterRecording, other: RankSummary, rank: RankSummary, recording: Recording) -> bool:
    """Whether a rank did exactly the same as a stored one. Most that differ already do in their summary."""
    # Python's own memory differs slightly between processes.
    names = ("rank", "stands_for", "host_bytes", "host_mapped_bytes", "host_parts")
    own = {name: getattr(rank, name) for name in names}
    if replace(other, **own) != rank:
        return False
    before = cluster.recording_of(other.rank)
    header = replace(recording.header, wall_seconds=before.header.wall_seconds)
    return replace(recording, header=header, host=before.host) == before


def _spans(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first and last rank of each contiguous range, so that a thousand ranks take a few numbers."""
    ordered = sorted(ranks)
    gaps = [(before, after) for before, after in pairwise(ordered) if after != before + 1]
    starts, ends = [*ordered[:1], *(after for _, after in gaps)], [*(before for before, _ in gaps), *ordered[-1:]]
    return list(zip(starts, ends, strict=True))


def _summary(database: sqlite3.Connection) -> ClusterSummary:
    def ranks(rows: list[tuple[int, str]]) -> tuple[RankSummary, ...]:
        if not 1 <= values["gpus"] <= _MOST_RANKS:
            raise ValueError(f"it says to be of {values['gpus']} GPUs")
        return tuple(_rank(number, decoded(text), values["gpus"]) for number, text in rows)

    values = {key: decoded(value) for key, value in database.execute("SELECT key, value FROM cluster")}
    values["ranks"] = database.execute("SELECT rank, summary FROM rank ORDER BY rank").fetchall()
    summary = record_of(ClusterSummary, values, "summary", ranks=ranks)
    for key in ("worst", "dies_first"):
        if getattr(summary, key) not in {rank.rank for rank in summary.ranks} | {None}:
            raise ValueError(f"its {key} is rank {values[key]}, which did not run")
    return summary


def _rank(number: int, values: dict[str, Any], gpus: int) -> RankSummary:
    def ranks_of(spans: list[Any]) -> tuple[int, ...]:
        spans = [(int(first), int(last)) for first, last in spans]
        count = sum(last - first + 1 for first, last in spans)
        if any(not 0 <= first <= last < gpus for first, last in spans) or not 1 <= count <= gpus:
            raise ValueError(f"its rank {number} stands for ranks that there are not")
        return tuple(rank for first, last in spans for rank in range(first, last + 1))

    def whole_model(values: Any) -> WholeModel:
        return record_of(WholeModel, values, f"whole model of rank {number}")

    absent: dict[str, Any] = {"step_time_s": None, "host_bytes": 0, "host_mapped_bytes": 0, "host_parts": {}}
    values = absent | {"whole_model": asdict(WholeModel())} | values  # which older files lack
    what = f"summary of rank {number}"
    summary = record_of(RankSummary, values, what, stands_for=ranks_of, whole_model=whole_model)
    if summary.rank != number:
        raise ValueError(f"its summary of rank {number} is that of {summary.rank}")
    return summary


# Files of any kind


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
