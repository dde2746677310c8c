"""Runs a script on a virtual cluster: finds the classes of equivalent ranks, runs one rank of each, and reports the
results.

Rank 0 starts alone and shows which groups exist. When it first needs other ranks, one rank of each class joins, plus
a few sampled from the classes as a check; if such a check needs different memory than its representative, more of its
class run. If a late rank contributes something other than what was assumed for it, all ranks start over. `rank` runs
one rank, `hub` connects them.

Two ranks are equivalent if they have the same place in every group. In a group whose ranks send messages to each
other, every place is distinct (pipeline stages differ); in any other, the first and the last differ from the rest
(uneven shards, work that only the first of a group or host does). If that makes too many classes, only the first
differs, then none; a ring of very many ranks does not count as a pipeline.
"""

import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tonnage.hardware.cluster import Cluster
from tonnage.recording import ClusterRecording, ClusterSummary, RankSummary
from tonnage.recording.records import Outcome
from tonnage.recording.writes import ScriptWrites
from tonnage.script.running import Program
from tonnage.virtual.cluster.exchange import Payload, rank_names
from tonnage.virtual.cluster.hub import Hub, Journal
from tonnage.virtual.cluster.rank import Child, RankRun, look_for_idle, look_for_polling, output_of, run_rank, start
from tonnage.virtual.redirect import Redirection

_POLL_S = 1.0
_MOST_ROUNDS = 4
_CHECKS = 2
_MORE_CHECKS = 4


def run_cluster(
    script: Program | Path,
    arguments: Sequence[str],
    cluster: Cluster,
    *,
    torch_version: str | None = None,
    progress: Callable[[str], None] = lambda words: None,
    redirection: Redirection | None = None,
) -> ClusterRecording:
    """Run a torchrun script on a virtual cluster, forwarding the output of rank 0 and the errors of a rank that fails."""
    # Import torch, the virtual GPU and the sharding libraries here, so that forked ranks inherit them.
    from tonnage.garbage import no_collection
    from tonnage.virtual.builds import preload

    preload()
    with no_collection():
        import torch.distributed.fsdp
        import torch.distributed.tensor  # noqa: F401

        import tonnage.virtual.cluster.distributed
        import tonnage.virtual.cluster.engines
        import tonnage.virtual.compiling  # noqa: F401
    program = script if isinstance(script, Program) else Program.of_file(script)
    act = partial(run_rank, cluster=cluster, program=program, arguments=arguments, torch_version=torch_version)
    redirection = redirection or Redirection()
    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder:
        redirection.write_through(folder)  # the output of each rank
        with redirection:
            found = _RankSearch(cluster, act, Path(folder), progress, redirection.empty).run()
    writes = redirection.writes or ScriptWrites()
    return replace(found, summary=replace(found.summary, writes=writes))


class _RankSearch:
    """The rounds of one run (usually a single one): chooses which ranks run, lets them run and collects the results."""

    def __init__(
        self,
        cluster: Cluster,
        act: Callable[..., RankRun],
        folder: Path,
        progress: Callable[[str], None],
        forget_writes: Callable[[], None],
    ) -> None:
        self._cluster, self._act, self._folder, self._progress = cluster, act, folder, progress
        self._forget_writes = forget_writes  # before the script begins again
        self._groups: dict[tuple[int, ...], None] = {}
        self._with_messages: set[tuple[int, ...]] = set()
        self._is_last = self._is_split = False
        self._passed_on = dict.fromkeys(output_of(folder, 0), 0)  # bytes of rank 0's output that were forwarded
        # The round
        self._hub = Hub({})
        self._children: dict[int, Child] = {}
        self._by_pipe: dict[Connection, Child] = {}

    def run(self) -> ClusterRecording:
        """Run rounds until one is not stale."""
        standing: Mapping[int, int] = dict.fromkeys(range(self._cluster.gpus), 0)
        for number in range(_MOST_ROUNDS):
            self._is_last = number == _MOST_ROUNDS - 1
            self._tell(standing)
            self._hub, self._children, self._by_pipe = Hub(standing, self._widen, self._alike), {}, {}
            self._run_round()
            self._know(self._hub.journal)
            if not self._hub.journal.stale:
                break
            standing = self._standing(self._hub.running)
            self._forget_writes()
        self._forward_output()
        # Report ranks that are in no mesh and no other group, which PyTorch does not mention.
        world, journal = self._cluster.gpus, self._hub.journal
        placed = {rank for ranks in self._groups if len(ranks) < world for rank in ranks}
        for words, size in journal.part_meshes:
            if left_out := [rank for rank in range(size, world) if rank not in placed]:
                journal.trouble = (
                    f"{words} takes {size} of {world} ranks, and leaves out {rank_names(left_out)}. Let its sizes "
                    f"multiply to {world}, or run it on that many GPUs: --gpus {size}x{self._cluster.gpu.key}."
                )
                break
        runs = []
        for rank, child in self._reported():
            stood_for = tuple(other for other, by in self._hub.standing.items() if by == rank)
            runs.append(replace(child.report, stands_for=stood_for))
        failed = next((run.rank for run in runs if run.outcome != "ok" and not run.stopped), 0)
        errors = output_of(self._folder, failed)[1]
        if failed and errors.exists():  # those of rank 0 have been forwarded
            sys.stderr.write(errors.read_text(errors="replace"))
        return recorded(self._cluster, runs, journal.trouble)

    # One round: ranks that run together, and others that join them, until all have ended or none can continue

    def _run_round(self) -> None:
        hub, journal, polling_since_s = self._hub, self._hub.journal, None
        try:
            while not journal.trouble and not journal.stale:
                if hub.running <= set(hub.ended) and not any(hub.ended.values()):
                    hub.join(self._widen_at_end(hub.standing))
                if hub.running <= set(hub.ended):
                    break
                for rank in sorted(hub.running - set(self._children)):  # ranks that joined
                    child = self._children[rank] = start(rank, self._act, self._folder)
                    self._by_pipe[child.pipe] = child
                ready = wait(list(self._by_pipe), timeout=_POLL_S)
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    self._hear(self._by_pipe[pipe])
                    if journal.trouble:
                        break
                else:
                    if not ready:
                        look_for_idle(self._by_pipe.values(), hub, self._folder)
                    polling_since_s = look_for_polling(hub, polling_since_s)
                self._forward_output()
        finally:
            for child in self._children.values():
                child.stop()
        if not journal.trouble and not any(hub.ended.values()):
            journal.trouble = hub.unmatched()

    def _hear(self, child: Child) -> None:
        child.idle_since_s = time.monotonic()
        try:
            words = child.pipe.recv()
        except EOFError:
            child.process.join()
            status = child.process.exitcode
            how = f"ended with status {status} before the script did (os._exit, or a crash in native code)"
            if status is not None and status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
            why, ends_all = f"its process {how}", True
        else:
            if words[0] != "finish":
                self._hub.hear(child.rank, words, child.answer)
                return
            child.report = words[1]
            # Running out of memory does not end the job: other ranks may, too.
            header = words[1].recording.header
            why = "ran out of memory" if header.outcome == "oom" else header.error
            ends_all = header.outcome in ("error", "depends") and not words[1].stopped
        del self._by_pipe[child.pipe]
        self._hub.end(child.rank, why)
        if ends_all and not self._hub.journal.trouble:
            self._hub.journal.trouble = f"Rank {child.rank}: {why}"

    def _forward_output(self) -> None:
        """Forward what rank 0 has printed to its files. A repeated round does not print the same output again."""
        for (path, passed_on), stream in zip(self._passed_on.items(), (sys.stdout, sys.stderr), strict=True):
            if not path.exists() or path.stat().st_size <= passed_on:
                continue
            with path.open("rb") as file:
                file.seek(passed_on)
                new = file.read()
            self._passed_on[path] = passed_on + len(new)
            stream.write(new.decode(errors="replace"))
            stream.flush()

    def _widen(self, standing: Mapping[int, int], journal: Journal) -> Mapping[int, int]:
        """Return the mapping with one rank of each class, a few checks and all that run already."""
        self._know(journal)
        wider = self._standing(set(standing.values()))
        self._tell(wider)
        return wider

    def _widen_at_end(self, standing: Mapping[int, int]) -> Mapping[int, int]:
        """Return the mapping with more ranks of classes whose members differ; this is done once."""
        classes = self._classes()
        peaks = {rank: child.report.recording.peak_allocated_bytes for rank, child in self._reported()}
        is_mixed = any(classes[rank] in peaks and peak != peaks[classes[rank]] for rank, peak in peaks.items())
        if self._is_split or not is_mixed:
            return standing
        self._is_split = True
        wider = nearest(standing, checks(standing, _MORE_CHECKS, seed=1))
        self._tell(wider)
        return wider

    def _alike(self, one: Payload, other: Payload) -> bool:
        """Whether two ranks contributed the same. In the last round this is assumed."""
        import torch

        if self._is_last:
            return True
        if one is None or other is None:
            return one is other
        return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    def _reported(self) -> list[tuple[int, Child]]:
        """Return the ranks that finished, in order."""
        return [(rank, child) for rank, child in sorted(self._children.items()) if child.report is not None]

    # Which ranks run

    def _know(self, journal: Journal) -> None:
        self._groups |= journal.groups
        self._with_messages |= journal.with_messages

    def _standing(self, running: set[int]) -> dict[int, int]:
        classes = self._classes()
        sampled = len(running - set(classes.values()))
        return nearest(classes, [*running, *checks(classes, max(_CHECKS - sampled, 0))])

    def _classes(self) -> dict[int, int]:
        return stand_ins(self._cluster.gpus, self._cluster.gpus_per_host, list(self._groups), self._with_messages)

    def _tell(self, standing: Mapping[int, int]) -> None:
        running = set(standing.values())
        self._progress(f"running {'rank 0' if running == {0} else f'{len(running)} of {self._cluster.gpus} ranks'}")


def recorded(cluster: Cluster, runs: Sequence[RankRun], trouble: str = "") -> ClusterRecording:
    """Return a recording of all ranks that ran, which can be saved and shown without torch.

    `trouble` is a problem between ranks (a mismatch, a missing peer), or the error that ended them all.
    """
    outcomes = {run.outcome for run in runs if not run.stopped}
    by_itself = [run for run in runs if run.outcome in ("error", "depends") and not run.stopped]
    failed = [run.recording.header.exit_status for run in by_itself]
    outcome: Outcome = "ok"
    if "oom" in outcomes:
        outcome = "oom"
    elif "error" not in outcomes and "depends" in outcomes:
        outcome = "depends"
    elif trouble or "error" in outcomes or not runs:
        outcome = "error"
    # The first to die has made the fewest steps and calls.
    dead = [run for run in runs if run.outcome == "oom"]
    first = min(dead, key=lambda run: (run.recording.oom.step if run.recording.oom else 0, run.calls), default=None)
    dependent = next((run for run in by_itself if outcome == "depends"), None)
    worst = first or dependent or max(runs, key=lambda run: run.recording.peak_reserved_bytes, default=None)
    header = worst.recording.header if worst else None
    summary = ClusterSummary(
        words=cluster.words,
        gpu=cluster.gpu.key,
        gpu_name=cluster.gpu.name,
        capacity_bytes=cluster.gpu.memory_bytes,
        gpus=cluster.gpus,
        hosts=cluster.hosts,
        gpus_per_host=cluster.gpus_per_host,
        outcome=outcome,
        exit_status=next(filter(None, failed), int(outcome != "ok")),
        trouble=trouble,
        dies_first=first.rank if first else None,
        worst=worst.rank if worst else None,
        script=header.program if header else "",
        arguments=header.arguments if header else (),
        ranks=tuple(
            RankSummary.of(run.rank, run.stands_for, run.recording, run.engine_bytes, run.stopped, run.whole_model)
            for run in runs
        ),
    )
    return ClusterRecording(summary, {run.rank: run.recording for run in runs}.__getitem__)


# Classes of ranks

Ranks = tuple[int, ...]
_MOST_CLASSES = 24
_MOST_STAGES = 64
_FINENESS = (("first", "last"), ("first",), ())


def stand_ins(world: int, per_host: int, groups: Sequence[Ranks], with_messages: Iterable[Ranks]) -> dict[int, int]:
    """Map each rank to its representative, the lowest rank of its class."""
    hosts = [tuple(range(start, start + per_host)) for start in range(0, world, per_host)]
    every = [*dict.fromkeys(groups), *(hosts if len(hosts) > 1 else ())]
    staged = {_family(ranks) for ranks in with_messages}
    for told_apart in _FINENESS:
        standing = _standing(world, every, staged, told_apart)
        if len(set(standing.values())) <= _MOST_CLASSES:
            return standing
    if len(set(standing.values())) <= _MOST_STAGES or not staged:
        return standing
    return stand_ins(world, per_host, groups, ())


def checks(standing: Mapping[int, int], count: int, seed: int = 0) -> list[int]:
    """Sample up to `count` ranks that do not run, to verify that their representatives behave like them."""
    stood_for = [rank for rank, other in standing.items() if rank != other]
    return sorted(random.Random(seed).sample(stood_for, min(count, len(stood_for))))


def nearest(standing: Mapping[int, int], more: Iterable[int]) -> dict[int, int]:
    """Return the mapping with more ranks running: each represents the ranks of its class from itself up to the next one."""
    by_class: dict[int, int] = dict.fromkeys(set(standing.values()), -1)
    running, result = {*standing.values(), *more}, {}
    for rank, other in sorted(standing.items()):
        if rank in running:
            by_class[other] = rank
        result[rank] = by_class[other]
    return result


def _standing(world: int, groups: Sequence[Ranks], staged: set[Ranks], told_apart: tuple[str, ...]) -> dict[int, int]:
    places: dict[int, list[object]] = {rank: [] for rank in range(world)}
    for ranks in groups:
        family = _family(ranks)
        ends = {"first": 0, "last": len(ranks) - 1}
        for index, rank in enumerate(ranks):
            named = next((end for end in told_apart if index == ends[end]), "")
            places[rank].append((family, index if family in staged else named))
    first: dict[tuple[object, ...], int] = {}
    return {rank: first.setdefault(tuple(found), rank) for rank, found in places.items()}


def _family(ranks: Ranks) -> Ranks:
    """Return the ranks relative to the first: groups along one mesh dimension differ only in their start."""
    return tuple(rank - ranks[0] for rank in ranks)
