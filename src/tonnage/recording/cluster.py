"""A cluster's run: what each rank that ran held at its peak, and its recording, which is read when it is asked for.

Nothing here knows who ran the ranks, how they are stored or how they are shown.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tonnage.recording.recording import Recording
from tonnage.recording.records import Outcome

COMMUNICATORS = "communicators"


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model that an engine (DDP, FSDP, DeepSpeed) got whole, and how many ranks of a host gave it the same one."""

    engine: str = ""
    size_bytes: int = 0
    copies: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """A rank that ran, and the ranks that it stands for (itself among them)."""

    rank: int
    stands_for: tuple[int, ...]
    outcome: Outcome
    stopped: bool = False  # it did not fail itself: another rank did
    error: str = ""
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_process_bytes: int = 0
    ledger: dict[str, int] = field(default_factory=dict)
    engine_bytes: dict[str, int] = field(default_factory=dict)  # what FSDP and DDP hold for themselves, by name
    stream_bytes: dict[str, int] = field(default_factory=dict)
    overhead_parts: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0  # that the host must have for it
    host_mapped_bytes: int = 0  # pages of files, which all ranks of a host share
    host_parts: dict[str, int] = field(
        default_factory=dict
    )  # of `host_bytes`, and mapped files: parts of `recording.host`
    whole_model: WholeModel = WholeModel()
    step_time_s: float | None = None  # None: it does not fit, or no step was captured

    @property
    def held_by_engines(self) -> dict[str, int]:
        """What FSDP, DDP and NCCL hold for themselves; communicators, which lie beside the allocator, last."""
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
        """What a recording says of its rank."""
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
    """What a cluster's run was: the cards, the script, how it ended, and every rank that ran."""

    words: str  # "16 × h100 in 2 hosts (HGX H100)"
    gpu: str
    gpu_name: str
    capacity_bytes: int
    gpus: int
    hosts: int
    gpus_per_host: int
    outcome: Outcome
    exit_status: int
    trouble: str = ""  # between ranks: a mismatch, a peer that never comes; or the error that ended them all
    dies_first: int | None = None
    worst: int | None = None  # the rank that dies first or, where none does, the one that needs most
    script: str = ""
    arguments: tuple[str, ...] = ()
    ranks: tuple[RankSummary, ...] = ()

    def ran_for(self, rank: int) -> RankSummary | None:
        """The rank that ran in the place of a rank: itself or one like it."""
        return next((each for each in self.ranks if rank in each.stands_for), None)

    @property
    def slowest(self) -> RankSummary | None:
        """The rank whose step takes longest, for which all others wait; None where not every rank has a time."""
        times = [rank.step_time_s for rank in self.ranks]
        if None in times or self.outcome == "oom":
            return None
        return max(self.ranks, key=lambda rank: (rank.step_time_s or 0.0, -rank.rank), default=None)

    @property
    def fullest_host(self) -> dict[int, RankSummary]:
        """The ranks of the host that needs most memory, each with the one that ran for it; none where that is not known."""
        ran = {number: rank for rank in self.ranks for number in rank.stands_for}
        by_host: dict[int, dict[int, RankSummary]] = {}
        for number, rank in sorted(ran.items()):
            by_host.setdefault(number // self.gpus_per_host, {})[number] = rank
        most = max(by_host.values(), key=lambda ranks: sum(rank.host_bytes for rank in ranks.values()), default={})
        return most if any(rank.host_bytes for rank in most.values()) else {}

    @property
    def host_ranks(self) -> tuple[RankSummary, ...]:
        """Those that ran for the ranks of that host, each as often as it stands for one."""
        return tuple(self.fullest_host.values())

    @property
    def worst_rank(self) -> RankSummary | None:
        """The summary of that rank."""
        return next((rank for rank in self.ranks if rank.rank == self.worst), None)


@dataclass(frozen=True)
class ClusterRecording:
    """The summary, and a rank's recording on demand: a cluster's may be too many to hold at once."""

    summary: ClusterSummary
    recording_of: Callable[[int], Recording]
