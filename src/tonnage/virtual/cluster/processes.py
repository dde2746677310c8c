"""The ranks of one round as processes: forked from one that has torch loaded, each at the end of a pipe to the hub.

What a rank prints goes to a file of its own, and is passed on from there. A process that neither computes nor calls for
a while waits for something that no peer can give it (a socket, a file): it is named and ended.
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
    """Whoever has the ranks run: what each does, who runs, and what to make of it."""

    def act(self, rank: int, exchange: HubExchange) -> Any:
        """In the rank's own process: its work, and a report of it."""

    def failed(self, report: Any) -> tuple[str, bool]:
        """Why a rank failed ("" where it did not), and whether that ends all others."""

    def widen(self, standing: Mapping[int, int], journal: Journal) -> Mapping[int, int]:
        """Groups were made: who stands for whom now."""

    def widen_at_end(self, standing: Mapping[int, int], reports: Mapping[int, Any]) -> Mapping[int, int]:
        """All have ended well: the same, if more ranks should run after all."""

    def alike(self, one: Payload, other: Payload) -> bool:
        """Whether two ranks gave the same."""

    def listen(self) -> None:
        """Something may have been printed."""


class Round:
    """Some ranks that run together, and others that join them, until all have ended or nothing can go on."""

    def __init__(self, standing: Mapping[int, int], director: Director, folder: Path) -> None:
        self.hub = Hub(standing, director.widen, director.alike)
        self._director, self._folder = director, folder
        self._children: dict[int, Child] = {}
        self._by_pipe: dict[Connection, Child] = {}
        self._polling_since_s: float | None = None

    @property
    def reports(self) -> dict[int, Any]:
        """Of those that said a last word, by rank."""
        return {rank: child.report for rank, child in sorted(self._children.items()) if child.report is not None}

    @property
    def trouble(self) -> str:
        """ "" where nothing went wrong between ranks."""
        return self.hub.journal.trouble

    def run(self) -> None:
        """Until all have ended, one of them ends all, or what they did turns out to be stale."""
        try:
            while self._goes_on():
                for rank in sorted(self.hub.running - set(self._children)):  # those who joined
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
    # Ended from outside, the parent takes its ranks with it; on Linux, the only system that can say so.
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
    """A rank that does not wait in the hub must compute, itself or in processes of its own."""
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
    """All that run wait, or ask for what nobody sets: since when."""
    words = hub.nobody_answers()
    if not words:
        return None
    now_s = time.monotonic()
    since_s = now_s if polling_since_s is None else polling_since_s
    if now_s - since_s > _IDLE_S:
        hub.journal.trouble = words
    return since_s


def _done_by(pid: int | None) -> tuple[int, ...]:
    """Ticks of the processor and bytes read and written so far, by a process and its children."""
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
    """The script's line where the process is, by its own account."""
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
