"""Runs each rank in its own process, forked from one that has torch loaded and connected to the hub by a pipe: the script
on a virtual GPU of the cluster.

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from tonnage.hardware.cluster import Cluster
from tonnage.recording import Recording
from tonnage.recording.cluster import WholeModel
from tonnage.recording.recording import HOST, HOSTS
from tonnage.recording.records import Outcome
from tonnage.script.launchers import LOCAL_RANK
from tonnage.script.lines import LineFinder
from tonnage.script.running import Program, run_as_main
from tonnage.virtual.builds import new_session
from tonnage.virtual.cluster.exchange import HubExchange, OwnExchange, PeerError, at
from tonnage.virtual.cluster.hub import Answer, Hub
from tonnage.virtual.going_on import Stopped
from tonnage.virtual.imports import quick_imports
from tonnage.virtual.script import recorded

_IDLE_S = 10.0
_PR_SET_PDEATHSIG = 1
_PORT = 29500  # torchrun's default; nothing listens there


@dataclass(frozen=True)
class RankRun:
    """A rank that ran, and the ranks it represents (including itself)."""

    rank: int
    stands_for: tuple[int, ...]
    recording: Recording
    engine_bytes: dict[str, int]  # that FSDP and DDP hold at the peak for themselves, by name of the ledger's part
    stopped: bool  # ended because another rank failed
    calls: int  # collectives and messages on the card
    whole_model: WholeModel = field(default_factory=WholeModel)

    @property
    def outcome(self) -> Outcome:
        """How the rank ended."""
        return self.recording.header.outcome


def environment_of(rank: int, cluster: Cluster) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
    values: dict[str, object] = {
        "RANK": rank, "LOCAL_RANK": rank % cluster.gpus_per_host, "GROUP_RANK": rank // cluster.gpus_per_host,
        "ROLE_RANK": rank, "ROLE_NAME": "default",
        "WORLD_SIZE": cluster.gpus, "LOCAL_WORLD_SIZE": cluster.gpus_per_host, "GROUP_WORLD_SIZE": cluster.hosts,
        "ROLE_WORLD_SIZE": cluster.gpus,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORT,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "tonnage",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def run_rank(
    rank: int,
    exchange: HubExchange,
    *,
    cluster: Cluster,
    program: Program,
    arguments: Sequence[str],
    torch_version: str | None,
) -> RankRun:
    """Run the script to its end as this rank; which ranks it stands for is known later."""
    os.environ.update(environment_of(rank, cluster))
    own = [word.replace(LOCAL_RANK, os.environ["LOCAL_RANK"]) for word in arguments]
    session = new_session(cluster.gpu, torch_version, cards=cluster.gpus_per_host)
    session.cluster = cluster
    session.open(capture=True)
    from tonnage.virtual.cluster.distributed import install, install_spawn
    from tonnage.virtual.cluster.engines import Engines, WholeModels
    from tonnage.virtual.cluster.member import Member
    from tonnage.virtual.cuda.patches import Patches

    member, engines, patches = Member(rank, cluster.gpus, session, exchange), Engines(session.device), Patches()
    install(member, patches)
    install_spawn(rank, cluster, patches)
    engines.watch(patches)
    whole = WholeModels(rank, cluster.gpus_per_host)
    whole.watch(patches)
    try:
        ending = run_as_main(
            program, own, session.torch, quick_imports(), (PeerError, Stopped), session.stand_ins.explain
        )
    finally:
        patches.undo()
        session.close()
    if not member.groups and cluster.gpus > 1:
        words = "The script never calls init_process_group: no two ranks compute anything together."
        session.stand_ins.assume("torch.distributed", words)
    recording = recorded(session, ending, program, [word for word in arguments if LOCAL_RANK not in word])
    if recording.captured:
        where = {HOSTS: f"{cluster.hosts}x{cluster.gpus_per_host}", HOST: cluster.host.key}
        recording.captured = replace(recording.captured, settings=recording.captured.settings | where)
    stopped = ending.error.startswith(f"{PeerError.__name__}:")
    held = engines.bytes_by_name(recording.live_at_peak)
    return RankRun(rank, (), recording, held, stopped, member.calls, whole.largest)


def install_alone(session: Any, patches: Any) -> None:
    """Make `torch.distributed` a world of one on the session's card, unless torch has NCCL itself."""
    import torch.distributed as dist

    if not dist.is_available() or dist.is_nccl_available():
        return
    from tonnage.virtual.cluster.distributed import install
    from tonnage.virtual.cluster.member import Member

    install(Member(0, 1, session, OwnExchange()), patches)


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

    def live() -> None:
        here.close()
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
        exchange = HubExchange(there)
        exchange.send("finish", act(rank, exchange))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    process = context.Process(target=live, daemon=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    there.close()
    return Child(rank, process, here)


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
