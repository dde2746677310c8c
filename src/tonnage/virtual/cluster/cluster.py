"""A script on a virtual cluster: finds the ranks that differ, runs one of each kind, and says what became of them.

Rank 0 runs first, alone, and shows which groups there are. Then one rank of each class runs, all together, and a few
others that are drawn from the classes; where such a one needs other memory than the rank that stands for it, more of
its class run. What the ranks do is told in `rank`, how they meet in `hub`.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tonnage.hardware.cluster import Cluster
from tonnage.recording import Recording
from tonnage.recording.records import Outcome
from tonnage.virtual.cluster.classes import checks, nearest, stand_ins
from tonnage.virtual.cluster.processes import Round, output_of, run_round
from tonnage.virtual.cluster.rank import RankReport, run_rank

_MOST_ROUNDS = 4
_CHECKS = 2
_MORE_CHECKS = 4


@dataclass(frozen=True)
class RankRun:
    """A rank that ran, and the ranks that it stands for (itself among them)."""

    rank: int
    stands_for: tuple[int, ...]
    recording: Recording
    engine_bytes: dict[str, int]  # what FSDP and DDP hold at the peak for themselves: parts of the ledger, by name
    stopped: bool  # it did not fail itself: another rank did
    calls: int  # collectives and messages on the card

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        return self.recording.header.outcome


@dataclass(frozen=True)
class ClusterRun:
    """What became of a script on a cluster."""

    cluster: Cluster
    ranks: tuple[RankRun, ...]
    trouble: str = ""  # between ranks: a mismatch, a peer that never comes; or the error that ended them all
    output: str = ""  # what rank 0 printed
    errors: str = ""  # what rank 0, or the rank that failed, printed to standard error
    groups: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @property
    def outcome(self) -> Outcome:
        """ "oom" where a rank dies of that, "error" where one failed or waits forever, else "ok"."""
        outcomes = {run.outcome for run in self.ranks if not run.stopped}
        if "oom" in outcomes:
            return "oom"
        return "error" if self.trouble or "error" in outcomes or not self.ranks else "ok"

    @property
    def exit_status(self) -> int:
        """As for one GPU: that of the rank that failed for its own reasons, 1 where a rank does not fit, else 0."""
        failed = [run.recording.header.exit_status for run in self.ranks if run.outcome == "error" and not run.stopped]
        return next(filter(None, failed), int(self.outcome != "ok"))

    @property
    def dies_first(self) -> RankRun | None:
        """The rank that runs out of memory after the fewest steps and calls."""
        dead = [run for run in self.ranks if run.outcome == "oom"]
        return min(dead, key=lambda run: (run.recording.oom.step if run.recording.oom else 0, run.calls), default=None)

    @property
    def worst(self) -> RankRun | None:
        """The rank that dies first or, where none does, the one that needs most."""
        return self.dies_first or max(self.ranks, key=lambda run: run.recording.peak_reserved_bytes, default=None)


def run_cluster(
    script: Path,
    arguments: Sequence[str],
    cluster: Cluster,
    *,
    torch_version: str | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> ClusterRun:
    """Run a torchrun script on a virtual cluster."""
    _load()
    act = partial(run_rank, cluster=cluster, script=script, arguments=arguments, torch_version=torch_version)
    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder:
        return _Search(cluster, act, Path(folder), progress).run()


def _load() -> None:
    """Into this process, for all its forks: torch, the virtual GPU's kernels, and what sharded training imports."""
    from tonnage.garbage import no_collection
    from tonnage.virtual.loading import load

    load()
    with no_collection():
        import torch.distributed.fsdp
        import torch.distributed.tensor  # noqa: F401


class _Search:
    """The rounds of one run."""

    def __init__(
        self, cluster: Cluster, act: Callable[..., RankReport], folder: Path, progress: Callable[[str], None]
    ) -> None:
        self._cluster, self._act, self._folder, self._progress = cluster, act, folder, progress
        self._groups: dict[tuple[int, ...], None] = {}
        self._with_messages: set[tuple[int, ...]] = set()

    def run(self) -> ClusterRun:
        """Rank 0 alone, then one of each class, until no new class turns up."""
        world = self._cluster.gpus
        standing = dict.fromkeys(range(world), 0)
        done = self._round(standing, "rank 0")
        for _ in range(_MOST_ROUNDS):
            classes = self._classes()
            if set(classes.values()) <= set(standing.values()):
                break
            standing = nearest(classes, checks(classes, _CHECKS))
            done = self._round(standing, f"{len(set(standing.values()))} of {world} ranks")
        return self._result(*self._split(standing, done))

    def _round(self, standing: dict[int, int], words: str) -> Round:
        self._progress(f"running {words}")
        done = run_round(standing, self._act, _failed, self._folder)
        self._groups |= done.hub.journal.groups
        self._with_messages |= done.hub.journal.with_messages
        return done

    def _split(self, standing: dict[int, int], done: Round) -> tuple[dict[int, int], Round]:
        """Where ranks of one class differ, run more of them."""
        if done.trouble or not _mixed(self._classes(), done):
            return standing, done
        more = nearest(standing, checks(standing, _MORE_CHECKS, seed=1))
        return more, self._round(more, f"{len(set(more.values()))} of {self._cluster.gpus} ranks")

    def _classes(self) -> dict[int, int]:
        return stand_ins(self._cluster.gpus, self._cluster.gpus_per_host, list(self._groups), self._with_messages)

    def _result(self, standing: dict[int, int], done: Round) -> ClusterRun:
        runs = []
        for rank, report in sorted(done.reports.items()):
            stood_for = tuple(other for other, by in standing.items() if by == rank)
            runs.append(RankRun(rank, stood_for, report.recording, report.engine_bytes, report.stopped, report.calls))
        out, errors = self._words(runs)
        return ClusterRun(self._cluster, tuple(runs), done.trouble, out, errors, tuple(self._groups))

    def _words(self, runs: list[RankRun]) -> tuple[str, str]:
        failed = next((run.rank for run in runs if run.outcome != "ok" and not run.stopped), 0)
        out, errors = output_of(self._folder, 0)[0], output_of(self._folder, failed)[1]
        return tuple(path.read_text(errors="replace") if path.exists() else "" for path in (out, errors))  # type: ignore[return-value]


def _failed(report: RankReport) -> tuple[str, bool]:
    """A rank's own error ends the job. So does running out of memory, but then it is worth knowing who else would."""
    header = report.recording.header
    if header.outcome == "oom":
        return "ran out of memory", False
    return header.error, header.outcome == "error" and not report.stopped


def _mixed(classes: dict[int, int], done: Round) -> bool:
    """Whether a rank that was drawn needs other memory than the one that stands for its class."""
    peaks = {rank: report.recording.peak_allocated_bytes for rank, report in done.reports.items()}
    return any(classes[rank] in peaks and peaks[rank] != peaks[classes[rank]] for rank in peaks)
