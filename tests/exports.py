"""Plans to export, and the real libraries to load what comes of them, each in a process of its own.

DeepSpeed and torchtitan live in a folder apart (`make setup`), which only those processes see: accelerate, transformers
and Lightning act otherwise where they find DeepSpeed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
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
    done = run_with_engines(
        "-c", WITHOUT_TORCHVISION + program + _LOAD_ALL, *(str(folder / name) for name in plans), **environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(plans, answers, strict=True))


def run_with_engines(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with the engines in sight."""
    assert ENGINES.is_dir(), "the engines are not installed: run `make setup`"
    known = {**os.environ, "PYTHONPATH": str(ENGINES), "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run([sys.executable, *words], env=known, capture_output=True, text=True, timeout=600)


# torchvision built for CUDA fails beside a CPU torch, and half of transformers with it: here there is none.
WITHOUT_TORCHVISION = "import sys; sys.modules['torchvision'] = None\n"

_LOAD_ALL = """
import json, os, sys
answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    answers.append(load())
print("\\n" + json.dumps(answers))
"""
