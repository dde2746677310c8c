"""Parses a command line that starts a training: `python`, `torchrun`, `accelerate launch`, `deepspeed`, or a script
alone.

A launcher reads its own flags, environment and files: it runs in a separate process up to where it would start the
ranks (`asking` stops it there), and reports what it would have started. So arguments are interpreted by the installed
launcher itself.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tonnage.errors import BadLayout, MissingPart, RequestError, ScriptNotFound
from tonnage.hardware.cluster import Cluster, find_cuda_cluster
from tonnage.script.running import WHAT_RUNS, Program

# Launchers by command and by module, with their package.
_LAUNCHERS = {
    "torchrun": "torch", "torch.distributed.run": "torch", "torch.distributed.launch": "torch",
    "accelerate": "accelerate", "accelerate-launch": "accelerate", "accelerate.commands.launch": "accelerate",
    "deepspeed": "deepspeed", "deepspeed.launcher.runner": "deepspeed",
}  # fmt: skip
_OTHERS = "mpirun mpiexec srun horovodrun composer ray uv poetry conda pipenv env nohup".split()
_FLAGS_OF_PYTHON = frozenset("bBdEiIOPqRsSuvx")
_FLAGS_WITH_A_VALUE = ("-W", "-X")
LOCAL_RANK = "${local_rank}"  # torchrun's syntax


@dataclass(frozen=True)
class LaunchCommand:
    """What to run, with which arguments, and with how many processes (0: a single process without ranks)."""

    program: Program
    arguments: tuple[str, ...] = ()  # the program's own; LOCAL_RANK in them is replaced for each rank
    hosts: int = 0
    per_host: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_ranks(self) -> bool:
        """Whether a launcher starts it, and each process finds its rank in the environment."""
        return self.per_host > 0

    def cluster(self, gpu: str, cluster: Cluster | None) -> Cluster:
        """Return the cluster it needs: as many cards as the launcher starts processes, of that kind or from that cluster."""
        if cluster is None:
            return find_cuda_cluster(f"{self.hosts}x{self.per_host}x{gpu}")
        if self.hosts > cluster.hosts or self.per_host > cluster.gpus_per_host:
            raise BadLayout(
                f"The launcher starts {self.hosts} × {self.per_host} processes (hosts × processes), and --gpus names "
                f"{cluster.hosts} × {cluster.gpus_per_host} GPUs.",
                hint=f"Leave the number to the launcher: --gpu {cluster.gpu.key}",
            )
        return replace(cluster, hosts=self.hosts, gpus_per_host=self.per_host)


def read_launch(words: Sequence[str], *, is_module: bool = False, gpus: int = 1) -> LaunchCommand:
    """Parse a command for a host with `gpus` GPUs; raise an error with the reason if it cannot be run."""
    first, *rest = words
    if is_module:
        return _of_python(["-m", *words], ("-m", first), gpus)
    name = Path(first).name
    if name.startswith("python") and not name.endswith(".py"):
        return _of_python(rest, (), gpus)
    if name in _LAUNCHERS:
        return _asked(name, rest, tuple(words), gpus)
    if name in _OTHERS:
        raise ScriptNotFound(
            f"{name} is not a launcher that Tonnage knows, and the command was not started.",
            hint=f"{WHAT_RUNS} For many GPUs without a launcher: tonnage run --gpus 8xh200 SCRIPT",
        )
    return LaunchCommand(Program.of_file(first).check(), tuple(rest))


def _of_python(words: Sequence[str], command: tuple[str, ...], gpus: int) -> LaunchCommand:
    words = list(words)
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        word = words.pop(0)
        if word.startswith(_FLAGS_WITH_A_VALUE):
            del words[: word in _FLAGS_WITH_A_VALUE]
        elif not set(word[1:]) <= _FLAGS_OF_PYTHON:
            raise ScriptNotFound(f"python {word} is not taken.", hint=WHAT_RUNS)
    if len(words) < 1 + (words[:1] == ["-m"]) or words[0] in ("-c", "-"):
        raise ScriptNotFound("There is no file in this command of python.", hint=WHAT_RUNS)
    if words[0] == "-m":
        _, name, *rest = words
        if name in _LAUNCHERS:
            return _asked(name, rest, ("-m", name, *rest), gpus)
        return LaunchCommand(Program(name, "module", ("-m", name)).check(), tuple(rest))
    return LaunchCommand(Program.of_file(words[0], command).check(), tuple(words[1:]))


def _asked(launcher: str, words: Sequence[str], command: tuple[str, ...], gpus: int) -> LaunchCommand:
    """Return what a launcher would start; it prints its own errors itself."""
    if launcher == "accelerate":
        if words[:1] != ["launch"]:
            raise ScriptNotFound(
                f"accelerate {' '.join(words[:1])} starts no training.", hint="Write: accelerate launch"
            )
        words = words[1:]
    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder:
        answer = Path(folder) / "answer.json"
        ask = [sys.executable, "-m", "tonnage.virtual.cluster.asking", str(answer), _LAUNCHERS[launcher], launcher]
        done = subprocess.run([*ask, str(gpus), *words], check=False)
        if not answer.exists():
            if done.returncode == 0:  # it was called with --help
                raise SystemExit(0)
            raise RequestError(f"{launcher} did not take its words; what it says is above.", hint="Mend them.")
        said = json.loads(answer.read_text())
    if missing := said.get("missing"):
        problem = f"{launcher} needs {missing}, which is not installed in this environment."
        raise MissingPart(problem, hint=f"Install it: pip install {missing}")
    if problem := said.get("problem"):
        raise RequestError(
            f"{launcher}: {problem}", hint="Mend its words, or run the script: tonnage run --gpus 8xh200 SCRIPT"
        )
    inner = _of_python(said["words"], (), gpus)
    own = sum(LOCAL_RANK not in word for word in inner.arguments)
    program = replace(inner.program, command=command[: len(command) - own])
    return LaunchCommand(program, inner.arguments, said["hosts"], said["per_host"], said["environment"])
