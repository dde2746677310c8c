"""Starts `tonnage` from a process that has imported torch already, as a fork of it: seconds faster than a new Python.

A virtual GPU may be opened in a fork of a process that has called `preload()`, which is how the ranks of a cluster start.
Runs whose environment says something to the interpreter, to torch or to the dynamic loader start a Python of their own.
`make test` starts its groups of tests the same way, and one process for each build of torch that forks runs for all of them.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

# Heavy parts of torch that most scripts import, and what each command that is run here loads of Tonnage and rich.
PRELOADED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "torch.utils.data")
PRELOADED += tuple(f"tonnage.commands.{name}" for name in ("app", "certify", "explain", "run"))
PRELOADED += ("tonnage.clock.step", "tonnage.explain", "tonnage.models", "tonnage.report.runs.terminal", "rich.console")
# What many tests import of the libraries, beside that of torch, and never of Tonnage.
TESTED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "torch.utils.data")
TESTED += ("transformers.trainer", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
TESTED += ("hypothesis", "scipy.optimize", "httpx", "rich.console", "typer", "fastapi", "openai")
# Where `make test` tells its groups which sockets lead to processes that fork runs: {path of tonnage: number of the socket}.
SHARED = "TONNAGE_TEST_STARTERS"
_READ_AT_START = (
    "PYTHON",
    "TORCH",
    "OMP_",
    "MKL_",
    "LD_",
    "LC_",
    "CUDA",
    "TRITON",
    "TONNAGE",
    "HOME",
    "XDG_",
    "TMPDIR",
)


def run_forked(
    tonnage: Path,
    words: list[str],
    *,
    timeout_s: float,
    fresh: bool = False,
    of_many: bool = False,
    joined: bool = False,
    **options: Any,
) -> "subprocess.CompletedProcess[str]":
    """Run `tonnage WORDS` and return its outcome; `joined` puts both streams into one, in the order of what was written.

    A run with other options of subprocess.run than `env` and `cwd` has a Python of its own, and so has one that asks for it
    with `fresh`. One of many with the same environment says so: these are forks of a process that has that environment.
    """
    environment = dict(options.get("env") or os.environ)
    differing = {name for name, _ in os.environ.items() ^ environment.items() if name.startswith(_READ_AT_START)}
    differing -= {"PYTHONPATH"}
    if fresh or (differing and not of_many) or options.keys() - {"env", "cwd"}:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if joined else subprocess.PIPE}
        return subprocess.run([str(tonnage), *words], **streams, text=True, timeout=timeout_s, **options)
    number = json.loads(os.environ.get(SHARED, "{}")).get(str(tonnage))
    if differing or number is None:
        starter = _starter(tonnage, tuple((name, environment.get(name)) for name in sorted(differing)))
    else:
        starter = _shared(tonnage, number)
    return starter.run(words, environment, Path(options.get("cwd") or Path.cwd()), timeout_s, joined=joined)


class Starter:
    """The process that forks, and the socket to it. It ends when the socket is closed: with those who have it."""

    def __init__(self, program: Path, channel: socket.socket) -> None:
        self.program, self.channel = program, channel

    @classmethod
    def of(cls, program: Path, environment: dict[str, str], inherited: tuple[int, ...] = ()) -> "Starter":
        """Start the process with this environment and these descriptors. `program` is `tonnage` or `pytest`."""
        channel, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_own:
            # -P: the folder of this file is not on the scripts' path.
            command = [str(program.with_name("python")), "-P", __file__, str(its_own.fileno()), str(program)]
            descriptors = [its_own.fileno(), *inherited]
            subprocess.Popen(command, env=environment, pass_fds=descriptors, stdin=subprocess.DEVNULL)
        return cls(program, channel)

    def run(
        self, words: list[str], env: dict[str, str], cwd: Path, timeout_s: float | None, *, joined: bool
    ) -> "subprocess.CompletedProcess[str]":
        """Fork one run and wait for it. Several may be under way at once."""
        told, telling = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with told, contextlib.ExitStack() as opened:
            request, output, errors = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            files = [request, output, output if joined else errors]
            request.write(json.dumps({"words": words, "env": env, "cwd": str(cwd)}).encode())
            request.seek(0)
            with telling:
                socket.send_fds(self.channel, [b"run"], [telling.fileno(), *(file.fileno() for file in files)])
            pid = int(told.recv(64))
            told.settimeout(timeout_s)
            try:
                status = int(told.recv(64))
            except TimeoutError:
                os.killpg(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired([str(self.program), *words], timeout_s) from None
            said = [Path(f"/proc/self/fd/{file.fileno()}").read_text() for file in files[1:]]
            if joined:
                said[1] = ""
        return subprocess.CompletedProcess([str(self.program), *words], status, *said)


@cache
def _starter(tonnage: Path, differing: tuple[tuple[str, str | None], ...]) -> Starter:
    known = os.environ | {name: value for name, value in differing if value is not None}
    return Starter.of(tonnage, {name: value for name, value in known.items() if (name, None) not in differing})


@cache
def _shared(tonnage: Path, number: int) -> Starter:
    return Starter(tonnage, socket.socket(fileno=number))


def _serve(channel: socket.socket, program: str) -> None:
    """Fork a run for each request until the other side is gone."""
    gc.disable()
    if Path(program).name == "tonnage":
        from tonnage.virtual.builds import preload

        preload()
        for name in PRELOADED:
            importlib.import_module(name)
    else:
        for name in TESTED:
            importlib.import_module(name)
    gc.freeze()  # a fork that collected these objects would copy all of their pages
    gc.enable()
    while True:
        message, descriptors, *_ = socket.recv_fds(channel, 64, 4)
        if not message:
            return
        if watcher := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(watcher, 0)
            continue
        channel.close()
        if os.fork():  # so that the next request need not wait for this one's end
            os._exit(0)
        run = os.fork()
        if run == 0:
            os.close(descriptors[0])
            _become(program, descriptors[1:])  # which raises SystemExit: it never comes back to this loop
        with socket.socket(fileno=descriptors[0]) as told, contextlib.suppress(OSError):
            told.send(str(run).encode())
            told.send(str(os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])).encode())
        os._exit(0)


def _become(program: str, descriptors: list[int]) -> None:
    """Run the request's words as `tonnage`, in its own session, or as `pytest`, as a new process would."""
    is_run = Path(program).name == "tonnage"
    if is_run:
        os.setsid()
    with os.fdopen(descriptors[0]) as file:
        request = json.load(file)
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[2], 2)
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    # Folders of PYTHONPATH that this process does not have come first, after that of the command.
    folders = [
        folder for folder in request["env"].get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", *sys.path)
    ]
    sys.path[:0] = [os.path.dirname(program) if is_run else request["cwd"], *folders]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = [program, *request["words"]]
    sys.modules["__main__"].__file__ = program
    if not is_run:
        import pytest

        sys.exit(pytest.main())
    from tonnage.commands.main import leave, main

    try:
        main()
    except SystemExit as leaving:
        if isinstance(leaving.code, int | None):
            leave(leaving.code or 0)  # without taking torch apart, for commands that would have had none of it
        raise


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
