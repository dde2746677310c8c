"""Runs a script on a virtual cluster: finds the classes of equivalent ranks, runs one rank of each, and reports the
results.

Rank 0 starts alone and shows which groups exist. When it first needs other ranks, one rank of each class joins, plus
a few sampled from the classes as a check; if such a check needs different memory than its representative, more of its
class run. If a late rank contributes something other than what was assumed for it, all ranks start over. `rank` runs
one rank, `hub` connects them.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tonnage.hardware.cluster import Cluster
from tonnage.recording import ClusterRecording, ClusterSummary, RankSummary, Recording
from tonnage.recording.cluster import WholeModel
from tonnage.recording.records import Outcome
from tonnage.script.program import Program
from tonnage.virtual.cluster.calls import Payload, rank_names
from tonnage.virtual.cluster.classes import checks, nearest, stand_ins
from tonnage.virtual.cluster.hub import Journal
from tonnage.virtual.cluster.processes import Round, output_of
from tonnage.virtual.cluster.rank import RankReport, run_rank

_MOST_ROUNDS = 4
_CHECKS = 2
_MORE_CHECKS = 4


@dataclass(frozen=True)
class RankRun:
    """A rank that ran, and the ranks it represents (including itself)."""

    rank: int
    stands_for: tuple[int, ...]
    recording: Recording
    engine_bytes: dict[
        str, int
    ]  # bytes that FSDP and DDP hold at the peak for themselves, by name of the ledger's part
    stopped: bool  # ended because another rank failed
    calls: int  # collectives and messages on the card
    whole_model: WholeModel = field(default_factory=WholeModel)

    @property
    def outcome(self) -> Outcome:
        """How the rank ended."""
        return self.recording.header.outcome


@dataclass(frozen=True)
class ClusterRun:
    """The result of running a script on a cluster."""

    cluster: Cluster
    ranks: tuple[RankRun, ...]
    trouble: str = ""  # a problem between ranks (a mismatch, a missing peer), or the error that ended them all
    errors: str = ""  # standard error of the rank that failed, unless that is rank 0
    groups: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @property
    def outcome(self) -> Outcome:
        """ "oom" if a rank ran out of memory, "error" if one failed or would hang, else "ok"."""
        outcomes = {run.outcome for run in self.ranks if not run.stopped}
        if "oom" in outcomes:
            return "oom"
        return "error" if self.trouble or "error" in outcomes or not self.ranks else "ok"

    @property
    def exit_status(self) -> int:
        """The exit status of the rank that failed on its own, 1 if a rank does not fit, else 0."""
        failed = [run.recording.header.exit_status for run in self.ranks if run.outcome == "error" and not run.stopped]
        return next(filter(None, failed), int(self.outcome != "ok"))

    @property
    def dies_first(self) -> RankRun | None:
        """The rank that runs out of memory after the fewest steps and calls."""
        dead = [run for run in self.ranks if run.outcome == "oom"]
        return min(dead, key=lambda run: (run.recording.oom.step if run.recording.oom else 0, run.calls), default=None)

    @property
    def worst(self) -> RankRun | None:
        """The rank that runs out of memory first or, if none does, the one with the highest peak."""
        return self.dies_first or max(self.ranks, key=lambda run: run.recording.peak_reserved_bytes, default=None)


def run_cluster(
    script: Program | Path,
    arguments: Sequence[str],
    cluster: Cluster,
    *,
    torch_version: str | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> ClusterRun:
    """Run a torchrun script on a virtual cluster, forwarding what rank 0 prints as it comes."""
    _load()
    program = script if isinstance(script, Program) else Program.of_file(script)
    act = partial(run_rank, cluster=cluster, program=program, arguments=arguments, torch_version=torch_version)
    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder:
        return _RankSearch(cluster, act, Path(folder), progress).run()


def _load() -> None:
    """Import torch, the virtual GPU's kernels and the sharding libraries here, so that forked ranks inherit them."""
    from tonnage.garbage import no_collection
    from tonnage.virtual.builds import preload

    preload()
    with no_collection():
        import torch.distributed.fsdp
        import torch.distributed.tensor  # noqa: F401


class _Echo:
    """Forwards what rank 0 prints to its files, as it comes. A repeated round does not print the same output again."""

    def __init__(self, output: Path, errors: Path) -> None:
        self._passed_on = {output: 0, errors: 0}
        self._streams = {output: "stdout", errors: "stderr"}

    def read(self) -> None:
        for path, start in self._passed_on.items():
            if not path.exists() or path.stat().st_size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                new = file.read()
            self._passed_on[path] = start + len(new)
            stream = getattr(sys, self._streams[path])
            stream.write(new.decode(errors="replace"))
            stream.flush()


class _RankSearch:
    """The rounds of one run (usually a single one): chooses which ranks run and collects the results."""

    def __init__(
        self, cluster: Cluster, act: Callable[..., RankReport], folder: Path, progress: Callable[[str], None]
    ) -> None:
        self._cluster, self.act, self._folder, self._progress = cluster, act, folder, progress
        self._groups: dict[tuple[int, ...], None] = {}
        self._with_messages: set[tuple[int, ...]] = set()
        self._is_last = self._is_split = False
        self._echo = _Echo(*output_of(folder, 0))

    def run(self) -> ClusterRun:
        """Run rounds until one is not stale."""
        standing: Mapping[int, int] = dict.fromkeys(range(self._cluster.gpus), 0)
        for number in range(_MOST_ROUNDS):
            self._is_last = number == _MOST_ROUNDS - 1
            self._tell(standing)
            done = Round(standing, self, self._folder)
            done.run()
            self._know(done.hub.journal)
            if not done.hub.journal.stale:
                break
            standing = self._standing(done.hub.running)
        self._echo.read()
        self._find_left_out(done)
        return self._result(done)

    # Callbacks of a round

    def failed(self, report: RankReport) -> tuple[str, bool]:
        """Return a rank's error and whether it ends the job. Running out of memory does not: other ranks may, too."""
        header = report.recording.header
        if header.outcome == "oom":
            return "ran out of memory", False
        return header.error, header.outcome == "error" and not report.stopped

    def widen(self, standing: Mapping[int, int], journal: Journal) -> Mapping[int, int]:
        """Return the mapping with one rank of each class, a few checks and all that run already."""
        self._know(journal)
        wider = self._standing(set(standing.values()))
        self._tell(wider)
        return wider

    def widen_at_end(self, standing: Mapping[int, int], reports: Mapping[int, RankReport]) -> Mapping[int, int]:
        """Return the mapping with more ranks of classes whose members differ; this is done once."""
        classes, peaks = self._classes(), {rank: r.recording.peak_allocated_bytes for rank, r in reports.items()}
        is_mixed = any(classes[rank] in peaks and peak != peaks[classes[rank]] for rank, peak in peaks.items())
        if self._is_split or not is_mixed:
            return standing
        self._is_split = True
        wider = nearest(standing, checks(standing, _MORE_CHECKS, seed=1))
        self._tell(wider)
        return wider

    def alike(self, one: Payload, other: Payload) -> bool:
        """Whether two ranks contributed the same. In the last round this is assumed."""
        return self._is_last or _alike(one, other)

    def listen(self) -> None:
        """Forward what rank 0 has printed."""
        self._echo.read()

    # Which ranks run

    def _know(self, journal: Journal) -> None:
        self._groups |= journal.groups
        self._with_messages |= journal.with_messages

    def _standing(self, running: set[int]) -> dict[int, int]:
        classes = self._classes()
        drawn = running - set(classes.values())
        return nearest(classes, [*running, *checks(classes, max(_CHECKS - len(drawn), 0))])

    def _classes(self) -> dict[int, int]:
        return stand_ins(self._cluster.gpus, self._cluster.gpus_per_host, list(self._groups), self._with_messages)

    def _tell(self, standing: Mapping[int, int]) -> None:
        running = set(standing.values())
        self._progress(f"running {'rank 0' if running == {0} else f'{len(running)} of {self._cluster.gpus} ranks'}")

    def _find_left_out(self, done: Round) -> None:
        """Report ranks that are in no mesh and no other group, which PyTorch does not mention."""
        world, journal = self._cluster.gpus, done.hub.journal
        placed = {rank for ranks in self._groups if len(ranks) < world for rank in ranks}
        for words, size in journal.part_meshes:
            left_out = [rank for rank in range(size, world) if rank not in placed]
            if left_out:
                journal.trouble = (
                    f"{words} takes {size} of {world} ranks, and leaves out {rank_names(left_out)}. Let its sizes "
                    f"multiply to {world}, or run it on that many GPUs: --gpus {size}x{self._cluster.gpu.key}."
                )
                return

    # Results

    def _result(self, done: Round) -> ClusterRun:
        runs = []
        for rank, report in done.reports.items():
            stood_for = tuple(other for other, by in done.hub.standing.items() if by == rank)
            runs.append(RankRun(rank, stood_for, **vars(report)))
        failed = next((run.rank for run in runs if run.outcome != "ok" and not run.stopped), 0)
        path = output_of(self._folder, failed)[1]
        errors = path.read_text(errors="replace") if failed and path.exists() else ""
        return ClusterRun(self._cluster, tuple(runs), done.trouble, errors, tuple(self._groups))


def _alike(one: Payload, other: Payload) -> bool:
    import torch

    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def recorded(run: ClusterRun) -> ClusterRecording:
    """Convert a run to a recording that can be saved and shown without torch: all ranks that ran, each with its summary."""
    recordings = {rank.rank: rank.recording for rank in run.ranks}
    cluster, gpu = run.cluster, run.cluster.gpu
    header = run.worst.recording.header if run.worst else None
    summary = ClusterSummary(
        words=cluster.words,
        gpu=gpu.key,
        gpu_name=gpu.name,
        capacity_bytes=gpu.memory_bytes,
        gpus=cluster.gpus,
        hosts=cluster.hosts,
        gpus_per_host=cluster.gpus_per_host,
        outcome=run.outcome,
        exit_status=run.exit_status,
        trouble=run.trouble,
        dies_first=run.dies_first.rank if run.dies_first else None,
        worst=run.worst.rank if run.worst else None,
        script=header.program if header else "",
        arguments=header.arguments if header else (),
        ranks=tuple(
            RankSummary.of(
                rank.rank, rank.stands_for, rank.recording, rank.engine_bytes, rank.stopped, rank.whole_model
            )
            for rank in run.ranks
        ),
    )
    return ClusterRecording(summary, recordings.__getitem__)
