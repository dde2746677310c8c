"""The ranks of one round as processes: forked from one that has torch loaded, each at the end of a pipe to the hub.

What a rank prints goes to a file of its own. A process that neither computes nor calls for a while waits for something
that no peer can give it (a socket, a file): it is named and ended.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from tonnage.virtual.cluster.exchange import HubExchange
from tonnage.virtual.cluster.hub import Answer, Hub

_POLL_S = 1.0
_IDLE_S = 20.0


@dataclass
class Child:
    """A rank's process."""

    rank: int
    process: ForkProcess
    pipe: Connection
    report: Any = None
    cpu_s: float = -1.0
    idle_since_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Round:
    """What came of running some ranks together: their reports, by rank, and what went wrong between them."""

    reports: dict[int, Any]
    hub: Hub

    @property
    def trouble(self) -> str:
        """ "" where nothing went wrong between ranks."""
        return self.hub.journal.trouble


def run_round(
    standing: Mapping[int, int],
    act: Callable[[int, HubExchange], Any],
    failed: Callable[[Any], tuple[str, bool]],
    folder: Path,
) -> Round:
    """Run `act` for each rank that stands for itself, until all have ended or nothing can go on.

    `failed` tells from a report why a rank failed ("" where it did not), and whether that ends all others.
    """
    hub = Hub(standing)
    children = {rank: _start(rank, act, folder) for rank in sorted(set(standing.values()))}
    by_pipe = {child.pipe: child for child in children.values()}
    try:
        while by_pipe and not hub.journal.trouble:
            _serve(by_pipe, hub, failed, folder)
    finally:
        for child in children.values():
            _stop(child)
    if not hub.journal.trouble and not any(hub.ended.values()):
        hub.journal.trouble = hub.unmatched()
    return Round({rank: child.report for rank, child in children.items() if child.report is not None}, hub)


def output_of(folder: Path, rank: int) -> tuple[Path, Path]:
    """Where a rank's words go: standard output and standard error."""
    return folder / f"rank{rank}.out", folder / f"rank{rank}.err"


def _start(rank: int, act: Callable[[int, HubExchange], Any], folder: Path) -> Child:
    context = get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_live, args=(rank, act, there, here, folder), daemon=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    there.close()
    return Child(rank, process, here)


def _live(
    rank: int, act: Callable[[int, HubExchange], Any], pipe: Connection, parents: Connection, folder: Path
) -> None:
    """In the child: its own files, then the work, then the last word."""
    parents.close()
    for descriptor, path in zip((1, 2), output_of(folder, rank), strict=True):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    exchange = HubExchange(pipe)
    exchange.finish(act(rank, exchange))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(by_pipe: dict[Connection, Child], hub: Hub, failed: Callable[[Any], tuple[str, bool]], folder: Path) -> None:
    ready = wait(list(by_pipe), timeout=_POLL_S)
    for pipe in ready:
        assert isinstance(pipe, Connection)
        child = by_pipe[pipe]
        child.idle_since_s = time.monotonic()
        try:
            words = pipe.recv()
        except EOFError:
            del by_pipe[pipe]
            child.process.join()
            hub.end(child.rank, f"its process died with status {child.process.exitcode}")
            hub.journal.trouble = f"Rank {child.rank}: its process died with status {child.process.exitcode}."
            return
        if words[0] == "finish":
            child.report = words[1]
            del by_pipe[pipe]
            why, ends_all = failed(words[1])
            hub.end(child.rank, why)
            if ends_all and not hub.journal.trouble:
                hub.journal.trouble = f"Rank {child.rank}: {why}"
        else:
            hub.hear(child.rank, words, _answerer(pipe))
    if not ready:
        _look_for_idle(by_pipe, hub, folder)


def _answerer(pipe: Connection) -> Callable[[Answer], None]:
    def answer(words: Answer) -> None:
        with suppress(BrokenPipeError):
            pipe.send(words)

    return answer


def _look_for_idle(by_pipe: dict[Connection, Child], hub: Hub, folder: Path) -> None:
    """A rank that does not wait in the hub must compute."""
    now_s = time.monotonic()
    for child in by_pipe.values():
        cpu_s = _cpu_seconds(child.process.pid)
        if cpu_s != child.cpu_s or hub.is_waiting(child.rank):
            child.cpu_s, child.idle_since_s = cpu_s, now_s
        elif now_s - child.idle_since_s > _IDLE_S:
            where = _stack_of(child, folder)
            hub.journal.trouble = (
                f"Rank {child.rank} has done nothing for {_IDLE_S:.0f} s{where}: "
                "it waits for something that a virtual cluster does not have."
            )
            return


def _cpu_seconds(pid: int | None) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stack_of(child: Child, folder: Path) -> str:
    """Where the process is, by its own account."""
    errors = output_of(folder, child.rank)[1]
    before = errors.stat().st_size
    if child.process.pid is not None:
        os.kill(child.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    with errors.open() as lines:
        lines.seek(before)
        frames = [line.strip() for line in lines if line.startswith("  File")]
    return f", at {frames[0].removeprefix('File ')}" if frames else ""


def _stop(child: Child) -> None:
    child.pipe.close()
    if child.report is None and child.process.is_alive():
        child.process.terminate()
    child.process.join(5)
    if child.process.is_alive():
        child.process.kill()
        child.process.join()
