"""Real ranks under gloo: a process that has loaded everything once, and forks the ranks of each program from there.

    echo '["DIRECTORY", "steps:2", "steps:4"]' | python tests/fit/sharding/worlds.py

Forked before any tensor was made, a rank costs nothing to start. A program is a function of `rank_programs` or
`rank_mixtures`; what it returns, or the error that it raises, is the rank's answer. A rank that is not through in time is
ended.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

TIME_LIMIT_S = 60.0
_ANSWER = "answer: "


def run(directory: Path, *programs: str) -> dict[str, list[dict[str, Any]]]:
    """The answers of every rank of every program, "steps:4" being `steps` on four ranks."""
    process = _server()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([str(directory), *programs]) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith(_ANSWER):
            return dict(json.loads(line.removeprefix(_ANSWER)))
    raise AssertionError("the process that forks ranks has ended")


@cache
def _server() -> "subprocess.Popen[str]":
    """One for all tests of a session: it ends with their end of its input."""
    command = [sys.executable, "-W", "ignore", __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from fit.sharding import rank_mixtures, rank_programs

    for line in sys.stdin:
        directory, *programs = json.loads(line)
        found = {}
        for program in programs:
            name, _, ranks = program.partition(":")
            folder = Path(directory) / program
            folder.mkdir()
            home = rank_programs if hasattr(rank_programs, name) else rank_mixtures
            found[program] = _world(getattr(home, name), int(ranks), folder)
        print(_ANSWER + json.dumps(found), flush=True)


def _world(program: Any, ranks: int, folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as meeting:
        meeting.bind(("127.0.0.1", 0))
        port = str(meeting.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            os.environ.update(where | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            _be_a_rank(program, rank, folder)
        children.append(child)
    return _wait(children, folder)


def _be_a_rank(program: Any, rank: int, folder: Path) -> None:
    """Ends the process, as an interpreter would after an error, with the connections that it had."""
    import torch

    os.dup2(os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)  # what it says to people
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    try:
        answer = {"value": program(rank, folder)}
    except BaseException as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    os._exit(0)


def _wait(children: list[int], folder: Path) -> list[dict[str, Any]]:
    started = time.monotonic()
    ended: dict[int, dict[str, Any]] = {}
    while len(ended) < len(children) and time.monotonic() < started + TIME_LIMIT_S:
        for rank, child in enumerate(children):
            if rank not in ended and os.waitpid(child, os.WNOHANG)[0]:
                ended[rank] = {"ended after": time.monotonic() - started}
        time.sleep(0.02)
    for rank, child in enumerate(children):
        if rank not in ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            ended[rank] = {"hung": True}
    return [ended[rank] | _answer(folder, rank) for rank in range(len(children))]


def _answer(folder: Path, rank: int) -> dict[str, Any]:
    answer, said = folder / f"{rank}.json", folder / f"{rank}.txt"
    return dict(json.loads(answer.read_text())) if answer.exists() else {"said": said.read_text()}


if __name__ == "__main__":
    main()
