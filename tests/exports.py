"""Plans to export, and the real libraries to load what comes of them, each in a fork of a process that has them.

DeepSpeed and torchtitan live in a folder apart (`make setup`), which only those processes see: accelerate, transformers
and Lightning act otherwise where they find DeepSpeed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.budget.training.configuration import Configuration
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.export import TrainingRun, export_training

ENGINES = Path(sys.prefix) / "engines"


def plan(model: str = "llama-3.1-8b", gpus: str = "8xh200", **choices: Any) -> TrainingRun:
    """A launch; data parallelism fills the cluster, and shards over all of it, unless said."""
    cluster = find_cluster(gpus)
    split = choices.get("tp", 1) * choices.get("pp", 1) * choices.get("cp", 1)
    choices.setdefault("data", cluster.gpus // split)
    choices.setdefault("shard", choices["data"])
    return TrainingRun(model=model, shape=find_model(model), cluster=cluster, configuration=Configuration(**choices))


def fsdp2(**choices: Any) -> TrainingRun:
    """A plan for FSDP2, stage 3 unless said."""
    return plan(**{"framework": "fsdp2", "zero": 3, **choices})


def deepspeed(**choices: Any) -> TrainingRun:
    """A plan for DeepSpeed, stage 3 unless said."""
    return plan(**{"framework": "deepspeed", "zero": 3, **choices})


def exported(launch: TrainingRun, folder: Path) -> dict[str, str]:
    """The files of a plan, by name."""
    return {path.name: path.read_text() for path in export_training(launch, folder)}


def load_each(program: str, plans: Mapping[str, TrainingRun], folder: Path, **environment: str) -> dict[str, Any]:
    """What a program makes of each plan's folder. It defines `load()`, which runs in there and returns plain data."""
    for name, launch in plans.items():
        export_training(launch, folder / name)
    folders = [str(folder / name) for name in plans]
    done = _loader().run(WITHOUT_TORCHVISION + program + _LOAD_ALL, folders, environment)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(plans, answers, strict=True))


class _Loader:
    """Python with the engines in sight, which imports what takes seconds once and forks for each program."""

    def __init__(self) -> None:
        assert ENGINES.is_dir(), "the engines are not installed: run `make setup`"
        known = {**os.environ, "PYTHONPATH": str(ENGINES), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", WITHOUT_TORCHVISION + _FORK_FOR_EACH]
        self._process = subprocess.Popen(command, env=known, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self, program: str, arguments: list[str], environment: dict[str, str]
    ) -> "subprocess.CompletedProcess[str]":
        """Run the program with these arguments and this environment besides."""
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory() as folder:
            streams = [f"{folder}/output", f"{folder}/errors"]
            request = {"program": program, "arguments": arguments, "environment": environment, "streams": streams}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            status = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(arguments, status, *(Path(stream).read_text() for stream in streams))


_loader = cache(_Loader)

# torchvision built for CUDA fails beside a CPU torch, and half of transformers with it: here there is none.
WITHOUT_TORCHVISION = "import sys; sys.modules['torchvision'] = None\n"

_FORK_FOR_EACH = """
import json, os, signal

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed logs to standard output
import accelerate.utils, deepspeed
from transformers import Trainer

for line in sys.stdin:
    request = json.loads(line)
    if run := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]), file=answers, flush=True)
        continue
    signal.alarm(600)
    for number, stream in enumerate(request["streams"], 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    exec(request["program"], {"__name__": "__main__"})
    sys.exit()
"""

_LOAD_ALL = """
import json, os, sys
answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    answers.append(load())
print("\\n" + json.dumps(answers))
"""
