"""Processes of ranks, forked from one that has torch loaded, each connected to the hub by a pipe.

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from tonnage.script.lines import LineFinder
from tonnage.virtual.cluster.calls import at
from tonnage.virtual.cluster.exchange import HubExchange
from tonnage.virtual.cluster.hub import Answer, Hub

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

    def answer(self, words: Answer) -> None:
        """Send the rank what it waits for, if it still lives."""
        with suppress(BrokenPipeError):
            self.pipe.send(words)

    def stop(self) -> None:
        """End the process, by force if it has not reported."""
        self.pipe.close()
        if self.report is None and self.process.is_alive():
            self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def output_of(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the files for a rank's standard output and standard error."""
    return folder / f"rank{rank}.out", folder / f"rank{rank}.err"


def start(rank: int, act: Callable[[int, HubExchange], Any], folder: Path) -> Child:
    """Fork a process that acts as this rank."""
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
    faulthandler.register(signal.SIGUSR1, file=(folder / f"rank{rank}.stack").open("w"), all_threads=False)
    exchange = HubExchange(pipe)
    exchange.send("finish", act(rank, exchange))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def look_for_idle(children: Iterable[Child], hub: Hub, folder: Path) -> None:
    """End the round if a rank neither waits in the hub nor computes, itself or in child processes."""
    now_s = time.monotonic()
    for child in children:
        ticks = moved_bytes = 0  # CPU time, and what was read and written so far
        for each in [child.process.pid, *_children_of(child.process.pid)]:
            with suppress(OSError, ValueError):
                fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
                io = Path(f"/proc/{each}/io").read_text().splitlines()
                moved_bytes += sum(int(line.split()[1]) for line in io[:2])
        done = (ticks, moved_bytes)
        if done != child.done or child.rank in hub.waiting:
            child.done, child.idle_since_s = done, now_s
        elif now_s - child.idle_since_s > _IDLE_S:
            # The script's line at which it is, by its faulthandler traceback.
            if child.process.pid is not None:
                os.kill(child.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            said = re.findall(r'File "(.+)", line (\d+)', (folder / f"rank{child.rank}.stack").read_text())
            lines = LineFinder()
            line = next((f"{Path(path).name}:{number}" for path, number in said if lines.is_own(path)), "")
            hub.journal.trouble = (
                f"Rank {child.rank} has done nothing for {_IDLE_S:.0f} s{at(line)}: it waits for "
                "something that a virtual cluster does not have. Leave this part out of the virtual run."
            )
            return


def look_for_polling(hub: Hub, polling_since_s: float | None) -> float | None:
    """Return since when all running ranks only wait or poll; end the round if that lasts too long."""
    words = hub.nobody_answers()
    if not words:
        return None
    now_s = time.monotonic()
    since_s = now_s if polling_since_s is None else polling_since_s
    if now_s - since_s > _IDLE_S:
        hub.journal.trouble = words
    return since_s


def _children_of(pid: int | None) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            own = [int(word) for word in path.read_text().split()]
            found += [each for child in own for each in (child, *_children_of(child))]
    return found
