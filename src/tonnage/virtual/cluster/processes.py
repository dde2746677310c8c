"""Runs the ranks of one round as processes, forked from one that has torch loaded, each connected to the hub by a
pipe.

A rank's output goes to its own file and is forwarded from there. A process that neither computes nor calls for a
while waits for something that no peer can provide (a socket, a file): the rank is reported and the round ends.
"""

import ctypes
import faulthandler
import os
import re
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
from typing import Any, Protocol

from tonnage.script.lines import LineFinder
from tonnage.virtual.cluster.calls import Payload, at
from tonnage.virtual.cluster.exchange import HubExchange
from tonnage.virtual.cluster.hub import Answer, Hub, Journal

_POLL_S = 1.0
_IDLE_S = 10.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """A rank's process."""

    rank: int
    process: ForkProcess
    pipe: Connection
    report: Any = None
    done: tuple[int, ...] = ()
    idle_since_s: float = field(default_factory=time.monotonic)


class Director(Protocol):
    """Controls a round: what each rank does, which ranks run, and how to judge the results."""

    def act(self, rank: int, exchange: HubExchange) -> Any:
        """Run the rank, in its own process, and return a report."""

    def failed(self, report: Any) -> tuple[str, bool]:
        """Return why a rank failed ("" if it did not), and whether that ends all others."""

    def widen(self, standing: Mapping[int, int], journal: Journal) -> Mapping[int, int]:
        """Return the mapping of ranks to representatives after groups were made."""

    def widen_at_end(self, standing: Mapping[int, int], reports: Mapping[int, Any]) -> Mapping[int, int]:
        """Return the mapping after all ranks ended well, with more ranks if some should still run."""

    def alike(self, one: Payload, other: Payload) -> bool:
        """Whether two ranks contributed the same."""

    def listen(self) -> None:
        """Called regularly: ranks may have printed something."""


class Round:
    """Ranks that run together, and others that join them, until all have ended or none can continue."""

    def __init__(self, standing: Mapping[int, int], director: Director, folder: Path) -> None:
        self.hub = Hub(standing, director.widen, director.alike)
        self._director, self._folder = director, folder
        self._children: dict[int, Child] = {}
        self._by_pipe: dict[Connection, Child] = {}
        self._polling_since_s: float | None = None

    @property
    def reports(self) -> dict[int, Any]:
        """The reports of the ranks that finished, by rank."""
        return {rank: child.report for rank, child in sorted(self._children.items()) if child.report is not None}

    @property
    def trouble(self) -> str:
        """The problem between ranks; "" if there is none."""
        return self.hub.journal.trouble

    def run(self) -> None:
        """Run until all ranks have ended, one of them ends all, or the round is stale."""
        try:
            while self._goes_on():
                for rank in sorted(self.hub.running - set(self._children)):  # ranks that joined
                    child = self._children[rank] = _start(rank, self._director.act, self._folder)
                    self._by_pipe[child.pipe] = child
                self._serve()
                self._director.listen()
        finally:
            for child in self._children.values():
                _stop(child)
        if not self.trouble and not any(self.hub.ended.values()):
            self.hub.journal.trouble = self.hub.unmatched()

    def _goes_on(self) -> bool:
        journal, hub = self.hub.journal, self.hub
        if journal.trouble or journal.stale:
            return False
        if hub.running <= set(hub.ended) and not any(hub.ended.values()):
            hub.join(self._director.widen_at_end(hub.standing, self.reports))
        return not hub.running <= set(hub.ended)

    def _serve(self) -> None:
        ready = wait(list(self._by_pipe), timeout=_POLL_S)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            self._hear(pipe, self._by_pipe[pipe])
            if self.trouble:
                return
        if not ready:
            _look_for_idle(self._by_pipe, self.hub, self._folder)
        self._polling_since_s = _look_for_polling(self.hub, self._polling_since_s)

    def _hear(self, pipe: Connection, child: Child) -> None:
        child.idle_since_s = time.monotonic()
        try:
            words = pipe.recv()
        except EOFError:
            del self._by_pipe[pipe]
            child.process.join()
            status = child.process.exitcode
            how = f"ended with status {status} before the script did (os._exit, or a crash in native code)"
            if status is not None and status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
            self._end(child.rank, f"its process {how}", ends_all=True)
            return
        if words[0] == "finish":
            child.report = words[1]
            del self._by_pipe[pipe]
            why, ends_all = self._director.failed(words[1])
            self._end(child.rank, why, ends_all)
        else:
            self.hub.hear(child.rank, words, _answerer(pipe))

    def _end(self, rank: int, why: str, ends_all: bool) -> None:
        self.hub.end(rank, why)
        if ends_all and not self.trouble:
            self.hub.journal.trouble = f"Rank {rank}: {why}"


def output_of(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the files for a rank's standard output and standard error."""
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
    parents.close()
    # On Linux, ranks are killed when the parent is.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor, path in zip((1, 2), output_of(folder, rank), strict=True):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1, file=_stack_file(folder, rank).open("w"), all_threads=False)
    exchange = HubExchange(pipe)
    exchange.finish(act(rank, exchange))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _answerer(pipe: Connection) -> Callable[[Answer], None]:
    def answer(words: Answer) -> None:
        with suppress(BrokenPipeError):
            pipe.send(words)

    return answer


def _look_for_idle(by_pipe: dict[Connection, Child], hub: Hub, folder: Path) -> None:
    """End the round if a rank neither waits in the hub nor computes, itself or in child processes."""
    now_s = time.monotonic()
    for child in by_pipe.values():
        done = _done_by(child.process.pid)
        if done != child.done or hub.is_waiting(child.rank):
            child.done, child.idle_since_s = done, now_s
        elif now_s - child.idle_since_s > _IDLE_S:
            hub.journal.trouble = (
                f"Rank {child.rank} has done nothing for {_IDLE_S:.0f} s{at(_line_of(child, folder))}: it waits for "
                "something that a virtual cluster does not have. Leave this part out of the virtual run."
            )
            return


def _look_for_polling(hub: Hub, polling_since_s: float | None) -> float | None:
    """Return since when all running ranks only wait or poll; end the round if that lasts too long."""
    words = hub.nobody_answers()
    if not words:
        return None
    now_s = time.monotonic()
    since_s = now_s if polling_since_s is None else polling_since_s
    if now_s - since_s > _IDLE_S:
        hub.journal.trouble = words
    return since_s


def _done_by(pid: int | None) -> tuple[int, ...]:
    """Return the CPU ticks and the bytes read and written so far by a process and its children."""
    done = [0, 0]
    for each in [pid, *_children_of(pid)]:
        with suppress(OSError, ValueError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            done[0] += int(fields[11]) + int(fields[12])
            done[1] += sum(int(line.split()[1]) for line in Path(f"/proc/{each}/io").read_text().splitlines()[:2])
    return tuple(done)


def _children_of(pid: int | None) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            own = [int(word) for word in path.read_text().split()]
            found += [each for child in own for each in (child, *_children_of(child))]
    return found


def _line_of(child: Child, folder: Path) -> str:
    """Return the script's line at which the process is, by its faulthandler traceback."""
    if child.process.pid is not None:
        os.kill(child.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    said = re.findall(r'File "(.+)", line (\d+)', _stack_file(folder, child.rank).read_text())
    lines = LineFinder()
    return next((f"{Path(path).name}:{number}" for path, number in said if lines.is_own(path)), "")


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack"


def _stop(child: Child) -> None:
    child.pipe.close()
    if child.report is None and child.process.is_alive():
        child.process.terminate()
    child.process.join(5)
    if child.process.is_alive():
        child.process.kill()
        child.process.join()
