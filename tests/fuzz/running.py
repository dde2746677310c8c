"""Runs cases, each in a process of its own, and holds each to the contract.

    exit 0, or 1 where the command says that something does not fit, or 2 with a sentence; no traceback;
    under 1 GiB and 10 s; nothing written but what was asked for, nothing started, nothing connected to.

A case is a kind and a number. Its process is forked from one that has loaded every module, so that a case takes
milliseconds; the operating system counts its memory and time, and ends it where it takes too much.
"""

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import pkgutil
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NoReturn

from fuzz import seeds
from fuzz.kinds import KINDS, Call, lay_seed, make, readable
from tonnage.errors import TonnageError
from tonnage.models import from_config

MOST_BYTES = 2**30
MOST_S = 10
# A process that waits takes no time of its own; this is a clock's, and generous: the machine may be busy.
_PATIENCE_S = 40
_UNCAUGHT = 70
_LONGEST_SENTENCE = 2000
_MAY_NOT_FIT = {"diff", "replay", "plan"}
_OUTPUTS = {"out.json", "out.html", "out"}
_FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "pickle.find_class",
)
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Failure:
    """A case that broke the contract. `sign` is the same for cases that break it in the same way."""

    kind: str
    number: int
    sign: str
    call: str
    said: str

    @property
    def case(self) -> str:
        """The name by which it is made again."""
        return f"{self.kind}/{self.number}"


@dataclass(frozen=True)
class Ending:
    """How a case's process ended."""

    status: int
    signal: int
    seconds: float
    most_bytes: int
    out: str
    err: str
    trespasses: str


_ROOMS = (
    "allocator",
    "budget",
    "commands",
    "explain",
    "hardware",
    "models",
    "planner",
    "recording",
    "report",
    "roofline",
)


def prepare(kinds: Iterable[str]) -> None:
    """Load what the cases will need once, before they are forked: modules, tables and seeds."""
    for room in _ROOMS:
        package = importlib.import_module(f"tonnage.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"tonnage.{room}."):
            if ".cuda" not in module.name:
                importlib.import_module(module.name)
    if any(KINDS[kind].needs_torch for kind in kinds):
        for name in ("plan", "sharding.deepspeed"):
            importlib.import_module(f"tonnage.fit.{name}")
    if "request" in kinds:
        importlib.import_module("tonnage.serve.server.schemas")
    for make_seeds in (
        seeds.recordings,
        seeds.clusters,
        seeds.snapshots,
        seeds.event_lists,
        seeds.traces,
        seeds.tables,
    ):
        make_seeds()
    for config in seeds.configs():
        from_config(config)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        # Parsers of command lines and printers load more when they are first used.
        lay_seed(Path(folder))
        _called(["show", f"{folder}/seed", "--json", f"{folder}/out"])
    # What a case finds in memory is not its garbage.
    gc.freeze()
    sys.dont_write_bytecode = True


def run_case(kind: str, number: int, folder: Path) -> Failure | None:
    """One case, in a folder that is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    lay_seed(folder)
    call_file = folder / "call"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _live(kind, number, work, folder)
    _, status, used = os.wait4(child, 0)
    ending = Ending(
        status=os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else -1,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        seconds=min(used.ru_utime + used.ru_stime, time.monotonic() - began),
        most_bytes=used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        out=_text(folder / "out"),
        err=_text(folder / "err"),
        trespasses=_text(folder / "trespasses"),
    )
    called = _text(call_file)
    sign = _judged(ending, called, work)
    return Failure(kind, number, sign, called, ending.err[-3000:]) if sign else None


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""


# ── in the case's own process ──


def _live(kind: str, number: int, work: Path, folder: Path) -> NoReturn:
    """Make the file, run the command, exit. What goes wrong before the command is a fault of the fuzzer."""
    status = _UNCAUGHT
    try:
        os.chdir(work)
        _limit()
        call = make(KINDS[kind], Random(f"{kind}/{number}"), work)
        (folder / "call").write_bytes(readable(call).encode("utf-8", "surrogateescape"))
        _redirect(folder)
        _watch(folder, work)
        status = _called(call)
        sys.stdout.flush()
    except BaseException:
        status = _UNCAUGHT
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def _limit() -> None:
    faulthandler.enable()
    size = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    )
    resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MOST_BYTES, size + 2 * MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_PATIENCE_S)


def _redirect(folder: Path) -> None:
    """Standard streams go to files, and are as strict about characters as Python's own."""
    for number, name, errors in ((1, "out", "strict"), (2, "err", "backslashreplace")):
        opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        stream = io.TextIOWrapper(
            os.fdopen(number, "wb", closefd=False), encoding="utf-8", errors=errors, line_buffering=True
        )
        setattr(sys, "stdout" if number == 1 else "stderr", stream)
    # Where it hung, or what took its time.
    faulthandler.register(signal.SIGXCPU, sys.stderr, chain=True)
    faulthandler.register(signal.SIGALRM, sys.stderr, chain=True)


def _watch(folder: Path, work: Path) -> None:
    """Note whatever is written elsewhere, started or connected to."""
    notes = os.open(folder / "trespasses", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def inside(path: object) -> bool:
        return isinstance(path, int) or (
            isinstance(path, str | bytes) and Path(os.path.abspath(os.fsdecode(path))).is_relative_to(work)
        )

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING and not inside(arguments[0]):
            os.write(notes, f"wrote {arguments[0]!r}\n".encode("utf-8", "replace"))
        elif event in _FORBIDDEN or (event in _CHANGES and not inside(arguments[0])):
            os.write(notes, f"{event} {arguments!r}\n".encode("utf-8", "replace"))

    sys.addaudithook(hook)


def _called(call: Call) -> int:
    """The exit status that a shell would see; an exception that no one caught is `_UNCAUGHT`."""
    from tonnage.commands.main import main

    if not isinstance(call, list):
        try:
            call()
        except TonnageError as error:
            print(f"tonnage: {error.words}", file=sys.stderr)
            return error.exit_code
        return 0
    sys.argv = ["tonnage", *call]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


# ── the contract ──


def _judged(ending: Ending, call: str, work: Path) -> str:
    """What is wrong; nothing where the contract was kept."""
    return next(filter(None, _faults(ending, call, work)), "")


def _faults(ending: Ending, call: str, work: Path) -> Iterator[str]:
    if ending.signal in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL):
        yield f"took more than {MOST_S} s, in {_frame(ending.err, first=True)}"
    if ending.signal:
        yield f"died of signal {ending.signal}, in {_frame(ending.err, first=True)}"
    if ending.status == _UNCAUGHT or "Traceback (most recent" in ending.err:
        yield f"{_exception(ending.err)} in {_frame(ending.err)}"
    if ending.most_bytes > MOST_BYTES:
        yield f"took more than 1 GiB: {call.split()[1]}"
    if ending.trespasses:
        yield f"trespassed: {ending.trespasses.splitlines()[0][:200]}"
    yield _wrong_exit(ending, call)
    yield _wrong_files(work)


def _wrong_exit(ending: Ending, call: str) -> str:
    command = call.split()[1]
    if ending.status not in (0, 2) and not (ending.status == 1 and command in _MAY_NOT_FIT):
        return f"exit {ending.status} of {command}"
    if ending.status == 2 and not ending.err.strip():
        return f"exit 2 of {command} without a sentence"
    # What argparse and click say repeats the command line.
    if ending.status == 2 and len(ending.err) > _LONGEST_SENTENCE and ending.err.startswith("tonnage:"):
        return f"a sentence of {len(ending.err) // 1000},000 characters: {ending.err[:40]}"
    if "\x1b" in ending.err or "\x1b" in ending.out:
        return f"an escape sequence in the words of {command}"
    return ""


def _wrong_files(work: Path) -> str:
    more = [path.name for path in work.iterdir() if path.name.startswith(".")]
    if more:
        return f"left {more[0]} behind"
    answer = work / "out.json"
    try:
        json.loads(answer.read_text("utf-8"), parse_constant=_no_constant) if answer.is_file() else None
    except ValueError as error:
        return f"wrote JSON that is none: {error}"
    return ""


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)


def _exception(err: str) -> str:
    return next(
        (
            line.split(":")[0]
            for line in reversed(err.splitlines())
            if re.match(r"[A-Za-z_.]+(Error|Exception|Iteration|Interrupt)\b", line)
        ),
        "exception",
    )


def _frame(err: str, first: bool = False) -> str:
    """The innermost place in tonnage that a traceback names."""
    found = re.findall(r'File "[^"]*src/tonnage/([^"]+)", line (\d+),? in (\S+)', err)
    place = (found[0] if first else found[-1]) if found else ("the fuzzer", "0", "?")
    return f"{place[0]}:{place[2]}"
