"""The recording of a cluster's run, and its file: a summary of every rank that ran, and the events of each distinct one.

Ranks are written and read one at a time, so that neither takes more memory than the largest rank. `open_recording`
opens any supported file: ours, of one GPU or of a cluster, or a memory snapshot of PyTorch.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tonnage.errors import BadRecording
from tonnage.recording.layout import CLUSTER_LAYOUT_VERSION, is_of_cluster, opened, record_of, written
from tonnage.recording.recording import Recording
from tonnage.recording.records import Outcome
from tonnage.recording.store import Contexts, decoded, insert_contexts, insert_run, read_recording
from tonnage.recording.writes import WRITES_KEY, ScriptWrites, script_writes

COMMUNICATORS = "communicators"


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model that an engine (DDP, FSDP, DeepSpeed) got unsharded, and how many ranks of a host passed the same one."""

    engine: str = ""
    size_bytes: int = 0
    copies: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """A rank that ran, and the ranks it represents (including itself)."""

    rank: int
    stands_for: tuple[int, ...]
    outcome: Outcome
    stopped: bool = False  # ended because another rank failed
    error: str = ""
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_process_bytes: int = 0
    ledger: dict[str, int] = field(default_factory=dict)
    engine_bytes: dict[str, int] = field(default_factory=dict)  # bytes that FSDP and DDP hold for themselves, by name
    stream_bytes: dict[str, int] = field(default_factory=dict)
    overhead_parts: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0  # host memory that the rank needs
    host_mapped_bytes: int = 0  # pages of files, shared by all ranks of a host
    host_parts: dict[str, int] = field(default_factory=dict)  # of `host_bytes` and mapped files, see `recording.host`
    whole_model: WholeModel = WholeModel()
    step_time_s: float | None = None  # None if it does not fit, or no step was captured

    @property
    def held_by_engines(self) -> dict[str, int]:
        """Bytes that FSDP, DDP and NCCL hold for themselves; communicators, which are outside the allocator, come last."""
        outside = sum(size for name, size in self.overhead_parts.items() if name.startswith("NCCL"))
        return self.engine_bytes | ({COMMUNICATORS: outside} if outside else {})

    @classmethod
    def of(
        cls, rank: int, stands_for: tuple[int, ...], recording: Recording, engine_bytes: dict[str, int], stopped: bool,
        whole_model: WholeModel = WholeModel(),
    ) -> "RankSummary":  # fmt: skip
        """Summarize a rank's recording."""
        host, by_stream = recording.host, Counter[str]()
        for block in recording.live_at_peak:
            by_stream[str(block.stream)] += block.block_bytes
        return cls(
            rank=rank,
            stands_for=stands_for,
            outcome=recording.header.outcome,
            stopped=stopped,
            error=recording.header.error,
            peak_allocated_bytes=recording.peak_allocated_bytes,
            peak_reserved_bytes=recording.peak_reserved_bytes,
            peak_process_bytes=recording.peak_process_bytes,
            ledger={str(category): size for category, size in recording.ledger().bytes_by_category.items()},
            engine_bytes=dict(engine_bytes),
            stream_bytes=dict(by_stream),
            overhead_parts=dict(recording.header.overhead_parts),
            host_bytes=host.needed_bytes if host else 0,
            host_mapped_bytes=host.mapped_peak_bytes if host else 0,
            host_parts=dict(host.peak.parts) if host else {},
            whole_model=whole_model,
            step_time_s=recording.step_time.step_s if recording.step_time else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSummary:
    """A cluster's run: the cards, the script, how it ended, and every rank that ran."""

    words: str  # "16 × h100 in 2 hosts (HGX H100)"
    gpu: str
    gpu_name: str
    capacity_bytes: int
    gpus: int
    hosts: int
    gpus_per_host: int
    outcome: Outcome
    exit_status: int
    trouble: str = ""  # a problem between ranks (a mismatch, a missing peer), or the error that ended them all
    dies_first: int | None = None
    worst: int | None = None  # the rank that runs out of memory first or, if none does, the one with the highest peak
    script: str = ""
    arguments: tuple[str, ...] = ()
    ranks: tuple[RankSummary, ...] = ()
    writes: ScriptWrites = field(default_factory=ScriptWrites)  # of all ranks together

    @property
    def slowest(self) -> RankSummary | None:
        """The rank with the longest step, for which all others wait; None if some rank has no time."""
        times = [rank.step_time_s for rank in self.ranks]
        if None in times or self.outcome == "oom":
            return None
        return max(self.ranks, key=lambda rank: (rank.step_time_s or 0.0, -rank.rank), default=None)

    @property
    def fullest_host(self) -> dict[int, RankSummary]:
        """The ranks of the host that needs most memory, each with its representative; empty if unknown."""
        ran = {number: rank for rank in self.ranks for number in rank.stands_for}
        by_host: dict[int, dict[int, RankSummary]] = {}
        for number, rank in sorted(ran.items()):
            by_host.setdefault(number // self.gpus_per_host, {})[number] = rank
        most = max(by_host.values(), key=lambda ranks: sum(rank.host_bytes for rank in ranks.values()), default={})
        return most if any(rank.host_bytes for rank in most.values()) else {}

    @property
    def host_ranks(self) -> tuple[RankSummary, ...]:
        """The representatives of the ranks of that host, repeated for each rank."""
        return tuple(self.fullest_host.values())


@dataclass(frozen=True)
class ClusterRecording:
    """The summary, and a rank's recording on demand: all of them may be too many to hold at once."""

    summary: ClusterSummary
    recording_of: Callable[[int], Recording]


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
        values[WRITES_KEY] = asdict(summary.writes)
        rows = ((key, json.dumps(value)) for key, value in values.items())
        database.executemany("INSERT INTO cluster VALUES (?, ?)", rows)


def _same(cluster: ClusterRecording, other: RankSummary, rank: RankSummary, recording: Recording) -> bool:
    """Whether a rank did exactly the same as a stored one. Most that differ already do in their summary."""
    # Python's own memory differs slightly between processes.
    names = ("rank", "stands_for", "host_bytes", "host_mapped_bytes", "host_parts")
    if replace(other, **{name: getattr(rank, name) for name in names}) != rank:
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
    values.setdefault(WRITES_KEY, asdict(ScriptWrites()) | {"files": []})  # missing in older files
    values["ranks"] = database.execute("SELECT rank, summary FROM rank ORDER BY rank").fetchall()
    summary = record_of(ClusterSummary, values, "summary", ranks=ranks, writes=script_writes)
    for key in ("worst", "dies_first"):
        if getattr(summary, key) not in {rank.rank for rank in summary.ranks} | {None}:
            raise ValueError(f"its {key} is rank {values[key]}, which did not run")
    return summary


def _rank(number: int, values: dict[str, Any], gpus: int) -> RankSummary:
    def ranks_of(spans: list[Any]) -> tuple[int, ...]:
        count = sum(last - first + 1 for first, last in spans)
        if any(not 0 <= first <= last < gpus for first, last in spans) or not 1 <= count <= gpus:
            raise ValueError(f"its rank {number} stands for ranks that there are not")
        return tuple(rank for first, last in spans for rank in range(first, last + 1))

    absent: dict[str, Any] = {"step_time_s": None, "host_bytes": 0, "host_mapped_bytes": 0, "host_parts": {}}
    values = absent | {"whole_model": asdict(WholeModel())} | values  # which older files lack
    whole_model = partial(record_of, WholeModel, what=f"whole model of rank {number}")
    summary = record_of(RankSummary, values, f"summary of rank {number}", stands_for=ranks_of, whole_model=whole_model)
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

    if is_snapshot(path):
        return None
    with opened(path) as (database, version):
        if not is_of_cluster(version):
            return None
        # A report asks several questions about one rank before it moves to the next.
        return ClusterRecording(_summary(database), lru_cache(maxsize=1)(partial(read_recording, path)))


def ended_in_error(path: Path) -> bool:
    """Whether a file is our recording of a run that failed with an error other than running out of memory."""
    try:
        with opened(path) as (database, version):
            table = "cluster" if is_of_cluster(version) else "header"
            row = database.execute(f"SELECT value FROM {table} WHERE key = 'outcome'").fetchone()
            return row is not None and decoded(row[0]) in ("error", "depends")
    except BadRecording:
        return False
