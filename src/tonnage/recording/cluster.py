"""The recording of a cluster's run: a summary of each rank that ran, and its events, which are read on demand."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tonnage.recording.recording import Recording
from tonnage.recording.records import Outcome

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
        cls,
        rank: int,
        stands_for: tuple[int, ...],
        recording: Recording,
        engine_bytes: dict[str, int],
        stopped: bool,
        whole_model: WholeModel = WholeModel(),
    ) -> "RankSummary":
        """Summarize a rank's recording."""
        by_stream: dict[str, int] = {}
        for block in recording.live_at_peak:
            by_stream[str(block.stream)] = by_stream.get(str(block.stream), 0) + block.block_bytes
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
            stream_bytes=by_stream,
            overhead_parts=dict(recording.header.overhead_parts),
            host_bytes=recording.host.needed_bytes if recording.host else 0,
            host_mapped_bytes=recording.host.mapped_peak_bytes if recording.host else 0,
            host_parts=dict(recording.host.peak.parts) if recording.host else {},
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
