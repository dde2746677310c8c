"""A cluster's run as one file: a summary of every rank that ran, and the events of each distinct one.

Ranks are written and read one at a time, so that a file takes no more memory than its largest rank.
"""

import json
import sqlite3
from dataclasses import asdict, fields, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tonnage.ledger import Category
from tonnage.recording.checks import (
    Kinds,
    check_values,
    is_count,
    is_outcome,
    is_seconds,
    is_sizes,
    is_word_list,
    is_words,
)
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
    values = {key: decoded(value) for key, value in database.execute("SELECT key, value FROM cluster")}
    check_values(values, _CLUSTER_KINDS, "summary")
    if not 1 <= values["gpus"] <= _MOST_RANKS:
        raise ValueError(f"it says to be of {values['gpus']} GPUs")
    rows = database.execute("SELECT rank, summary FROM rank ORDER BY rank")
    ranks = tuple(_rank(number, decoded(text), values["gpus"]) for number, text in rows)
    known = {rank.rank for rank in ranks}
    for key in ("worst", "dies_first"):
        if values[key] not in known | {None}:
            raise ValueError(f"its {key} is rank {values[key]}, which did not run")
    return ClusterSummary(**values | {"arguments": tuple(values["arguments"]), "ranks": ranks})


def _rank(number: int, values: dict[str, Any], gpus: int) -> RankSummary:
    absent: dict[str, Any] = {"step_time_s": None, "host_bytes": 0, "host_mapped_bytes": 0, "host_parts": {}}
    values = absent | {"whole_model": asdict(WholeModel())} | values  # which older files lack
    check_values(values, _RANK_KINDS, f"summary of rank {number}")
    if values["rank"] != number:
        raise ValueError(f"its summary of rank {number} is that of {values['rank']}")
    spans = [(int(first), int(last)) for first, last in values["stands_for"]]
    count = sum(last - first + 1 for first, last in spans)
    if any(not 0 <= first <= last < gpus for first, last in spans) or not 1 <= count <= gpus:
        raise ValueError(f"its rank {number} stands for ranks that there are not")
    stands_for = tuple(rank for first, last in spans for rank in range(first, last + 1))
    check_values(values["whole_model"], _WHOLE_KINDS, f"whole model of rank {number}")
    return RankSummary(**values | {"stands_for": stands_for, "whole_model": WholeModel(**values["whole_model"])})


# The expected kind of each value


_CLUSTER_KINDS: Kinds = {
    **dict.fromkeys(("words", "gpu", "gpu_name", "trouble", "script"), is_words),
    **dict.fromkeys(("capacity_bytes", "gpus", "hosts", "gpus_per_host"), is_count),
    **dict.fromkeys(("worst", "dies_first"), lambda value: value is None or is_count(value)),
    "outcome": is_outcome,
    "exit_status": lambda value: isinstance(value, int),
    "arguments": is_word_list,
}
_RANK_KINDS: Kinds = {
    **dict.fromkeys(("host_bytes", "host_mapped_bytes"), is_count),
    **dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "peak_process_bytes", "rank"), is_count),
    **dict.fromkeys(("engine_bytes", "stream_bytes", "overhead_parts", "host_parts"), is_sizes),
    "whole_model": lambda value: isinstance(value, dict),
    "ledger": lambda value: is_sizes(value) and set(value) <= {str(category) for category in Category},
    "outcome": is_outcome,
    "stopped": lambda value: isinstance(value, bool),
    "error": is_words,
    "stands_for": lambda value: isinstance(value, list),
    "step_time_s": lambda value: value is None or is_seconds(value),
}
_WHOLE_KINDS: Kinds = {"engine": is_words, "size_bytes": is_count, "copies": is_count}
